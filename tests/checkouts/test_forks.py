"""Forks, snapshots and roll-backs of real checkouts, with both backends: what they show, what stays as it was, what
goes when.
"""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout_parts import ROOT_PEER, USER, USER_PEER, Service, as_user, running_service
from gitrepos import ENV, Upstream, git
from waiting import until

from mirrord import errors
from mirrord.model import Backend
from mirrord.protocol import (
    Checkout,
    Fork,
    ForkCheckout,
    MakeSnapshot,
    ResetAnswer,
    ResetCheckout,
    Snapshot,
    StartCheckout,
)

pytestmark = pytest.mark.root

# Everything that an agent does to a tree: contents, kinds, modes, times, names, attributes, commits.
WORK = r"""
echo changed >> README
printf 'print(9)\n' > src/main.py; chmod 750 src/main.py
rm empty; rm -r docs; mkdir -p docs/inner; echo other > docs/inner/page; echo kept > docs/new2.txt
rm run.sh; mkdir run.sh; echo inside > run.sh/inside
mv src/deep src/moved; echo more >> src/moved/er/x.txt
rm data.bin; ln -s ../nowhere data.bin; ln -sfn src/main.py link
mkdir -p new/a/b; echo 1 > new/a/b/one; touch -d '2001-02-03 04:05:06.789' new/a/b/one; ln new/a/b/one new/hard
printf odd > "$(printf 'new/\377\n odd')"; : > 'new/ '; chmod 0400 new/a/b/one
mkdir new/locked; echo x > new/locked/file; chmod 0000 new/locked/file; chmod 0700 new/locked; mkdir -m 1777 new/tmp
mkdir build; echo ignored > build/out.o; touch -d '1999-01-01' build
/usr/bin/python3 -c 'import os; [os.setxattr(at, "user.note", b"kept") for at in ("README", "new")]'
chmod 0700 src; touch -d '2010-10-10 10:10:10' src/moved/er
git config user.name agent; git config user.email agent@example.org
git checkout -q -b mine; git add -A new/a src; git commit -q -m mine; git tag light; git branch other HEAD~1
echo staged > staged; git add staged; git rm -q --cached auto.txt
"""


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_held(service: Service) -> Iterator[None]:
    """Each test's checkouts go after it, and no layer stays."""
    yield
    for lease in service.checkouts.leases:
        service.call(service.checkouts.release, lease.id, ROOT_PEER)
    until(lambda: not layers_of(service))


@pytest.fixture(params=[Backend.OVERLAY, Backend.POOL])
def backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    return backend


