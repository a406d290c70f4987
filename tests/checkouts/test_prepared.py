"""Prepared layers on both backends: content, what is relative to them, rights, lifetime."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout_parts import ROOT_PEER, USER, USER_PEER, Service, as_user, running_service
from gitrepos import ENV, Upstream
from waiting import until

from mirrord import errors
from mirrord.checkouts.lease import Lease, from_json, to_json
from mirrord.grading.prepare import ModelPatch
from mirrord.host.peers import Peer
from mirrord.model import Backend, History, View
from mirrord.protocol import (
    Checkout,
    Fork,
    ForkCheckout,
    Grade,
    MakeSnapshot,
    PreparedLayer,
    ResetAnswer,
    ResetCheckout,
    SaveLayer,
    Snapshot,
    StartCheckout,
    StartGrade,
)

pytestmark = pytest.mark.root

GRADER = 23456
OTHER_PEER = Peer(uid=34567, gid=USER, pid=1)

# an install step: generated files that are ignored, one that is not, edits of tracked files, and repositories
# of its own.
PREPARE = r"""
mkdir build; echo compiled > build/ext.o; echo object > src/main.o; echo seen > generated.txt
echo '# pinned' >> README; chmod 755 src/main.py; rm docs/new2.txt; rm empty; ln -s README empty
git init -q build/nested; echo x > build/nested/f; git config user.name me; echo hook > .git/hooks/post-checkout || true
git checkout -q -b mine; git -c user.email=a@b commit -q -a -m theirs
"""


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich, with_overlay=True) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_held(service: Service) -> Iterator[None]:
    yield
    for lease in service.checkouts.leases:
        service.call(service.checkouts.release, lease.id, ROOT_PEER)
    for layer in service.call(service.checkouts.list_layers, None, ROOT_PEER):
        service.call(service.checkouts.remove_layer, layer.id, ROOT_PEER)


@pytest.fixture(params=[Backend.OVERLAY, Backend.POOL])
def backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    return backend


class Held:
    """One checkout, as its user works with it."""

    def __init__(self, service: Service, checkout: Checkout, peer: Peer = USER_PEER) -> None:
        self.service = service
        self.lease = checkout
        self.peer = peer
        self.id = checkout.id
        self.tree = Path(checkout.path)

    def shell(self, script: str, user: int = USER) -> str:
        done = subprocess.run(
            ["sh", "-ec", script], cwd=self.tree, env=ENV, user=user, group=user, extra_groups=[],
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(errors="surrogateescape")

    def save(self, name: str, peer: Peer | None = None) -> PreparedLayer:
        request = SaveLayer(name=name)
        return self.service.call(self.service.checkouts.save, self.id, request, peer or self.peer)

    def fork(self, snapshot: str | None = None) -> Held:
        request = ForkCheckout(snapshot=snapshot)
        made: Fork = self.service.call(self.service.checkouts.fork, self.id, request, self.peer)
        return Held(self.service, made)

    def snapshot(self, name: str) -> Snapshot:
        request = MakeSnapshot(name=name)
        return self.service.call(self.service.checkouts.snapshot, self.id, request, self.peer)

    def reset(self, **where: Any) -> ResetAnswer:
        request = ResetCheckout(**where)
        return self.service.call(self.service.checkouts.reset, self.id, request, self.peer)

    def diff(self) -> bytes:
        return self.service.diff(self.lease)

    def release(self) -> None:
        self.service.call(self.service.checkouts.release, self.id, self.peer)


def start(
    service: Service,
    backend: Backend | None = None,
    commit: str = "v2",
    peer: Peer = USER_PEER,
    **more: Any,
) -> Held:
    request = StartCheckout(instance=f"psf__requests@{commit}", backend=backend, **more)
    return Held(service, service.call(service.checkouts.checkout, request, peer), peer)


Found = dict[str, tuple[str, int, bytes]]


def content(tree: Path) -> Found:
    """Kind, mode, owner and content of all but `.git`."""
    found: Found = {}
    for above, directories, names in os.walk(tree):
        if above == str(tree):
            directories.remove(".git")
        for name in (*directories, *names):
            path = Path(above) / name
            seen = path.lstat()
            data = b""
            if path.is_symlink():
                data = os.readlink(path).encode()
            elif path.is_file():
                data = path.read_bytes()
            found[str(path.relative_to(tree))] = (oct(seen.st_mode), seen.st_uid, data)
    return found


def control(tree: Path) -> dict[str, bytes]:
    git_dir = tree / ".git"
    return {
        str(path.relative_to(git_dir)): path.read_bytes()
        for path in git_dir.rglob("*")
        if path.is_file()
    }


def prepared(service: Service, backend: Backend, name: str = "tools") -> Found:
    """Save a layer; what a checkout with it has to show."""
    held = start(service, backend)
    held.shell(PREPARE)
    held.save(name)
    wanted = content(held.tree)
    held.release()
    return {path: found for path, found in wanted.items() if "build/nested/.git" not in path}


def test_a_checkout_with_a_layer_shows_what_was_saved_and_nothing_of_any_git(
    service: Service, backend: Backend
) -> None:
    plain = start(service, backend)
    wanted = prepared(service, backend)
    held = start(service, backend, layer="tools")
    assert held.lease.layer == "tools"
    assert content(held.tree) == wanted
    theirs, ours = control(plain.tree), control(held.tree)
    assert (ours.keys(), ours["HEAD"]) == (theirs.keys(), theirs["HEAD"])
    assert {n: d for n, d in ours.items() if n != "index"} == {
        n: d for n, d in theirs.items() if n != "index"
    }
    assert not list(held.tree.glob("build/**/.git"))


def test_diff_reset_and_forks_are_relative_to_the_layer(service: Service, backend: Backend) -> None:
    wanted = prepared(service, backend)
    held = start(service, backend, layer="tools")
    assert held.diff() == b""
    held.shell("echo mine >> README; rm generated.txt build/ext.o; echo new > new.txt; rm -r docs")
    patch = held.diff()
    changed = as_user(held.tree, "apply", "--numstat", stdin=patch).splitlines()
    assert [line.split("\t")[2] for line in changed] == [
        "README", "docs/page.txt", "generated.txt", "new.txt",
    ]  # fmt: skip
    assert b" # pinned\n+mine" in patch
    before = content(held.tree)
    held.snapshot("worked")
    fork = held.fork()
    assert content(fork.tree) == before
    assert fork.diff() == patch
    proof = held.reset().proof
    assert proof.tree == held.lease.tree
    assert content(held.tree) == wanted
    assert held.diff() == b""
    held.reset(to="worked")
    assert (content(held.tree), held.diff()) == (before, patch)
    fork.reset()
    assert content(fork.tree) == wanted


def test_git_shows_what_a_layer_does_to_tracked_files_and_not_what_is_ignored(
    service: Service, backend: Backend
) -> None:
    """As after the install step itself; the patch of `diff` has none of it."""
    prepared(service, backend)
    held = start(service, backend, layer="tools")
    status = as_user(held.tree, "status", "--porcelain").splitlines()
    assert sorted(status) == [
        " D docs/new2.txt", " M README", " M src/main.py", " T empty", "?? generated.txt",
    ]  # fmt: skip


def test_a_patch_of_a_layer_applies_on_another_checkout_with_it(
    service: Service, backend: Backend
) -> None:
    prepared(service, backend)
    held, other = (start(service, backend, layer="tools") for _ in range(2))
    held.shell(
        "sed -i 's/pinned/loose/' README; echo x >> generated.txt; git mv src/deep src/moved"
    )
    patch = held.diff()
    service.call(service.checkouts.apply, other.id, USER_PEER, patch=patch)
    assert other.diff() == patch
    assert content(other.tree)["README"] == content(held.tree)["README"]


def test_a_layer_on_a_layer(service: Service, backend: Backend) -> None:
    prepared(service, backend)
    held = start(service, backend, layer="tools")
    held.shell("rm build/ext.o; echo second > build/more.o; echo '# more' >> README")
    wanted = content(held.tree)
    second = held.save("second")
    assert second.copied.files == 3
    held.release()
    on_it = start(service, backend, layer="second")
    assert (content(on_it.tree), on_it.diff()) == (wanted, b"")
    first = next(
        each
        for each in service.call(service.checkouts.list_layers, None, USER_PEER)
        if each.name == "tools"
    )
    service.call(service.checkouts.remove_layer, first.id, USER_PEER)
    on_it.shell("echo x >> README")
    on_it.reset()
    assert content(on_it.tree) == wanted


# -- rights -------------------------------------------------------------------------------------------


def names(service: Service, peer: Peer) -> dict[str, bool]:
    found = service.call(service.checkouts.list_layers, None, peer)
    return {each.name: each.shared for each in found}


def test_a_layer_is_its_savers_and_an_administrators_is_everybodys(service: Service) -> None:
    """Two users may use one name; one's own layer comes first, and another member's is never used."""
    held = start(service)
    held.shell("echo mine > a.o")
    held.save("mine")
    held.save("both")
    held.shell("echo administrator > a.o")
    held.save("theirs", ROOT_PEER)
    held.save("both", ROOT_PEER)
    assert names(service, USER_PEER) == {"mine": False, "theirs": True, "both": True}
    assert names(service, OTHER_PEER) == {"theirs": True, "both": True}
    assert len(service.call(service.checkouts.list_layers, "psf/requests", ROOT_PEER)) == 4
    content = {
        (peer.uid, name): (start(service, peer=peer, layer=name).tree / "a.o").read_text().strip()
        for peer, name in (
            (USER_PEER, "both"),
            (OTHER_PEER, "both"),
            (OTHER_PEER, "theirs"),
            (ROOT_PEER, "both"),
        )
    }
    assert list(content.values()) == ["mine", "administrator", "administrator", "administrator"]
    for name, peer in (("mine", OTHER_PEER), ("mine", ROOT_PEER), ("absent", USER_PEER)):
        with pytest.raises(errors.NotFoundError, match=f"cannot find layer '{name}'"):
            start(service, peer=peer, layer=name)
    [theirs] = [
        each
        for each in service.call(service.checkouts.list_layers, None, OTHER_PEER)
        if each.name == "theirs"
    ]
    with pytest.raises(errors.AccessError, match="uid 0 saved it"):
        service.call(service.checkouts.remove_layer, theirs.id, OTHER_PEER)
    mine = next(
        each
        for each in service.call(service.checkouts.list_layers, None, USER_PEER)
        if not each.shared
    )
    with pytest.raises(errors.NotFoundError):
        service.call(service.checkouts.remove_layer, mine.id, OTHER_PEER)


def test_a_layer_is_of_one_commit_and_history_and_never_changes(service: Service) -> None:
    held = start(service)
    held.save("once")
    with pytest.raises(errors.ConflictError):
        held.save("once")
    with pytest.raises(errors.NotFoundError):
        start(service, layer="once", commit="v3")
    with pytest.raises(errors.NotFoundError):
        start(service, layer="once", history=History.SQUASHED)
    with pytest.raises(errors.NotFoundError):
        held.reset(commit="v3", layer="once")
    with_it = start(service, layer="once")
    assert with_it.reset(commit="v3").layer is None
    assert with_it.reset(commit="v2").layer is None
    assert with_it.reset(layer="once").layer == "once"
    grader = start(service, peer=ROOT_PEER, view=View.GRADER)
    with pytest.raises(errors.AccessError, match="grader's view"):
        grader.save("answers")


def test_a_layer_is_removed_only_when_unused_and_then_completely(
    service: Service, backend: Backend
) -> None:
    prepared(service, backend)
    layers = service.state / "templates/.layers"
    held = start(service, backend, layer="tools")
    fork = held.fork()
    [layer] = service.call(service.checkouts.list_layers, None, USER_PEER)
    assert layer.checkouts == 2
    for each in (held, fork):
        with pytest.raises(errors.ConflictError):
            service.call(service.checkouts.remove_layer, layer.id, USER_PEER)
        each.release()
    service.call(service.checkouts.remove_layer, layer.id, USER_PEER)
    until(lambda: list(layers.iterdir()) == [])


def test_layers_survive_a_restart_and_half_made_ones_do_not(
    service: Service, backend: Backend
) -> None:
    wanted = prepared(service, backend)
    held = start(service, backend, layer="tools")
    held.shell("echo mine >> README")
    patch = held.diff()
    layers = service.state / "templates/.layers"
    (layers / ("b" * 16)).mkdir()  # a kill before the record was written
    (layers / ("b" * 16 + ".git")).mkdir()
    (layers / ("c" * 16 + ".new")).write_text('{"saved": [1')
    (damaged := layers / ("d" * 16 + ".json")).write_text('{"saved": [1')
    before = {path.name for path in layers.iterdir()}
    service.restart()
    service.call(service.trash.settle)
    assert before == {path.name for path in layers.iterdir()}  # which it needs is unknown
    assert [str(damaged) in each for each in service.checkouts.leases.problems()] == [True]
    damaged.unlink()
    service.restart()
    service.call(service.trash.settle)
    assert before - {path.name for path in layers.iterdir()} == {
        "b" * 16,
        "b" * 16 + ".git",
        "c" * 16 + ".new",
        "d" * 16 + ".json",
    }
    assert held.diff() == patch
    held.reset()
    assert content(held.tree) == wanted
    assert content(start(service, backend, layer="tools").tree) == wanted


def test_a_grade_has_the_layer_and_the_change_alone(service: Service, backend: Backend) -> None:
    """The agent's changes of the layer's ignored files are not part of its change."""
    script = "echo cheat > build/ext.o; rm src/main.o; echo mine >> README; rm -r docs; echo x > generated.txt"
    prepared(service, backend)
    held = start(service, backend, layer="tools")
    with pytest.raises(errors.AccessError, match="saved its layer"):
        service.call(service.grading.grade, held.id, StartGrade(owner=GRADER), ROOT_PEER)
    ours = start(service, backend, peer=ROOT_PEER)
    ours.shell(PREPARE, user=0)
    ours.save("shared")
    wanted = content(ours.tree)
    agent = start(service, backend, layer="shared")
    agent.shell(script)
    grade = graded(service, backend, agent)
    assert grade.layer == "shared"
    shown = {path: found[2] for path, found in content(Path(grade.path)).items()}
    expected = {path: found[2] for path, found in wanted.items() if not path.startswith("docs")}
    expected = {path: data for path, data in expected.items() if "build/nested/.git" not in path}
    expected |= {"README": expected["README"] + b"mine\n", "generated.txt": b"x\n"}
    assert shown == expected


def graded(service: Service, backend: Backend, held: Held, policy: str | None = None) -> Grade:
    request = StartGrade(owner=GRADER, backend=backend, policy=policy)
    return service.call(service.grading.grade, held.id, request, ROOT_PEER)


PLANT = "mkdir build; echo evil > build/ext.o; echo evil > conftest.py; echo theirs >> README"


def test_a_layer_that_somebody_else_wrote_is_judged_as_a_change(
    service: Service, backend: Backend
) -> None:
    """An administrator's save does not wash what an agent wrote, on whatever way it comes."""
    planted = start(service, backend)
    planted.shell(PLANT)
    saved = planted.save("washed", ROOT_PEER)
    assert (saved.saved_by, saved.written_by) == (0, USER)
    again = start(service, backend, layer="washed", peer=ROOT_PEER)
    again.shell("echo ours > more.txt", user=0)
    again.save("twice")
    for held in (
        start(service, backend, layer="washed"),
        start(service, backend, layer="twice"),
        start(service, backend, layer="twice").fork(),
    ):
        with pytest.raises(errors.SteeringRefusedError, match="conftest"):
            graded(service, backend, held, "runner=refuse")
        grade = graded(service, backend, held, "runner=drop")
        assert (grade.layer, "conftest.py" in grade.dropped) == (None, True)
        tree = Path(grade.path)
        assert not (tree / "conftest.py").exists()
        assert not (tree / "build").exists()
        assert "theirs" in (tree / "README").read_text()
        left = [each.path for each in grade.steering if each.rule == "prepared-layer"]
        assert left[-1:] == ["washed"]
        service.call(service.checkouts.reset, grade.id, ResetCheckout(), ROOT_PEER)
        assert "theirs" not in (tree / "README").read_text()
    start_grade = StartCheckout(
        instance="psf__requests@v2", backend=backend, layer="washed", view=View.GRADER
    )
    patched = service.call(
        service.grading.grade_patch, start_grade, ModelPatch(b""), "runner=drop", ROOT_PEER
    )
    assert (patched.layer, patched.dropped) == (None, ["conftest.py"])


