"""A place to try checkouts in: a state directory that other users can pass through, a mirror, and git run as another user."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path

from gitrepos import ENV, Upstream, git

from mirrord.checkouts.backend import Target
from mirrord.checkouts.gitdirs import Gitdirs
from mirrord.checkouts.leases import Lease, Leases
from mirrord.checkouts.pool import PoolBackend
from mirrord.git.command import Git
from mirrord.git.workers import Workers
from mirrord.model import Backend, CommitId, History, MirrorName, View, utc_now

NAME = MirrorName("psf", "requests")
USER = 12345


class Pool:
    """A pool with one mirror, below a state directory of its own."""

    def __init__(self, state: Path, workers: Workers, backend: PoolBackend) -> None:
        self.mirror = state / "mirrors" / str(NAME)
        self.workers = workers
        self.backend = backend
        self.leases = Leases(state / "checkouts")
        self.leases.open()

    def lease(self, commit: str, *, uid: int = USER, history: History = History.SEALED) -> Lease:
        checkout, directory = self.leases.new_directory()
        tree = git(self.mirror, "rev-parse", f"{commit}^{{tree}}")
        now = utc_now()
        return Lease(
            checkout, directory, NAME, CommitId(commit), tree, None, history, View.AGENT, Backend.POOL, uid, uid, now,
            now + timedelta(hours=1),
        )  # fmt: skip

    async def checkout(self, commit: str, **choices: object) -> Lease:
        lease = self.lease(commit, **choices)  # type: ignore[arg-type]
        await self.backend.create(lease)
        self.leases.save(lease)
        return lease

    def target(self, commit: str) -> Target:
        return Target(CommitId(commit), git(self.mirror, "rev-parse", f"{commit}^{{tree}}"))


@asynccontextmanager
async def running_pool(state: Path, upstream: Upstream) -> AsyncIterator[Pool]:
    mirror = state / "mirrors" / str(NAME)
    mirror.parent.mkdir(parents=True)
    git(state, "clone", "--quiet", "--mirror", upstream.url, str(mirror))
    workers = Workers()
    starter = Git(home=state / "home")
    gitdirs = Gitdirs(state_dir=state, git=starter, workers=workers, mirrors_path=lambda name: state / "mirrors" / str(name))
    backend = PoolBackend(
        state_dir=state, workers=workers, gitdirs=gitdirs, mirrors_path=lambda name: state / "mirrors" / str(name)
    )
    await backend.open()
    try:
        yield Pool(state, workers, backend)
    finally:
        await backend.close()
        await workers.close()


def as_user(tree: Path, *args: str | bytes, uid: int = USER, stdin: bytes | None = None, check: bool = True) -> str:
    """Run git in a checkout as another user, with no `safe.directory`."""
    done = subprocess.run(
        ["git", *args], cwd=tree, input=stdin, env=ENV, user=uid, group=uid, extra_groups=[], capture_output=True, check=False
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
        subprocess.run(["chattr", "-R", "-i", "-a", str(path)], capture_output=True, check=False)
        shutil.rmtree(path)