class Held:
    """One checkout, as its user works with it."""

    def __init__(self, service: Service, checkout: Checkout) -> None:
        self.service = service
        self.lease = checkout
        self.id = checkout.id
        self.tree = Path(checkout.path)

    def shell(self, script: str) -> str:
        done = subprocess.run(
            ["sh", "-ec", script], cwd=self.tree, env=ENV, user=USER, group=USER, extra_groups=[],
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(errors="surrogateescape")

    def fork(self, snapshot: str | None = None) -> Held:
        request = ForkCheckout(snapshot=snapshot)
        made = self.service.call(self.service.checkouts.fork, self.id, request, USER_PEER)
        return Held(self.service, made)

    @property
    def made(self) -> Fork:
        assert isinstance(self.lease, Fork)
        return self.lease

    def snapshot(self, name: str | None = None) -> Snapshot:
        request = MakeSnapshot(name=name)
        return self.service.call(self.service.checkouts.snapshot, self.id, request, USER_PEER)

    def reset(self, to: str | None = None, **where: Any) -> ResetAnswer:
        request = ResetCheckout(to=to, **where)
        return self.service.call(self.service.checkouts.reset, self.id, request, USER_PEER)

    def diff(self) -> bytes:
        return self.service.diff(self.lease)

    def release(self) -> None:
        self.service.call(self.service.checkouts.release, self.id, USER_PEER)


def start(service: Service, backend: Backend, commit: str = "v2") -> Held:
    request = StartCheckout(instance=f"psf__requests@{commit}", backend=backend)
    return Held(service, service.call(service.checkouts.checkout, request, USER_PEER))


def seen(tree: Path, *, git_too: bool = False) -> dict[str, tuple[Any, ...]]:
    """Everything below a tree: kind, mode, owner, time, content, attributes."""
    found = {}
    for path in tree.rglob("*"):
        name = str(path.relative_to(tree))
        if not git_too and name.split("/", maxsplit=1)[0] == ".git":
            continue
        at = path.lstat()
        attributes: dict[str, bytes] = {}
        if path.is_symlink():
            content: Any = os.readlink(path)
        else:
            content = path.read_bytes() if stat.S_ISREG(at.st_mode) else None
            attributes = {
                key: os.getxattr(path, key) for key in os.listxattr(path) if key.startswith("user.")
            }
        when = (
            0 if name in ("vendor", "vendor/sub") else at.st_mtime_ns
        )  # the pool's, not the client's
        found[name] = (at.st_mode, at.st_uid, at.st_gid, when, content, attributes)
    return found


def times_of(tree: Path) -> dict[Path, tuple[int, ...]]:
    found = {path: path.lstat() for path in tree.rglob("*")}
    return {
        path: (
            at.st_mode,
            at.st_ino,
            at.st_mtime_ns,
            at.st_atime_ns if stat.S_ISREG(at.st_mode) else 0,
        )
        for path, at in found.items()
    }


def layers_of(service: Service) -> set[str]:
    return {each for each in os.listdir(service.state / "templates/.layers") if "." not in each}


def assert_equal_work(one: Held, other: Held) -> None:
    """Return the files, and what git says about the repository."""
    assert seen(one.tree) == seen(other.tree)
    for ask in (
        "log --all --format=%H%d",
        "status --porcelain --ignored -z",
        "ls-files --stage",
        "fsck --full",
    ):
        assert as_user(one.tree, *ask.split()) == as_user(other.tree, *ask.split())
    assert one.diff() == other.diff()


def test_a_fork_is_equal(service: Service, backend: Backend) -> None:
    """In content, modes, times, links, names, attributes, and in what git says of it. The original does not notice."""
    one = start(service, backend)
    one.shell(WORK)
    before = times_of(one.tree)
    fork = one.fork()
    assert times_of(one.tree) == before
    assert_equal_work(one, fork)
    assert "diff --git" in one.diff().decode(errors="replace")
    assert fork.made.parent == one.id
    assert fork.made.copied.git
    assert fork.made.copied.left_out == {"git_files": 1}  # its configuration
    assert (fork.lease.owner_uid, fork.lease.backend) == (USER, backend)
    assert "agent" not in (fork.tree / ".git/config").read_text()
    one.release()
    assert_equal_work(fork, fork)


def test_forks_are_apart(service: Service, backend: Backend) -> None:
    """Neither sees the other's writes."""
    one = start(service, backend)
    one.shell("echo mine > README; mkdir d; echo 1 > d/a")
    fork = one.fork()
    fork.shell("echo theirs > README; echo 2 > d/a; rm docs/page.txt; echo f > fresh")
    one.shell("echo again > d/b; rm src/main.py")
    assert one.shell("cat README d/a; ls d docs; ls") != fork.shell("cat README d/a; ls d docs; ls")
    assert one.shell("cat README d/a d/b") == "mine\n1\nagain\n"
    assert fork.shell("cat README d/a src/main.py fresh") == "theirs\n2\nprint(2)\nf\n"
    assert (one.tree / "docs/page.txt").exists()


def test_a_fork_of_a_fork_has_what_both_changed(service: Service, backend: Backend) -> None:
    """And lacks what any of them removed."""
    one = start(service, backend)
    one.shell(WORK)
    two = one.fork()
    two.shell(
        "echo two >> README; rm -r new/a; rm docs/new2.txt; mkdir empty; echo e > empty/e; rm -r run.sh;"
        " chmod 0600 new/locked/file; chmod 0000 new/locked;"
        " echo back > run.sh; mv src/moved src/deep; rm win.txt; git add -A new/a src empty; git -c user.name=a -c user.email=b commit -qm two"
    )
    three = two.fork()
    assert_equal_work(two, three)
    three.shell("rm -r empty docs; echo 3 > docs; git stash list")
    four = three.fork()
    assert_equal_work(three, four)
    one.release()
    two.release()
    until(lambda: len(layers_of(service)) == 2)
    assert_equal_work(three, four)
    three.reset()
    assert three.diff() == b""
    assert as_user(three.tree, "status", "--porcelain", "--ignored") == ""


def test_a_rollback_brings_a_snapshot_back(service: Service, backend: Backend) -> None:
    """Content, repository and diff are as they were; the proof names the snapshot; a plain reset is clean again."""
    one = start(service, backend)
    one.shell(WORK)
    before, patch = seen(one.tree), one.diff()
    made = one.snapshot("good")
    one.shell("rm -rf new docs README; echo bad > src/main.py; git commit -qam bad")
    assert one.diff() != patch
    answer = one.reset(to="good")
    assert answer.proof.snapshot == "good"
    assert seen(one.tree) == before
    assert one.diff() == patch
    assert made.copied.files > 10
    one.shell("echo on > README; git log --oneline mine -1")
    two = one.snapshot()
    assert two.name == "s1"
    assert one.reset().proof.snapshot is None
    assert one.diff() == b""
    assert as_user(one.tree, "status", "--porcelain", "--ignored") == ""
    one.reset(to="s1")
    assert one.shell("cat README") == "on\n"
    names = [
        each.name for each in service.call(service.checkouts.list_snapshots, one.id, USER_PEER)
    ]
    assert names == ["good", "s1"]


def test_a_snapshot_outlives_a_move_to_another_commit(service: Service, backend: Backend) -> None:
    one = start(service, backend)
    one.shell("echo kept > README")
    one.snapshot("here")
    moved = one.reset(commit=git(service.mirror, "rev-parse", "v1"))
    assert moved.commit != one.lease.commit
    back = one.reset(to="here")
    assert (back.commit, back.tree) == (one.lease.commit, one.lease.tree)
    assert one.shell("cat README; git diff --stat | wc -l") == "kept\n2\n"
    one.release()


def test_eight_forks_of_one_snapshot_continue(service: Service, backend: Backend) -> None:
    """They share the layer, which stays while one of them is on it, also when the snapshot and its checkout go."""
    one = start(service, backend)
    one.shell("echo base > README; mkdir d; echo d > d/d")
    one.snapshot("start")
    one.shell("echo later > README")
    forks = [one.fork("start") for _ in range(8)]
    assert len(layers_of(service)) == 1
    for number, fork in enumerate(forks):
        assert fork.made.snapshot == "start"
        fork.shell(f"cat README; echo {number} >> d/d")
    assert [fork.shell("cat README d/d") for fork in forks] == [
        f"base\nd\n{number}\n" for number in range(8)
    ]
    service.call(service.checkouts.remove_snapshot, one.id, "start", USER_PEER)
    one.release()
    assert len(layers_of(service)) == 1


def test_copies_of_an_unchanged_checkout_are_one(service: Service, backend: Backend) -> None:
    """Whatever their names, and whichever goes first; a change makes another."""
    one = start(service, backend)
    one.shell("echo one > README; mkdir d; echo d > d/d")
    time.sleep(0.05)
    one.snapshot("a")
    one.snapshot("b")
    fork = one.fork()
    assert len(layers_of(service)) == 1
    service.call(service.checkouts.remove_snapshot, one.id, "a", USER_PEER)
    assert len(layers_of(service)) == 1
    one.shell("echo two > README")
    later = one.fork()
    one.reset(to="b")
    assert len(layers_of(service)) == 2
    one.release()
    fork.release()
    until(lambda: len(layers_of(service)) == 1)
    assert later.shell("cat README d/d") == "two\nd\n"
    again = later.fork()
    assert again.diff() == later.diff()


def test_nothing_is_remembered_of_copies_that_are_gone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After twice as many as before, as little as before; the copy of one that is held stays."""
    monkeypatch.setattr("mirrord.checkouts.forks._LATEST_MIN", 2)
    held = start(service, Backend.OVERLAY)
    held.fork()
    counts = []
    for count in (5, 10):
        for _ in range(count):
            one = start(service, Backend.OVERLAY)
            one.fork().release()
            one.release()
            until(lambda: len(layers_of(service)) == 1)
        service.checkouts.forks._forget_unused()
        counts.append([checkout for checkout, _ in service.checkouts.forks._latest])
    assert counts == [[held.id], [held.id]]
    assert service.checkouts.forks._looked_through_at == 2
    held.fork()
    assert len(layers_of(service)) == 1


def test_a_fork_of_a_clean_checkout_is_clean(service: Service, backend: Backend) -> None:
    one = start(service, backend)
    fork = one.fork()
    assert fork.diff() == b""
    assert as_user(fork.tree, "status", "--porcelain", "--ignored") == ""
    assert fork.made.copied.files == 0


def test_a_restart_keeps_forks_and_snapshots(service: Service, backend: Backend) -> None:
    one = start(service, backend)
    one.shell("echo one > README")
    one.snapshot("kept")
    fork = one.fork()
    service.restart()
    assert fork.shell("cat README") == "one\n"
    one.shell("echo two > README")
    one.reset(to="kept")
    assert one.shell("cat README") == "one\n"
    fork.shell("echo fork > README")
    fork.reset()


# -- what is refused, and what is left out -----------------------------------------------------------------------------


def test_names_and_bounds_of_snapshots(service: Service) -> None:
    one = start(service, Backend.OVERLAY)
    one.snapshot("a")
    with pytest.raises(errors.ConflictError):
        one.snapshot("a")
    with pytest.raises(errors.NotFoundError):
        one.reset(to="b")
    with pytest.raises(errors.NotFoundError):
        one.fork("b")
    with pytest.raises(errors.InvalidRequestError):
        one.reset(to="a", commit="v1")
    for _ in range(127):
        one.snapshot()
    with pytest.raises(errors.LimitReachedError):
        one.snapshot()
    service.call(service.checkouts.remove_snapshot, one.id, "s64", USER_PEER)
    assert one.snapshot().name == "s64"


def test_a_template_under_a_fork_is_not_evicted(service: Service) -> None:
    """Nor does the layer of one that is count as a template."""
    one = start(service, Backend.OVERLAY)
    one.shell("echo one > README")
    fork = one.fork()
    one.release()
    service.change("checkouts", template_bytes=1)
    try:
        service.call(service.templates.evict)
        assert service.call(service.templates.scrub) == 0
        assert fork.shell("cat README docs/page.txt") == "one\npage\n"
        assert fork.reset().proof.tree == fork.lease.tree
    finally:
        service.change("checkouts", template_bytes=50 << 30)


def test_a_fork_from_elsewhere_in_the_layers_below(service: Service) -> None:
    """A directory that a layer of the template hides does not come back where the client makes it again."""
    for commit in ("v1", "v2", "v3"):
        start(service, Backend.OVERLAY, commit)
    one = start(service, Backend.OVERLAY, "v3")
    one.shell(
        "rm -r src docs; mkdir -p src/deep/er; echo n > src/deep/er/n; mv src docs; mkdir src"
    )
    two = one.fork()
    two.shell("rm docs/deep/er/n; mkdir src/deep; echo d > src/deep/d; mv docs/deep src/was")
    three = two.fork()
    assert_equal_work(two, three)
    three.shell("rm -r src; mkdir src docs/x")
    four = three.fork()
    assert_equal_work(three, four)
    for each in (two, three, four):
        for directory in [each.tree, *filter(Path.is_dir, each.tree.rglob("*"))]:
            assert all(os.path.lexists(directory / name) for name in os.listdir(directory))


def test_forks_count(service: Service) -> None:
    one = start(service, Backend.OVERLAY)
    one.fork()
    service.change("access", max_per_user=2)
    try:
        with pytest.raises(errors.TooManyCheckoutsError):
            one.fork()
    finally:
        service.change("access", max_per_user=256)


def test_pipes_and_sockets_are_left_out(service: Service, backend: Backend) -> None:
    """They are counted, and what they replaced is not there either."""
    one = start(service, backend)
    one.shell(
        "mkfifo pipe; rm README; mkfifo README;"
        """ /usr/bin/python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'"""
    )
    fork = one.fork()
    assert fork.made.copied.left_out == {"pipes": 2, "sockets": 1}
    assert not (fork.tree / "README").exists()
    assert not (fork.tree / "pipe").exists()
    assert fork.diff() == one.diff()