def test_what_is_below_a_layer_of_somebody_else_stays(service: Service, backend: Backend) -> None:
    """The administrator's own layer is in the grade; a restart remembers who wrote which."""
    ours = start(service, backend, peer=ROOT_PEER)
    ours.shell("mkdir build; echo ours > build/ext.o; echo ours > made.txt", user=0)
    ours.save("ours")
    over = start(service, backend, layer="ours")
    over.shell("echo evil > build/ext.o; echo evil > conftest.py; rm made.txt")
    over.save("over", ROOT_PEER)
    held = start(service, backend, layer="over")
    lease = service.checkouts.leases.get(held.id)
    read = from_json(Lease, json.loads(to_json(lease, "directories", "state")))
    assert read["base"].saved == lease.base.saved
    grade = graded(service, backend, held, "drop")
    tree = Path(grade.path)
    assert (grade.layer, grade.dropped) == ("ours", ["conftest.py"])
    assert (tree / "build/ext.o").read_text() == "ours\n"
    assert not (tree / "made.txt").exists()


# -- environments -------------------------------------------------------------------------------------

DIGEST, NEWER = "a1" * 32, "b2" * 32


@pytest.fixture
def environment(service: Service) -> Iterator[str]:
    yield make_environment(service, DIGEST)
    service.call(service.trash.settle)
    for lease in service.checkouts.leases:
        service.call(service.checkouts.release, lease.id, ROOT_PEER)
    for layer in service.call(service.checkouts.list_layers, None, ROOT_PEER):
        service.call(service.checkouts.remove_layer, layer.id, ROOT_PEER)
    service.call(service.trash.settle)
    for record in service.environments.list():
        remove(service, record.digest)


