"""A place to try checkouts in: a state directory that other users can pass through, a mirror, and git run as another user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal
from gitrepos import ENV, Upstream, git
from mounted_templates import unmount_below

from mirrord.catalog import Catalog
from mirrord.checkouts.backend import CheckoutBackend
from mirrord.checkouts.lease import Base, Directories, Lease, Terms
from mirrord.checkouts.leases import Leases
from mirrord.checkouts.overlay import find_overlay
from mirrord.checkouts.pool.backend import PoolBackend
from mirrord.config import Settings
from mirrord.datasets.service import DatasetFile, Datasets
from mirrord.engine.composition import compose_checkouts
from mirrord.environments.building import Builds
from mirrord.environments.images.importing import Images
from mirrord.environments.leaks import Leaks
from mirrord.environments.probing import Probes
from mirrord.environments.service import Environments
from mirrord.git.command import Git
from mirrord.grading.service import Grading
from mirrord.host.peers import Access, Peer
from mirrord.host.trash import Trash, new_trash, remove_trees
from mirrord.jobs.events import Events
from mirrord.mirrors.service import Mirrors
from mirrord.model import Backend, CommitId, History, MirrorName, View, new_checkout_id, utc_now
from mirrord.protocol import Proof
from mirrord.templates.builder import StoreBuilder
from mirrord.templates.environments import EnvironmentStore
from mirrord.templates.service import Templates
from mirrord.trees.pooled import PoolPaths
from mirrord.workers.pool import Workers

NAME = MirrorName("psf", "requests")
USER = 12345


class Pool:
    """A pool with one mirror, below a state directory of its own."""

    def __init__(
        self, state: Path, workers: Workers, stores: StoreBuilder, backend: PoolBackend
    ) -> None:
        self.mirror = state / "mirrors" / str(NAME)
        self.workers = workers
        self.stores = stores
        self.backend = backend
        self.leases = Leases(state)
        self.leases.open()
        self.timings: dict[str, float] = {}

    def lease(self, commit: str, *, uid: int = USER, history: History = History.SEALED) -> Lease:
        checkout = new_checkout_id()
        return Lease(
            id=checkout, directories=self.leases.directories(checkout), mirror=NAME, history=history,
            backend=Backend.POOL, base=Base(commit=CommitId(commit), tree=self.tree_of(commit)), terms=terms_of(uid),
        )  # fmt: skip

    async def checkout(self, commit: str, **choices: object) -> Lease:
        lease = self.lease(commit, **choices)  # type: ignore[arg-type]
        self.leases.begin(lease)
        self.timings = (await self.backend.create(lease))[1]
        self.leases.put(lease)
        return lease

    async def release(self, lease: Lease) -> None:
        directories = self.leases.release(lease)
        self.backend.released(lease)
        await destroy(self.backend, directories, lease)

    async def place(self, lease: Lease, commit: str) -> PoolPaths:
        """What a worker is told about a checkout that goes to `commit`."""
        store = await self.stores.ensure(NAME, CommitId(commit), lease.history)
        owner, grave = lease.owner, new_trash(lease.directory.parent)
        return PoolPaths(
            lease.directory, lease.private, self.mirror, store.git, store.head, owner, grave
        )

    async def reset(self, lease: Lease, commit: str) -> Proof:
        base = replace(lease.base, commit=CommitId(commit), tree=self.tree_of(commit))
        return await self.backend.reset(replace(lease, base=base), self.leases)

    def tree_of(self, commit: str) -> str:
        return git(self.mirror, "rev-parse", f"{commit}^{{tree}}")


async def destroy(backend: CheckoutBackend, directories: Directories, lease: Lease | None) -> None:
    """Take a checkout down and remove what is left, as the trash does."""
    if not await backend.take_down(directories, lease):
        assert remove_trees([directories.private, directories.public]) == {}


@asynccontextmanager
async def running_pool(state: Path, upstream: Upstream) -> AsyncIterator[Pool]:
    mirror = state / "mirrors" / str(NAME)
    mirror.parent.mkdir(parents=True)
    git(state, "clone", "--quiet", "--mirror", upstream.url, str(mirror))
    workers = Workers()
    starter = Git(home=state / "home")
    stores = StoreBuilder(
        state_dir=state,
        git=starter,
        workers=workers,
        mirrors_path=lambda name: state / "mirrors" / str(name),
        trash=Trash(),
    )
    trash = Trash()
    templates = Templates(
        settings=Settings, state_dir=state, workers=workers, mirrors_path=stores.mirrors_path, stores=stores,
        events=Events(), trash=trash,
    )  # fmt: skip
    await templates.open()
    environments = EnvironmentStore(state, trash)
    backend = PoolBackend(state, workers, templates, stores.mirrors_path, trash, environments)
    await backend.open()
    try:
        yield Pool(state, workers, stores, backend)
    finally:
        await trash.close()
        await backend.close()
        await workers.close()


def as_user(
    tree: Path, *args: str | bytes, uid: int = USER, stdin: bytes | None = None, check: bool = True
) -> str:
    """Run git in a checkout as another user, with no `safe.directory`."""
    done = subprocess.run(
        ["git", *args],
        cwd=tree,
        input=stdin,
        env=ENV,
        user=uid,
        group=uid,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(errors="surrogateescape").rstrip("\n")


@contextmanager
def passable_directory() -> Iterator[Path]:
    """A directory below /tmp that every user may pass through; pytest's own are private."""
    path = Path(tempfile.mkdtemp(prefix="mirrord-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        unmount_below(path)
        subprocess.run(["chattr", "-R", "-i", "-a", str(path)], capture_output=True, check=False)
        shutil.rmtree(path)


# -- the whole service ------------------------------------------------------------------------------------------------

T = TypeVar("T")
ROOT_PEER = Peer(uid=0, gid=0, pid=1)
USER_PEER = Peer(uid=USER, gid=USER, pid=1)


def terms_of(uid: int) -> Terms:
    """The terms of a checkout that an agent of this uid has for an hour."""
    now = utc_now()
    return Terms(
        owner_uid=uid, owner_gid=uid, taken_by=uid, view=View.AGENT,
        created_at=now, expires_at=now + timedelta(hours=1),
    )  # fmt: skip


class Service:
    """Checkouts with real mirrors, datasets and workers, on an event loop in a thread of its own."""

    def __init__(
        self, portal: BlockingPortal, state: Path, settings: Settings, *, with_overlay: bool
    ) -> None:
        self._portal = portal
        self._with_overlay = with_overlay
        self._settings = settings
        self.state = state
        self.now_shift = timedelta()

    async def open(self) -> None:
        self.events = Events()
        self.access = Access(lambda: self._settings)
        self.workers = Workers()
        self.catalog = await Catalog.open(self.state / "catalog.sqlite3", self.workers)
        git_starter = Git(home=self.state / "home")
        parts: dict[str, Any] = {
            "settings": lambda: self._settings,
            "workers": self.workers,
            "events": self.events,
        }
        self.trash = Trash()
        self.mirrors = Mirrors(git=git_starter, catalog=self.catalog, trash=self.trash, **parts)
        await self.mirrors.open()
        self.datasets = Datasets(self.mirrors)
        await self.datasets.open()
        self.stores = StoreBuilder(
            state_dir=self.state,
            git=git_starter,
            workers=self.workers,
            mirrors_path=self.mirrors.path,
            trash=self.trash,
        )
        await self.stores.open()
        store: dict[str, Any] = {
            "state_dir": self.state,
            "workers": self.workers,
            "mirrors_path": self.mirrors.path,
            "trash": self.trash,
        }
        self.templates = Templates(
            settings=lambda: self._settings, stores=self.stores, events=self.events, **store
        )
        await self.templates.open()
        self.environments = EnvironmentStore(self.state, self.trash)
        self.environments.open()
        service = self.state / "mount.sock"
        overlay = (
            await find_overlay(
                service=service, templates=self.templates, environments=self.environments, **store
            )
            if self._with_overlay
            else None
        )
        leaks = Leaks(store=self.environments, mirrors=self.mirrors)
        self.checkouts = compose_checkouts(
            state_dir=self.state, git=git_starter, mirrors=self.mirrors, datasets=self.datasets, templates=self.templates, overlay=overlay,
            environments=self.environments, access=self.access, clock=lambda: utc_now() + self.now_shift, trash=self.trash,
            cover_of=leaks.cover_of, **parts,
        )  # fmt: skip
        self.templates.evict_only_if(lambda: self.checkouts.leases.knows_all)
        await self.checkouts.open()
        builds = Builds(
            place=self.state / "environments", service=service, store=self.environments, checkouts=self.checkouts, mirrors=self.mirrors,
        )  # fmt: skip
        images = Images(
            place=self.state / "environments", store=self.environments, mirrors=self.mirrors
        )
        environments = Environments(
            builds=builds,
            recipes=self.state / "recipes",
            datasets=self.datasets,
            images=images,
            leaks=leaks,
        )
        self.grading = Grading(
            environments=environments, probes=Probes(service),
            state_dir=self.state, mirrors=self.mirrors, datasets=self.datasets, layers=self.checkouts.layers, leasing=self.checkouts.leasing,
            resolver=self.checkouts.resolver, patches=self.checkouts.patches, settings=lambda: self._settings, workers=self.workers,
        )  # fmt: skip

    async def close(self) -> None:
        await self.checkouts.close()
        await self.templates.close()
        await self.mirrors.close()
        await self.trash.close()  # a worker still removes what its test's end removes too
        await self.workers.close()
        await self.catalog.close()

    def restart(self) -> None:
        """End as a kill would, as far as the disk is concerned, and start again."""
        self.call(self.close)
        self.call(self.open)

    def diff(self, checkout: Any) -> bytes:
        """The patch of a checkout, long or short."""
        patch = self.call(self.checkouts.diff, checkout.id, USER_PEER).content
        return patch if isinstance(patch, bytes) else patch.read_bytes()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        async def run() -> T:
            return await function(*args, **kwargs)

        return self._portal.call(run)

    def change(self, section: str = "checkouts", **values: Any) -> None:
        """Change settings of a section."""
        part = getattr(self._settings, section).model_copy(update=values)
        self._settings = self._settings.model_copy(update={section: part})

    def import_instances(self, rows: list[dict[str, str]]) -> None:
        file = self.state / "instances.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.call(self.datasets.import_file, DatasetFile(file, "instances.jsonl", "lab"))

    @property
    def mirror(self) -> Path:
        return self.mirrors.path(NAME)


@contextmanager
def running_service(upstream: Upstream, *, with_overlay: bool = False) -> Iterator[Service]:
    """A service with one synced mirror, with the pool alone or with the overlay too."""
    with passable_directory() as state, start_blocking_portal() as portal:
        for name in ("mirrors", "templates", "datasets", "leases"):
            (state / name).mkdir(mode=0o700)
        (state / "checkouts").mkdir(mode=0o711)
        access = {"group": str(USER), "commits": "any"}  # USER_PEER is a member
        settings = Settings.model_validate({"state_dir": state, "access": access})
        service = Service(portal, state, settings, with_overlay=with_overlay)
        service.call(service.open)
        try:
            service.call(service.mirrors.add, NAME.repo, upstream.url)
            service.call(service.mirrors.sync, NAME)
            yield service
        finally:
            service.call(service.close)


def rich_upstream(upstream: Upstream) -> list[str]:
    """Three commits with everything a tree can hold: links, modes, line ends, a submodule, odd names; a tag on each."""
    upstream.write(
        {
            "README": "one\n" * 5, "src/main.py": "print(1)\n", "src/deep/er/x.txt": "x\n", "docs/page.txt": "page\n",
            "run.sh": "#!/bin/sh\n", "data.bin": bytes(range(256)) * 8, "empty": "", ".gitignore": "build/\n*.o\n!keep.o\n",
            "win.txt": "a\nb\n", ".gitattributes": "win.txt text eol=crlf\nauto.txt text=auto\n", "auto.txt": "t\n",
        }
    )  # fmt: skip
    (upstream.path / "run.sh").chmod(0o755)
    (upstream.path / "link").symlink_to("docs/page.txt")
    (upstream.path / b"caf\xe9.txt".decode(errors="surrogateescape")).write_text("latin\n")
    upstream.git("add", "--all")
    upstream.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},vendor/sub")
    (upstream.path / "vendor/sub").mkdir(parents=True)
    upstream.git("commit", "--quiet", "--message", "one")
    upstream.git("tag", "v1")
    ids = [upstream.git("rev-parse", "HEAD")]
    for n in (2, 3):
        ids.append(
            upstream.commit(
                {
                    "README": f"{n}\n" * 5,
                    f"docs/new{n}.txt": f"{n}\n",
                    "src/main.py": f"print({n})\n",
                }
            )
        )
        upstream.git("tag", f"v{n}")
    return ids


# -- what a call does to the disk -------------------------------------------------------------------------------------

_deeds: list[list[str]] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _deeds:
        return
    if (
        event == "open"
        and isinstance(arguments[0], (str, bytes))
        and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    ):
        _deeds[-1].append(f"write {Path(os.fsdecode(arguments[0])).name}")
    elif event in ("os.link", "os.symlink"):
        _deeds[-1].append(f"link {Path(os.fsdecode(arguments[1])).name}")


sys.addaudithook(_watch)


@contextmanager
def deeds() -> Iterator[list[str]]:
    """The files that this process opens for writing, and the links it makes."""
    _deeds.append([])
    try:
        yield _deeds[-1]
    finally:
        _deeds.pop()


def run_as(uid: int, script: str, tree: Path, service: Service) -> None:
    """Run a script in the checkout. It may fail: what it could do counts."""
    env = {
        **ENV,
        "CANARY": str(service.state / "space/canary"),
        "SPACE": str(service.state / "space"),
    }
    subprocess.run(
        ["sh", "-c", script],
        cwd=tree,
        env=env,
        user=uid,
        group=uid,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    (service.state / "space/canary").unlink(missing_ok=True)
