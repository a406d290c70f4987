"""The overlay backend on its own ground: what a mount, a restart, a reboot and a vanished template
do to a checkout.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyone
import pytest
from checkout_parts import (
    NAME,
    ROOT_PEER,
    USER,
    USER_PEER,
    Service,
    as_user,
    destroy,
    running_service,
    terms_of,
)
from gitrepos import ENV, Upstream, git
from mounted_templates import KERNELS, mounted_below

from mirrord.checkouts.lease import Base, Lease
from mirrord.checkouts.leases import Leases
from mirrord.checkouts.overlay import OverlayBackend
from mirrord.errors import BackendUnavailableError, DiskFullError
from mirrord.host import mounts
from mirrord.host.mounting import LocalMounter
from mirrord.host.overlays import OverlayOrder
from mirrord.host.peers import Peer
from mirrord.model import Backend, CommitId, History, new_checkout_id
from mirrord.protocol import Checkout, Proof, ResetCheckout, StartCheckout
from mirrord.workers.pool import Workers

pytestmark = pytest.mark.root


@pytest.fixture(scope="module", params=KERNELS, ids=str)
def service(rich: Upstream, request: pytest.FixtureRequest) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mounts, "KERNEL", request.param)
        with running_service(rich, with_overlay=True) as running:
            yield running
        assert not mounted_below(running.state / "idmaps")


@pytest.fixture
def checkout(service: Service) -> Iterator[Checkout]:
    made = start(service)
    yield made
    service.call(service.checkouts.release, made.id, USER_PEER)


def start(service: Service, commit: str = "v2") -> Checkout:
    request = StartCheckout(instance=f"psf__requests@{commit}", backend=Backend.OVERLAY)
    return service.call(service.checkouts.checkout, request, USER_PEER)


def reset(service: Service, checkout: Checkout) -> None:
    service.call(service.checkouts.reset, checkout.id, ResetCheckout(), USER_PEER)


def status(checkout: Checkout) -> str:
    return as_user(Path(checkout.path), "status", "--porcelain", "--ignored")


def shell(checkout: Checkout, script: str) -> None:
    """Run a script in the checkout as its owner."""
    subprocess.run(
        ["sh", "-ec", script],
        cwd=checkout.path,
        env=ENV,
        user=USER,
        group=USER,
        extra_groups=[],
        check=True,
        capture_output=True,
    )


def sitting_in(checkout: Checkout) -> subprocess.Popen[bytes]:
    """A process of the owner's that stays inside, and has a file open."""
    script = "exec 3>>held; echo ready; cat; echo more >&3; cat README"
    process = subprocess.Popen(
        ["sh", "-c", script],
        cwd=checkout.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=USER,
        group=USER,
        extra_groups=[],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_process_that_stays_inside_keeps_only_the_old_tree(
    service: Service, checkout: Checkout
) -> None:
    """It continues in the old tree; nothing that it writes reaches the reset checkout."""
    process = sitting_in(checkout)
    reset(service, checkout)
    process.communicate(b"")
    assert status(checkout) == ""
    assert not (Path(checkout.path) / "held").exists()


def test_a_checkout_with_a_process_inside_can_be_released(service: Service) -> None:
    """The directory goes; the process is not waited for."""
    checkout = start(service)
    process = sitting_in(checkout)
    service.call(service.checkouts.release, checkout.id, USER_PEER)
    assert not Path(checkout.path).exists()
    process.communicate(b"")


def test_nobody_reaches_past_the_mount(service: Service, checkout: Checkout) -> None:
    """The layer below the mount is closed to its own owner."""
    layer = service.state / "leases" / checkout.id / "layer"
    assert layer.is_dir()
    looked = subprocess.run(
        ["ls", layer], user=USER, group=USER, extra_groups=[], capture_output=True, check=False
    )
    assert looked.returncode != 0


def test_a_near_checkout_asks_workers_three_times(
    make_upstream: Callable[[str], Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resolving it, with the facts of the commit; its pack; its tree with the index."""
    commits = (upstream := make_upstream("a")).history(3)
    called: list[str] = []
    call = Workers.run

    async def counted(self: Workers, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        called.append(function.__name__)
        return await call(self, function, *args, **kwargs)

    with running_service(upstream, with_overlay=True) as service:
        made = [start(service, commits[1])]
        monkeypatch.setattr(Workers, "run", counted)
        made.append(start(service, commits[2]))
        assert sorted(called) == ["build_layer", "pack_increment", "resolve"]
        for each in made:
            service.call(service.checkouts.release, each.id, USER_PEER)


def start_for(service: Service, uid: int, commit: str = "v2") -> Checkout:
    peer = Peer(uid=uid, gid=uid, pid=os.getpid(), groups=(USER,))
    request = StartCheckout(instance=f"psf__requests@{commit}", backend=Backend.OVERLAY)
    return service.call(service.checkouts.checkout, request, peer)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not on this machine")
@pytest.mark.parametrize("uid", [USER, 23456, 0])
def test_status_of_a_fresh_checkout_opens_no_tracked_file(
    service: Service, tmp_path: Path, uid: int
) -> None:
    """One index is valid for every owner of a checkout, and git has no reason to rewrite it."""
    checkout = start_for(service, uid)
    before = os.stat(f"{checkout.path}/.git/index")
    trace = tmp_path / "trace"
    env = [f"{name}={value}" for name, value in ENV.items()]
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env", "-i", *env]
    tracing = ["strace", "-f", "-o", str(trace), "-e", "trace=openat,open"]
    subprocess.run(
        [*tracing, *become, "git", "status"], cwd=checkout.path, check=True, capture_output=True
    )
    tracked = as_user(Path(checkout.path), "ls-files", uid=uid).splitlines()
    opened = trace.read_text()
    assert [
        name
        for name in tracked
        if f'"{name}"' in opened and not name.endswith((".gitignore", ".gitattributes"))
    ] == []
    assert as_user(Path(checkout.path), "diff-files", uid=uid) == ""
    assert os.stat(f"{checkout.path}/.git/index").st_ino == before.st_ino
    service.call(service.checkouts.release, checkout.id, ROOT_PEER)


@pytest.mark.parametrize("uid", [USER, 23456])
def test_an_edit_that_keeps_the_size_is_seen(service: Service, uid: int) -> None:
    """By git, at once and after `git add` in the same second; and by libgit2, which knows no
    `checkStat`.
    """
    checkout = start_for(service, uid)
    tree = Path(checkout.path)
    owner: dict[str, Any] = {
        "user": uid,
        "group": uid,
        "extra_groups": [],
        "cwd": tree,
        "text": True,
    }
    edit = "tr a-z b-za <README >t && cat t >README && rm t && git status --porcelain"
    add = f"git add README && {edit}"
    (tree / "README").write_text("abc\n")
    os.chown(tree / "README", uid, uid)
    for script, seen in ((edit, " M README"), (add, "MM README")):
        done = subprocess.run(
            ["sh", "-ec", script], env=ENV, **owner, check=True, capture_output=True
        )
        assert done.stdout.splitlines() == [seen]
    look = (
        "import pygit2; found = pygit2.Repository('.').status()\n"
        "print([(path, int(flags)) for path, flags in found.items()])"
    )
    command = [*anyone.python(), "-c", look]
    done = subprocess.run(command, env={"HOME": "/"}, **owner, check=True, capture_output=True)
    assert (
        done.stdout.strip() == "[('README', 258)]"
    )  # GIT_STATUS_INDEX_MODIFIED | GIT_STATUS_WT_MODIFIED, and nothing else
    service.call(service.checkouts.release, checkout.id, ROOT_PEER)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_two_users_with_dozens_of_templates_each_take_nothing_from_each_other(
    make_upstream: Callable[[str], Upstream],
    monkeypatch: pytest.MonkeyPatch,
    kernel: tuple[int, ...],
) -> None:
    """30 and 41 instances, held by both; then the first asks for all of its own again, at once:
    each was built once.
    """
    monkeypatch.setattr(mounts, "KERNEL", kernel)
    upstream = make_upstream("many")
    commits = [upstream.commit({f"d{n % 7}/f{n}": f"{n}\n"}) for n in range(41)]
    with running_service(upstream, with_overlay=True) as service:
        peers = [Peer(uid=uid, gid=uid, pid=os.getpid(), groups=(USER,)) for uid in (USER, 23456)]

        async def take(peer: Peer, commit: str) -> Checkout:
            request = StartCheckout(instance=f"psf__requests@{commit}", backend=Backend.OVERLAY)
            return await service.checkouts.checkout(request, peer)

        async def story() -> list[Checkout]:
            held = [await take(peers[0], commit) for commit in commits[:30]]
            held += [await take(peers[1], commit) for commit in commits]
            for each in held[:30]:
                await service.checkouts.release(each.id, peers[0])
            assert service.events.counts["template.built"] == len(commits)
            return held[30:] + await asyncio.gather(
                *(take(peers[0], commit) for commit in commits[:30])
            )

        held = service.call(story)
        assert service.events.counts["template.built"] == len(commits)
        for each in held:
            assert os.stat(f"{each.path}/d0/f0").st_uid == each.owner_uid
            service.call(service.checkouts.release, each.id, ROOT_PEER)


def test_a_restarted_daemon_finds_what_was_written(service: Service, checkout: Checkout) -> None:
    """The mount is taken over as it is, and can be reset."""
    shell(checkout, "echo mine >mine; rm README")
    service.restart()
    assert (Path(checkout.path) / "mine").read_text() == "mine\n"
    reset(service, checkout)
    assert status(checkout) == ""


def test_after_a_reboot_the_layer_is_mounted_again(service: Service, checkout: Checkout) -> None:
    """No mount outlives a reboot; what the owner wrote does."""
    shell(checkout, "echo mine >mine; rm README; git mv docs papers")
    service.call(service.checkouts.close)
    subprocess.run(["umount", checkout.path], check=True)
    assert not (Path(checkout.path) / "mine").exists()
    service.restart()
    moved = [f"R  docs/{name} -> papers/{name}" for name in ("new2.txt", "page.txt")]
    assert status(checkout).splitlines() == [" D README", *moved, "?? mine"]
    reset(service, checkout)
    assert status(checkout) == ""


def test_trash_of_a_killed_daemon_is_removed(service: Service, checkout: Checkout) -> None:
    """An old layer whose removal was cut short goes at the next start."""
    old = service.state / "leases" / checkout.id / ".trash-0123456789abcdef"
    (old / "upper/some").mkdir(parents=True)
    service.restart()
    service.call(service.checkouts.close)
    service.restart()
    assert not old.exists()
    assert status(checkout) == ""


def test_trash_of_a_trial_that_was_killed_is_removed(service: Service) -> None:
    """Each start tries an overlay, and removes what it tried it with."""
    left = service.state / "templates/.trash-0123456789abcdef"
    (left / "directory").mkdir(parents=True)
    service.restart()
    assert not left.exists()


def test_a_store_that_was_deleted_is_made_again(service: Service) -> None:
    """Also under the view of it that another owner has."""
    before = start(service)
    service.call(service.checkouts.release, before.id, USER_PEER)
    for mirror in (service.state / "templates").iterdir():
        shutil.rmtree(mirror)
    checkout = start(service)
    assert status(checkout) == ""
    service.call(service.checkouts.release, checkout.id, USER_PEER)


def test_the_whole_store_may_be_replaced(service: Service) -> None:
    """The bind of the old directory would show nothing, so it is made again."""
    shutil.rmtree(service.state / "templates")
    (service.state / "templates").mkdir(mode=0o700)
    checkout = start(service)
    assert status(checkout) == ""
    service.call(service.checkouts.release, checkout.id, USER_PEER)


CHANGES = {
    "files": "echo x >>README; echo new >new; chmod +x data.bin; rm src/main.py; ln -s README soft",
    "a directory renamed": "mv docs papers; echo x >>papers/page.txt",
    "a directory renamed onto a name that was there": "rm -r docs; mv src docs",
    "a directory renamed twice, then its parent": "mv src/deep src/low; mv src source;"
    " echo 1 >source/low/er/y",
    "a directory deleted": "rm -r src docs",
    "a directory made anew": "rm -r src; mkdir -p src/deep; echo 1 >src/deep/other",
    "a directory that became a file": "rm -r src; echo 1 >src",
    "a file that became a directory": "rm README; mkdir README; echo 1 >README/in",
    "new directories": "mkdir -p a/b/c; echo 1 >a/b/c/d; mkdir -p src/deep/er/still;"
    " echo 1 >src/deep/er/still/z",
    "two names exchanged": "mv docs t; mv src docs; mv t src",
}
"""Changes that overlayfs records in different ways: copies, whiteouts, opaque and redirected
directories.
"""


@pytest.mark.parametrize("what", CHANGES)
def test_diff_says_all_of_it(
    service: Service, checkout: Checkout, rich: Upstream, tmp_path: Path, what: str
) -> None:
    """Applied to the base commit, the patch gives the tree that `git add --all` gives in the
    checkout.
    """
    shell(checkout, CHANGES[what])
    patch = service.diff(checkout)
    as_user(Path(checkout.path), "add", "--all", ":!vendor")
    wanted = as_user(Path(checkout.path), "write-tree")
    git(tmp_path, "clone", "--quiet", rich.url, "clone")
    git(tmp_path / "clone", "checkout", "--quiet", "v2")
    git(tmp_path / "clone", "apply", "--index", "-", stdin=patch)
    assert git(tmp_path / "clone", "write-tree") == wanted


# -- a mounter that refuses ----------------------------------------------------------------------


class RefusingMounter(LocalMounter):
    """Refuses mounts from now on while `refuses` is set."""

    refuses = False

    def make(self, order: OverlayOrder) -> int:
        if self.refuses:
            self.refuses = False
            raise DiskFullError("cannot mount an overlay: no space left on device")
        return super().make(order)


@dataclass
class Bench:
    """A backend of its own beside the service, on the same state directory."""

    backend: OverlayBackend
    mounter: RefusingMounter
    leases: Leases
    commit: CommitId
    tree: str

    async def create(self, lease: Lease) -> None:
        self.leases.begin(lease)
        await self.backend.create(lease)
        self.leases.put(lease)

    async def reset(self, lease: Lease) -> Proof:
        return await self.backend.reset(lease, self.leases)

    def lease(self, uid: int = USER) -> Lease:
        checkout = new_checkout_id()
        return Lease(
            id=checkout, directories=self.leases.directories(checkout), mirror=NAME,
            history=History.SEALED, backend=Backend.OVERLAY,
            base=Base(commit=self.commit, tree=self.tree), terms=terms_of(uid),
        )  # fmt: skip


@pytest.fixture
def bench(service: Service) -> Bench:
    mounter = RefusingMounter(service.state)
    backend = OverlayBackend(
        state_dir=service.state,
        mounter=mounter,
        templates=service.templates,
        workers=service.workers,
        mirrors_path=service.mirrors.path,
        may_map_owners=True,
        trash=service.trash,
        environments=service.environments,
    )
    commit, tree = git(service.mirror, "rev-parse", "v2^{commit}", "v2^{tree}").split()
    return Bench(backend, mounter, Leases(service.state), CommitId(commit), tree)


def test_a_refused_mount_leaves_nothing(service: Service, bench: Bench) -> None:
    """The error is the caller's; after destroy there is neither a mount nor a directory."""
    lease = bench.lease()

    async def story() -> None:
        bench.mounter.refuses = True
        with pytest.raises(DiskFullError):
            await bench.create(lease)
        await destroy(bench.backend, lease.directories, lease)

    service.call(story)
    assert not lease.directory.exists()
    assert not lease.private.exists()


def test_a_checkout_whose_template_failed_leaves_nothing(service: Service, bench: Bench) -> None:
    """There is no tree yet: its directory goes all the same."""
    lease = bench.lease()
    Leases(service.state).begin(lease)

    async def story() -> None:
        await destroy(bench.backend, lease.directories, lease)

    service.call(story)
    assert not lease.directory.exists()
    assert not lease.private.exists()


def test_a_refused_reset_leaves_what_was_there(service: Service, bench: Bench) -> None:
    """Nobody touched the owner's work, and the next reset goes through."""
    lease = bench.lease()

    async def story() -> None:
        await bench.create(lease)
        (lease.tree_path / "mine").write_text("mine")
        bench.mounter.refuses = True
        with pytest.raises(DiskFullError):
            await bench.reset(lease)
        assert (lease.tree_path / "mine").read_text() == "mine"
        proof = await bench.reset(lease)
        assert not (lease.tree_path / "mine").exists()
        assert (proof.tree, proof.head) == (bench.tree, bench.commit)
        assert (proof.files_checked, proof.files_restored, proof.files_removed) == (
            None,
            None,
            None,
        )
        await destroy(bench.backend, lease.directories, lease)

    service.call(story)
    assert not lease.directory.exists()
    assert not lease.private.exists()


def test_destroy_may_be_asked_again(service: Service, bench: Bench) -> None:
    """Also for a directory without a lease."""
    lease = bench.lease()

    async def story() -> None:
        await bench.create(lease)
        await destroy(bench.backend, lease.directories, None)
        await destroy(bench.backend, lease.directories, lease)

    service.call(story)
    assert not lease.directory.exists()
    assert not lease.private.exists()


def test_a_view_for_an_owner_is_made_once_and_not_on_the_loop(
    service: Service, bench: Bench
) -> None:
    """It forks: other requests go on meanwhile, and those that need the same one wait for it."""
    leases = [bench.lease() for _ in range(3)]
    made: list[int] = []
    map_owner = bench.mounter.map_owner

    def noted(owner: tuple[int, int]) -> None:
        made.append(threading.get_ident())
        map_owner(owner)

    bench.mounter.map_owner = noted  # type: ignore[method-assign]

    async def story() -> None:
        async with anyio.create_task_group() as group:
            for lease in leases:
                group.start_soon(bench.create, lease)
        assert threading.get_ident() not in made
        for lease in leases:
            await destroy(bench.backend, lease.directories, lease)

    service.call(story)
    assert len(made) == 1


def test_where_owners_cannot_be_mapped_only_the_daemons_user_is_served(
    service: Service, bench: Bench
) -> None:
    """The error says what to use instead; nothing was made."""
    bench.backend.may_map_owners = False
    mine, other = bench.lease(uid=0), bench.lease()

    async def story() -> None:
        with pytest.raises(BackendUnavailableError) as caught:
            await bench.create(other)
        assert "pool" in (caught.value.hint or "")
        assert list(other.directory.iterdir()) == []
        await bench.create(mine)
        assert (mine.tree_path / "README").stat().st_uid == 0
        for lease in (mine, other):
            await destroy(bench.backend, lease.directories, lease)

    service.call(story)


def test_many_are_held_at_once(service: Service, bench: Bench) -> None:
    """Each is a mount and a few empty directories."""
    leases = [bench.lease() for _ in range(100)]

    async def story() -> None:
        for lease in leases:
            await bench.create(lease)
        assert all((lease.tree_path / "README").exists() for lease in leases)
        for lease in leases:
            await destroy(bench.backend, lease.directories, lease)

    service.call(story)
    assert not any(lease.directory.exists() for lease in leases)