def remove(service: Service, digest: str) -> None:
    async def on_its_loop() -> None:
        service.environments.remove(digest)

    service.call(on_its_loop)


def make_environment(service: Service, digest: str, key: str = "flask-2.0", **more: object) -> str:
    path = service.environments.new_path()
    (path / "files/bin").mkdir(parents=True)
    (path / "files/bin/python").write_text(f"#!{digest[:4]}\n")
    (path / "files/lib").mkdir()
    (path / "files/lib/package.py").write_text("x = 1\n")
    facts = {"key": key, "digest": digest, "state": "ready", "at": int(digest[0] == "b"), **more}
    (path / "environment.json").write_text(json.dumps(facts))
    return service.environments.add(path, digest).digest


def prefix(held: Held) -> Path:
    return Path(held.lease.directory) / "environment"


WORK = "echo mine > ../environment/lib/package.py; echo new > ../environment/new; rm ../environment/bin/python"


def test_an_environment_is_beside_the_tree_and_its_owners_alone(
    service: Service, backend: Backend, environment: str
) -> None:
    held, other = (start(service, backend, environment="flask-2.0") for _ in range(2))
    assert held.lease.environment == f"flask-2.0@{environment[:12]}"
    assert (prefix(held) / "lib/package.py").stat().st_uid == USER
    flags = os.statvfs(prefix(held)).f_flag
    assert backend is Backend.POOL or flags & os.ST_NOSUID
    assert backend is Backend.POOL or flags & os.ST_NODEV
    held.shell(WORK)
    assert (prefix(other) / "lib/package.py").read_text() == "x = 1\n"
    assert held.diff() == b""
    assert not (prefix(other) / "new").exists()
    with pytest.raises(errors.ConflictError):
        remove(service, environment)
    kept = (prefix(held) / "lib").stat().st_ino
    held.reset()
    assert backend is Backend.OVERLAY or (prefix(held) / "lib").stat().st_ino == kept
    assert sorted(path.name for path in prefix(held).rglob("*")) == [
        "bin",
        "lib",
        "package.py",
        "python",
    ]
    assert (prefix(held) / "lib/package.py").read_text() == "x = 1\n"
    for each in (held, other):
        each.release()
    service.call(service.trash.settle)
    assert not list(service.state.glob("checkouts/*/environment"))
    assert not list(service.state.glob("leases/*/environment*"))
    remove(service, environment)