HOSTILE = {
    "no repository": "rm -rf .git",
    "a file": "rm -rf .git; echo 'gitdir: /etc' > .git",
    "a link": "mv .git /tmp/$$; ln -s /tmp/$$ .git",
    "links in it": "rm -f .git/HEAD; ln -s /etc/passwd .git/HEAD",
    "refs elsewhere": "rm -rf .git/refs; ln -s /etc .git/refs",
    "a pipe in it": "mkdir -p .git/refs/heads; mkfifo .git/refs/heads/x",
}


@pytest.mark.parametrize("script", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_git_that_is_none_gives_way_to_the_pristine_one(
    service: Service, backend: Backend, script: str
) -> None:
    one = start(service, backend)
    one.shell("echo changed > README;" + script)
    fork = one.fork()
    assert not fork.made.copied.git
    assert as_user(fork.tree, "status", "--porcelain").split() == ["M", "README"]
    assert as_user(fork.tree, "rev-parse", "HEAD") == one.lease.commit
    assert not (fork.tree / ".git").is_symlink()


def test_nothing_that_configures_git_comes_along(service: Service, backend: Backend) -> None:
    """Neither fsmonitor, hooks, attributes and alternates nor other work trees."""
    one = start(service, backend)
    one.shell(
        "git config core.fsmonitor 'touch /tmp/mirrord-canary; false'; git config core.hooksPath .git/own;"
        "mkdir -p .git/hooks .git/info .git/objects/info .git/own .git/worktrees/x .git/modules/m .git/refs/heads;"
        "echo '* diff=x' > .git/info/attributes; echo 'exit 1' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit;"
        "echo /var/lib > .git/objects/info/alternates; echo ../x > .git/commondir; echo x > .git/gitdir;"
        "echo c > .git/config.worktree; touch .git/index.lock .git/refs/heads/a.lock"
    )
    fork = one.fork()
    pristine = start(service, backend)
    ours, theirs = (set(seen(each.tree, git_too=True)) for each in (fork, pristine))
    assert {path for path in ours - theirs if "objects" not in path} == {".git/refs/heads"}
    assert theirs <= ours
    assert not (fork.tree / ".git/objects/info/alternates").exists()
    assert (fork.tree / ".git/config").read_bytes() == (pristine.tree / ".git/config").read_bytes()
    assert fork.made.copied.left_out["git_files"] == 9
    assert not Path("/tmp/mirrord-canary").exists()


def test_a_repository_made_again_is_taken_over(service: Service, backend: Backend) -> None:
    """Its commits are the agent's own; the base's packs stay below them."""
    one = start(service, backend)
    one.shell(
        "rm -rf .git; git init -q -b own; git config user.name a; git config user.email b; git add -A; git commit -qm own"
    )
    fork = one.fork()
    assert fork.made.copied.git
    assert as_user(fork.tree, "log", "--all", "--format=%s").split() == ["own"]
    assert as_user(fork.tree, "status", "--porcelain") == as_user(one.tree, "status", "--porcelain")


def test_set_id_bits_do_not_come_along(service: Service, backend: Backend) -> None:
    """On disk the layer's files are the daemon's."""
    one = start(service, backend)
    one.shell("cp /bin/true suid; chmod 6755 suid; mkdir -m 2755 shared")
    fork = one.fork()
    assert stat.S_IMODE((fork.tree / "suid").stat().st_mode) == 0o755
    assert stat.S_IMODE((fork.tree / "shared").stat().st_mode) == 0o2755


def test_a_file_that_the_owner_may_not_read_is_named(service: Service, backend: Backend) -> None:
    one = start(service, backend)
    (one.tree / "secret").touch(0o600)
    with pytest.raises(errors.OwnerDeniedError, match="secret"):
        one.fork()


def test_roots_own_checkout_forks(service: Service, backend: Backend) -> None:
    """Where the daemon is the owner nothing is mapped."""
    request = StartCheckout(instance="psf__requests@v2", backend=backend)
    made = service.call(service.checkouts.checkout, request, ROOT_PEER)
    (Path(made.path) / "README").write_text("root's\n")
    fork = service.call(service.checkouts.fork, made.id, ForkCheckout(), ROOT_PEER)
    assert (Path(fork.path) / "README").read_text() == "root's\n"
    assert (Path(fork.path) / "README").stat().st_uid == 0
