"""Apply and restore leave the new tree or the old one, byte for byte with modes, whatever fails at whichever step.

Each backend is struck at steps of its own; at all with MIRRORD_KILLS=all.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkout_parts import ROOT_PEER, USER, USER_PEER, Service, run_as, running_service
from gitrepos import Upstream
from struck import Strike, killed, struck
from worker_calls import LONG

from mirrord.errors import (
    CheckoutBusyError,
    DiskFullError,
    MirrordError,
    OwnerDeniedError,
    WorkerCrashedError,
)
from mirrord.model import ApplyStrategy, Backend, View
from mirrord.patches.apply import apply, recover, restore
from mirrord.patches.journal import has_journal
from mirrord.protocol import Checkout, ResetCheckout, StartCheckout

pytestmark = pytest.mark.root

TREE = (
    "chmod 755 README; mkdir -p over/there; git mv src/main.py over/there/moved.py; rm -r docs; ln -s README new-link;"
    " rm empty; mkdir empty; echo 1 >empty/inside; rm -r src/deep; echo 2 >src/deep; printf 'a\\r\\nq\\r\\n' >win.txt;"
    " sed -i 1s/.*/changed/ README; echo 3 >auto.txt"
)
_STRIDE = {"apply": 7, "restore": 10, "tolerant": 30}
_RAISED: dict[object, type[MirrordError]] = {
    errno.ENOSPC: DiskFullError,
    errno.EACCES: OwnerDeniedError,
}
Entry = tuple[int, int, bytes]


class Case(NamedTuple):
    """A call in a worker, and what was done to the tree before."""

    function: Callable[..., Any]
    args: Callable[[bytes, str], tuple[Any, ...]]
    dirt: str


BACKENDS = [Backend.POOL, Backend.OVERLAY]
ALL = os.environ.get("MIRRORD_KILLS") == "all"
EXACT, TOLERANT = ApplyStrategy.EXACT, ApplyStrategy.TOLERANT
DIRTY = "rm -r docs; echo mine >docs; rm run.sh; mkdir -p run.sh/a/b; echo 1 >run.sh/a/b/mine; chmod 750 run.sh/a; mkfifo run.sh/p; chmod 700 src"
CASES = {
    "apply": Case(apply, lambda patch, _: (patch, False, EXACT), "echo mine >mine"),
    "tolerant": Case(apply, lambda patch, _: (b"So:\n```diff\n" + patch + b"```\n", False, TOLERANT), "echo mine >src/mine"),
    "restore": Case(restore, lambda _, v3: (v3, [b"README", b"src", b"run.sh", b"link"]), DIRTY),
}  # fmt: skip


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as running:
        yield running


@pytest.fixture(scope="module")
def patch(service: Service) -> bytes:
    """Of everything that git can change in a tree, files that become directories and the reverse among it."""
    made = checkout_on(service, Backend.POOL)
    run_as(USER, TREE + "; git add --all", Path(made.path), service)
    patch = service.diff(made)
    service.call(service.checkouts.release, made.id, USER_PEER)
    return patch


def checkout_on(service: Service, backend: Backend, view: View = View.AGENT) -> Checkout:
    request = StartCheckout(instance="psf__requests@v2", backend=backend, view=view)
    return service.call(
        service.checkouts.checkout, request, ROOT_PEER if view is View.GRADER else USER_PEER
    )


def tree_of(path: Path) -> dict[str, Entry]:
    """Every path but `.git`, with mode, owner, and content, target or nothing."""
    seen: dict[str, Entry] = {}
    for above, directories, names in os.walk(path):
        if above == str(path):
            directories.remove(".git")
        for name in (*directories, *names):
            at = os.path.join(above, name)
            entry, data = os.lstat(at), b""
            if stat.S_ISREG(entry.st_mode):
                data = Path(at).read_bytes()
            elif stat.S_ISLNK(entry.st_mode):
                data = os.fsencode(os.readlink(at))
            seen[os.path.relpath(at, path)] = (entry.st_mode, entry.st_uid, data)
    return seen


class Struck:
    """One checkout, one call, at any step."""

    def __init__(self, service: Service, made: Checkout, case: Case, patch: bytes, v3: str) -> None:
        self._service, self._made, self._case = service, made, case
        self.lease = service.checkouts.leases.get(made.id)
        self.tree = Path(made.path)
        self.job = service.checkouts.patches.job(self.lease)
        self.args = (self.job, *case.args(patch, v3))
        self.renew()
        self.old = tree_of(self.tree)
        self.steps = self.strike(0, 10**9)
        self.new = tree_of(self.tree)
        self.renew()

    def renew(self) -> None:
        self._service.call(self._service.checkouts.reset, self._made.id, ResetCheckout(), USER_PEER)
        run_as(USER, self._case.dirt, self.tree, self._service)

    def strike(self, fault: str | int, at: int) -> int:
        strike = Strike(fault, at, self.tree, USER)
        return struck(self._case.function, self.args, strike)

    def kill(self, at: int) -> None:
        """Kill the call, then do what the next request for the checkout does first."""
        killed(self._case.function, self.args, Strike("kill", at, self.tree, USER))
        recover(self.job)


def steps_of(case: Struck, backend: Backend, stride: int) -> list[int]:
    """One of so many steps, others for each backend, and the last one."""
    if ALL:
        return [*range(case.steps)]
    first = 0 if backend is Backend.POOL else stride // 2
    return [*range(first, case.steps - 1, stride), case.steps - 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", CASES)
def test_a_call_that_is_struck_leaves_the_old_tree_or_the_new_one(
    service: Service, patch: bytes, rich: Upstream, backend: Backend, what: str
) -> None:
    """Killed at each step; a disk that is full from a step on; a permission that is gone. The next request mends it."""
    made = checkout_on(service, backend)
    case = Struck(service, made, CASES[what], patch, rich.git("rev-parse", "v3"))
    assert case.old != case.new
    assert case.steps > 40
    outcomes = set[tuple[object, str]]()
    for fault in ("kill", errno.ENOSPC, errno.EACCES):
        stride = _STRIDE[what] if fault == "kill" else 2 * _STRIDE[what]
        for at in steps_of(case, backend, stride):
            error: BaseException | None = None
            try:
                case.kill(at) if fault == "kill" else case.strike(fault, at)
            except (MirrordError, OSError) as raised:
                error = raised
            if fault != "kill" and has_journal(case.lease.private):
                assert error is None, (fault, at)  # what was moved away could not be removed
                recover(case.job)
            left = tree_of(case.tree)
            outcome = "old" if left == case.old else "new" if left == case.new else "between"
            assert outcome != "between", (fault, at, case.steps, differences(left, case))
            assert not has_journal(case.lease.private)
            if fault != "kill":
                assert (outcome == "old") == isinstance(error, _RAISED[fault]), (fault, at, error)
            outcomes.add((fault, outcome))
            if outcome == "new":
                case.renew()
    assert {("kill", "old"), ("kill", "new"), (errno.ENOSPC, "old"), (errno.EACCES, "old")} <= outcomes  # fmt: skip
    service.call(service.checkouts.release, made.id, USER_PEER)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("closed", ["zz", "src"])
def test_a_rename_that_its_owner_may_not_make_changes_nothing(
    service: Service, backend: Backend, closed: str
) -> None:
    """Out of a directory or into one of mode 555."""
    made = checkout_on(service, backend)
    tree = Path(made.path)
    run_as(USER, f"mkdir zz; chmod 555 {closed}", tree, service)
    before = tree_of(tree)
    moved = b"diff --git a/src/main.py b/zz/main.py\nsimilarity index 100%\nrename from src/main.py\nrename to zz/main.py\n"
    changed = b"--- a/README\n+++ b/README\n@@ -1,2 +1,2 @@\n-2\n+x\n 2\n"
    with pytest.raises(OwnerDeniedError):
        service.call(service.checkouts.apply, made.id, USER_PEER, patch=changed + moved)
    assert tree_of(tree) == before
    run_as(USER, f"chmod 755 {closed}", tree, service)
    service.call(service.checkouts.apply, made.id, USER_PEER, patch=changed + moved)
    assert (tree / "zz/main.py").exists()
    service.call(service.checkouts.release, made.id, USER_PEER)


RACES = {
    "writes to a file": ("echo mine >>README", "README"),
    "replaces a file": ("echo mine >.x; mv .x auto.txt", "auto.txt"),
    "makes a new path": ("mkdir -p over/there; echo mine >over/there/moved.py", "over/there/moved.py"),
    "writes where a directory goes": ("mkdir -p src/deep; echo mine >src/deep/mine", "src/deep/mine"),
    "replaces a directory by a link": ("test -L docs || mv docs .docs; mkdir -p .outside; ln -sfn .outside docs", "docs"),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("race", RACES)
def test_what_the_owner_writes_meanwhile_is_kept(
    service: Service, patch: bytes, rich: Upstream, backend: Backend, race: str
) -> None:
    """At each step: where the call fails, all is as before but what the owner did; no temporary name stays."""
    made = checkout_on(service, backend)
    case = Struck(service, made, CASES["apply"], patch, rich.git("rev-parse", "v3"))
    script, path = RACES[race]
    failed = 0
    for at in steps_of(case, backend, 18):
        case.renew()
        try:
            case.strike(f"{script} || true", at)
        except (MirrordError, OSError) as error:
            assert isinstance(error, CheckoutBusyError), (at, error)
            failed += 1
            recover(case.job)
            left = tree_of(case.tree)
            alike = {each for each in {*left, *case.old} if left.get(each) == case.old.get(each)}
            changed = {*left, *case.old} - alike
            assert path in left, (at, left)
            allowed = (path, *map(str, Path(path).parents), ".docs", ".outside", ".x")
            assert all(each in allowed or each.startswith((".docs/", "docs/", "src/deep")) for each in changed), (at, changed)  # fmt: skip
        names = [each for each in tree_of(case.tree) if ".mirrord-" in each]
        assert all(each.startswith(".docs/") for each in names), at  # it moved away with them
        assert not [*case.tree.glob(".outside/*")]
    assert failed
    service.call(service.checkouts.release, made.id, USER_PEER)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_daemon_that_was_killed_mends_the_tree_when_it_starts(
    service: Service, patch: bytes, rich: Upstream, backend: Backend
) -> None:
    """Before any request; a worker that was killed is mended by the next request; a reset needs no mending."""
    made = checkout_on(service, backend)
    case = Struck(service, made, CASES["apply"], patch, rich.git("rev-parse", "v3"))
    outcomes = []
    for at in (case.steps // 2, case.steps - 3):
        case.renew()
        killed(apply, case.args, Strike("kill", at, case.tree, USER))
        assert has_journal(case.lease.private)
        assert tree_of(case.tree) not in (case.old, case.new)
        service.restart()
        outcomes.append(tree_of(case.tree))
    assert outcomes == [case.old, case.new]
    case.renew()
    strike = Strike("kill", case.steps // 2, case.tree, USER)
    with pytest.raises(WorkerCrashedError):
        service.call(service.workers.run, struck, apply, case.args, strike, timeout=LONG)
    assert b"moved.py" not in service.diff(made)
    assert tree_of(case.tree) == case.old
    killed(apply, case.args, strike)
    service.call(service.checkouts.reset, made.id, ResetCheckout(), USER_PEER)
    assert not has_journal(case.lease.private)
    assert service.diff(made) == b""
    service.call(service.checkouts.release, made.id, USER_PEER)


@pytest.fixture(scope="module")
def small(rich: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose state is on a file system of 40 MiB."""
    disk = tmp_path_factory.mktemp("small")
    disk.chmod(0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40M", "tmpfs", disk], check=True)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tempfile, "tempdir", str(disk))
            with running_service(rich, with_overlay=True) as running:
                yield running
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_disk_leaves_the_tree_as_it_was(small: Service, backend: Backend) -> None:
    """With any number of free pages; once there are enough, the same patch is applied."""
    made = checkout_on(small, backend)
    tree = Path(made.path)
    run_as(USER, "for n in 1 2 3 4 5 6; do seq $n 4000 >big$n; done", tree, small)
    new = b"".join(
        b"diff --git a/big%d b/dir/moved%d\nrename from big%d\nrename to dir/moved%d\n--- a/big%d\n+++ b/dir/moved%d\n"
        b"@@ -1,2 +1,2 @@\n-%d\n+x\n %d\n" % (n, n, n, n, n, n, n, n + 1)
        for n in range(1, 7)
    )
    before, ballast, done = tree_of(tree), small.state / "ballast", 0
    for pages in (*range(0, 60, 4), 200):
        ballast.unlink(missing_ok=True)
        free = os.statvfs(small.state).f_bavail * 4096
        with ballast.open("wb") as file, suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, free - pages * 4096)
        try:
            small.call(small.checkouts.apply, made.id, USER_PEER, patch=new)
        except DiskFullError:
            assert tree_of(tree) == before, pages
        else:
            done += 1
            break
    assert done and pages > 0
    ballast.unlink()
    small.call(small.checkouts.release, made.id, USER_PEER)


def differences(left: dict[str, Entry], case: Struck) -> dict[str, object]:
    return {
        path: (case.old.get(path), left.get(path), case.new.get(path))
        for path in {*left, *case.old, *case.new}
        if left.get(path) != case.old.get(path)
    }