def test_forks_and_snapshots_have_the_environment_as_it_was(
    service: Service, backend: Backend, environment: str
) -> None:
    held = start(service, backend, environment="flask-2.0")
    held.shell(WORK)
    fork = held.fork()
    assert (prefix(fork) / "lib/package.py").read_text() == "mine\n"
    assert not (prefix(fork) / "bin/python").exists()
    fork.shell("echo fork > ../environment/lib/package.py")
    held.snapshot("s")
    held.reset()
    held.shell("echo later > ../environment/lib/package.py")
    held.reset(to="s")
    assert [(prefix(each) / "lib/package.py").read_text() for each in (held, fork)] == [
        "mine\n",
        "fork\n",
    ]
    again = held.fork("s")
    assert (prefix(again) / "new").read_text() == "new\n"
    again.reset()
    assert not (prefix(again) / "new").exists()


def test_a_removed_snapshot_leaves_no_layer(
    service: Service, backend: Backend, environment: str
) -> None:
    layers = service.state / "templates/.layers"
    before = set(layers.iterdir()) if layers.exists() else set()
    held = start(service, backend, environment="flask-2.0")
    held.shell(WORK)
    held.snapshot("s")
    service.call(service.checkouts.remove_snapshot, held.id, "s", held.peer)
    service.call(service.trash.settle)
    assert set(layers.iterdir()) <= before


def test_a_layer_has_what_was_changed_in_the_environment(
    service: Service, backend: Backend, environment: str
) -> None:
    make_environment(service, NEWER)
    held = start(service, backend, environment=f"flask-2.0@{environment[:6]}")
    held.shell(
        WORK
        + "; echo compiled > a.o; mkdir -p ../environment/src/.git; echo x > ../environment/src/.git/HEAD"
    )
    layer = held.save("tools")
    assert layer.environment_copied is not None
    assert layer.environment_copied.left_out == {"git_files": 1}
    on_it = start(service, backend, layer="tools", environment=f"flask-2.0@{environment[:6]}")
    assert (prefix(on_it) / "lib/package.py").read_text() == "mine\n"
    assert not (prefix(on_it) / "src/.git").exists()
    on_it.shell("echo worse > ../environment/lib/package.py; rm a.o")
    on_it.reset()
    assert (prefix(on_it) / "lib/package.py").read_text() == "mine\n"
    assert (on_it.tree / "a.o").exists()
    with pytest.raises(errors.InvalidRequestError, match=r"it was saved with flask-2\.0@a1"):
        start(service, backend, layer="tools", environment=f"flask-2.0@{NEWER[:6]}")
    alone = start(service, layer="tools", backend=Backend.POOL)
    assert (alone.tree / "a.o").read_text() == "compiled\n"
    for each in (held, on_it, alone):
        each.release()
    service.call(service.trash.settle)
    with pytest.raises(errors.ConflictError):  # the layer is over it
        remove(service, environment)


def test_the_layer_of_an_environment_comes_without_asking(
    service: Service, backend: Backend, environment: str
) -> None:
    """Where an administrator, such as the build, saved it."""
    name = f"environment-{environment[:12]}"
    held = start(service, backend, environment="flask-2.0")
    held.shell("echo untrusted > a.o")
    held.save(name)
    assert start(service, backend, environment="flask-2.0").lease.layer is None
    held.shell("echo built > a.o")
    held.save(name, ROOT_PEER)
    with_it = start(service, backend, environment="flask-2.0")
    assert with_it.lease.layer == name
    assert (with_it.tree / "a.o").read_text() == "built\n"
    plain = start(service, backend)
    assert plain.reset(environment="flask-2.0").layer == name
    assert (prefix(plain) / "lib/package.py").exists()
    with pytest.raises(errors.ConflictError):
        service.checkouts.prepared.remove_of(environment)
    moved = plain.reset(commit="v3")
    assert (moved.layer, moved.environment) == (None, f"flask-2.0@{environment[:12]}")


def test_what_cannot_have_an_environment_says_so(
    service: Service, environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("absent", "flask-2.0@ffff"):
        with pytest.raises(errors.NotFoundError):
            start(service, environment=name)
    with pytest.raises(errors.NotFoundError, match="it has no instance"):
        start(service, environment="auto")
    image = {"variables": {}, "user": "root"}
    make_environment(service, NEWER, key="image", image=image)
    with pytest.raises(errors.BackendUnavailableError, match="the backend pool mounts nothing"):
        start(service, Backend.POOL, environment="image")
    pooled = start(service, Backend.POOL)
    with pytest.raises(errors.BackendUnavailableError) as refused:
        pooled.reset(environment="image")
    assert "`mirrord doctor`" in (refused.value.hint or "")
    # where an ordinary user's daemon mounts, a client outside of the home gets a pool tree
    monkeypatch.setattr("mirrord.host.namespaces.home.is_inside", lambda: True)
    with pytest.raises(errors.BackendUnavailableError) as refused:
        pooled.reset(environment="image")
    assert "`mirrord enter` before the whole harness" in (refused.value.hint or "")
    assert pooled.diff() == b""
    until(lambda: not service.environments.held[NEWER])  # its scan has ended


@pytest.mark.parametrize("lost", ["nothing", "environment", "both"])
def test_a_restart_finds_both_mounted_or_mounts_them(
    service: Service, environment: str, lost: str
) -> None:
    held = start(service, environment="flask-2.0")
    held.shell(WORK + "; echo mine > work")
    service.call(service.close)
    if lost != "nothing":
        subprocess.run(["umount", "--lazy", str(prefix(held))], check=True)
    if lost == "both":
        subprocess.run(["umount", "--lazy", str(held.tree)], check=True)
    service.call(service.open)
    assert (prefix(held) / "lib/package.py").read_text() == "mine\n"
    assert (held.tree / "work").read_text() == "mine\n"
    with pytest.raises(errors.ConflictError):
        remove(service, environment)
    held.reset()
    assert not (prefix(held) / "new").exists()


def test_a_reset_that_cannot_make_the_environment_leaves_both_as_they_were(
    service: Service, environment: str
) -> None:
    held = start(service, environment="flask-2.0")
    held.shell(WORK + "; echo mine > work")
    prefix_below = service.environments.directory(environment)
    prefix_below.rename(prefix_below.with_name("away"))
    try:
        with pytest.raises(errors.ResourceError):
            held.reset()
        assert (held.tree / "work").exists()
        assert (prefix(held) / "new").exists()
        assert held.diff() != b""
    finally:
        prefix_below.with_name("away").rename(prefix_below)
    held.reset()
    assert not (held.tree / "work").exists()
    assert not (prefix(held) / "new").exists()


def test_a_container_of_the_directory_follows_both_through_resets(
    service: Service, environment: str
) -> None:
    held = start(service, environment="flask-2.0")
    held.shell(WORK)
    script = f"mkdir {service.state}/seen; mount --rbind {held.lease.directory} {service.state}/seen; mount --make-rslave {service.state}/seen; echo ready; read x; cat {service.state}/seen/environment/lib/package.py"
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as inside:
        assert inside.stdin is not None
        assert inside.stdout is not None
        assert inside.stdout.readline() == "ready\n"
        held.reset()
        inside.stdin.write("\n")
        inside.stdin.close()
        assert inside.stdout.read() == "x = 1\n"
