"""Submodules and LFS objects of base commits: had by an import, shown with stores of their own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from waiting import until

from mirrord import Backend, Checkout, Client, History, PatchConflictError, View
from mirrord.catalog import Module
from mirrord.datasets.submodules import join_url
from mirrord.errors import CommitUnservableError
from mirrord.model import AuditLevel, FindingKind
from mirrord.seal.verify import verify_seal
from mirrord.templates.modules import config_of

pytestmark = [pytest.mark.root, pytest.mark.slow]

AGENT = 65534


class World(NamedTuple):
    running: Daemon
    base: str
    inner: str
    secret: str


def _link(upstream: Upstream, commit: str, path: str) -> None:
    upstream.git("update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")


BIG, OTHER, LATER = b"big\0" * 3000, b"other\0" * 9, b"of the future"


def _pointer(upstream: Upstream, data: bytes, *, is_there: bool = True) -> str:
    """Put an LFS object beside an upstream; return its pointer."""
    oid = hashlib.sha256(data).hexdigest()
    if is_there:
        file = upstream.path / ".git/lfs/objects" / oid[:2] / oid[2:4] / oid
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n"


def _import(running: Daemon, root: Path, name: str, rows: list[dict[str, str]]) -> dict[str, Any]:
    file = root / f"{name}.json"
    file.write_text(json.dumps(rows))
    with Client(running.socket) as client, file.open("rb") as opened:
        operation = client.import_dataset(opened, source=file.name)
        return client.wait(operation).result or {}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A submodule in a directory with one of its own, and five that cannot be had; three LFS
    objects, and one that cannot be had.
    """
    root = tmp_path_factory.mktemp("up")
    top, sub, deep = (Upstream(root / "o" / name) for name in ("top", "sub", "deep"))
    lowest = deep.commit({"deep.txt": "deep\n"})
    deep.commit({"deep.txt": "later\n"})
    sub.write(
        {"lib/a.py": "a\n", "b.txt": "b\n", "crlf.txt": "x\n", "o.bin": _pointer(sub, OTHER),
         ".gitattributes": "crlf.txt eol=crlf\n*.bin filter=lfs -text\n",
         ".gitmodules": '[submodule "d"]\n\tpath = in/deep\n\turl = ../deep\n'}
    )  # fmt: skip
    sub.git("add", "-A")
    _link(sub, lowest, "in/deep")
    sub.git("commit", "-qm", "one")
    inner = sub.git("rev-parse", "HEAD")
    secret = sub.commit({"b.txt": "of the future\n"})
    entries = {"my sub": ("pkg/sub", "../sub"), "gone": ("gone", "../gone"), "odd": ("odd", "../sub"),
               "a/.git/b": ("evil", "../sub"), "far": ("far", "ext::sh -c x")}  # fmt: skip
    text = "".join(
        f'[submodule "{n}"]\n\tpath = {p}\n\turl = {u}\n' for n, (p, u) in entries.items()
    )
    top.write({"README": "1\n", "pkg/x.py": "x\n", ".gitmodules": text})
    top.write({".gitattributes": "*.bin filter=lfs -text\n", "big.bin": _pointer(top, BIG),
               "pkg/é.bin": _pointer(top, BIG), "pointer.txt": _pointer(top, BIG),
               "lost.bin": _pointer(top, b"lost", is_there=False)})  # fmt: skip
    top.git("add", "-A")
    for path, commit in (("pkg/sub", inner), ("gone", "1" * 40), ("odd", "2" * 40), ("unnamed", inner),
                         ("evil", inner), ("far", inner)):  # fmt: skip
        _link(top, commit, path)
    top.git("commit", "-qm", "with submodules")
    base = top.git("rev-parse", "HEAD")
    top.commit({"big.bin": _pointer(top, LATER)})
    settings = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[datasets]\nlfs = true\n'
    with daemon(settings) as running:
        row = {"instance_id": "i", "repo": "o/top", "base_commit": base}
        result = _import(running, root, "rows", [row])
        missing = {each["path"]: each["reason"] for each in result["needs"]["missing"]}
        assert {*missing} == {"gone", "odd", "unnamed", "evil", "far"}, missing
        assert "no entry" in missing["unnamed"]
        assert "name" in missing["evil"]
        assert "refused" in missing["far"]
        assert result["needs"]["submodules"] == 2
        assert (result["needs"]["lfs_pointers"], result["needs"]["lfs_missing"]) == (3, 1)
        yield World(running, base, inner, secret)


@pytest.fixture(params=[Backend.OVERLAY, Backend.POOL])
def checkout(world: World, request: pytest.FixtureRequest) -> Iterator[Checkout]:
    with (
        Client(world.running.socket) as client,
        client.checkout("i", owner=AGENT, backend=request.param) as made,
    ):
        yield made


def run(tree: Path, script: str) -> str:
    """Run a script as the agent, without a network."""
    command = [
        "unshare",
        "--net",
        "setpriv",
        f"--reuid={AGENT}",
        f"--regid={AGENT}",
        "--clear-groups",
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    done = subprocess.run(
        [*command, "sh", "-ec", script], cwd=tree, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, (script, done.stdout, done.stderr)
    return done.stdout


def git_fails(at: Path, *words: str) -> bool:
    return subprocess.run(["git", "-C", str(at), *words], check=False).returncode != 0


def test_a_checkout_has_the_files_of_submodules(world: World, checkout: Checkout) -> None:
    """Their status is clean, git finds nothing to fetch, and nothing of the future is there."""
    tree = checkout.path
    assert (tree / "pkg/sub/crlf.txt").read_bytes() == b"x\r\n"
    assert (tree / "pkg/sub/in/deep/deep.txt").read_text() == "deep\n"
    assert list((tree / "gone").iterdir()) == []
    assert run(tree, "git status --porcelain; git -C pkg/sub status --porcelain --ignored") == ""
    shown = run(tree, "git submodule status pkg/sub; git -C pkg/sub submodule status")
    assert [line[0] for line in shown.splitlines()] == [" ", " "]
    assert run(tree, "git submodule update --init pkg/sub; git -C pkg/sub fsck --full") == ""
    assert run(tree, "git -C pkg/sub log --format=%H --all").split() == [world.inner]
    done = subprocess.run(
        ["git", "-C", str(tree / "pkg/sub"), "cat-file", "-e", world.secret], check=False
    )
    assert done.returncode != 0
    assert checkout.diff() == b""
    report = verify_seal(tree, world.base)
    assert (report.sealed, report.leaks) == (True, [])
    assert f"submodule pkg/sub at {world.inner}" in report.checked


@pytest.mark.parametrize("system", ["/dev/null", "git-lfs"])
def test_a_checkout_has_lfs_objects_in_place_of_pointers(
    world: World, checkout: Checkout, system: str
) -> None:
    """With git-lfs for the whole system, and without; git needs no server for them."""
    tree, objects = checkout.path, world.running.state_dir.glob("mirrors/*/lfs/objects/*/*/*")
    wanted = {hashlib.sha256(data).hexdigest() for data in (BIG, OTHER)}
    assert {each.name for each in objects} == wanted  # not LATER
    config = Path(system)
    if system == "git-lfs":
        config = world.running.root / "gitconfig"
        filters = "clean = git-lfs clean -- %f\nsmudge = git-lfs smudge -- %f\n"
        config.write_text(
            f'[filter "lfs"]\n{filters}process = git-lfs filter-process\nrequired = true\n'
        )

    def is_right(at: Path) -> bool:
        lfs = at / "big.bin", at / "pkg/é.bin", at / "pkg/sub/o.bin"
        plain = at / "lost.bin", at / "pointer.txt"
        return [file.read_bytes() for file in lfs] == [BIG, BIG, OTHER] and all(
            file.read_bytes().startswith(b"version ") for file in plain
        )

    assert is_right(tree)
    for script in (
        "touch big.bin pkg/sub/o.bin",
        "rm big.bin; git checkout -q -- big.bin; git -C pkg/sub checkout -q -f HEAD -- o.bin",
        "echo x >>big.bin; git -c user.name=a -c user.email=a@b stash -q; git stash drop -q",
    ):
        clean = "git status --porcelain; git -C pkg/sub status --porcelain; git diff HEAD"
        assert run(tree, f"export GIT_CONFIG_SYSTEM={config}; {script}; {clean}") == "", script
        assert is_right(tree), script
    checkout.reset()
    assert (is_right(tree), checkout.diff()) == (True, b"")
    assert not verify_seal(tree, world.base).leaks
    stray = tree / ".git/lfs/objects/aa/bb" / ("aabb" + "0" * 60)
    run(tree, f"mkdir -p {stray.parent}; echo x >{stray}; echo changed >big.bin; rm pkg/é.bin")
    assert [each.kind for each in verify_seal(tree, world.base).leaks] == ["object"]
    patch = checkout.diff()
    with checkout.fork() as fork, checkout.grade() as grade:
        for each in (fork, grade):
            assert (each.path / "big.bin").read_bytes() == b"changed\n"
            assert not (each.path / "pkg/é.bin").exists()
    checkout.reset()
    checkout.apply(patch)
    assert checkout.diff() == patch
    # git knows an object by its pointer, and so do the patches that it makes
    checkout.reset()
    patch = run(tree, "echo new >big.bin; git mv pkg/é.bin moved.bin; git diff HEAD -M").encode()
    assert b"\n-oid sha256:" in patch
    note = "'big.bin' is an LFS pointer, whose object the mirror lacks"
    with Client(world.running.socket) as client:
        checkout.reset()
        assert client.apply_patch(checkout.id, patch).notes == [note]
        assert (tree / "big.bin").read_bytes().startswith(b"version ")
        assert (tree / "moved.bin").read_bytes() == BIG
        assert client.apply_patch(checkout.id, patch, reverse=True).notes == []
        assert (is_right(tree), checkout.diff()) == (True, b"")
        with client.grade("i", patch) as grade:
            assert grade.report.notes == [note]


def test_edits_below_a_submodule_are_edits(
    world: World, checkout: Checkout, tmp_path: Path
) -> None:
    """In diff, snapshot, fork, grade, apply and reset; in its index, and committed there, too."""
    tree = checkout.path
    run(tree, "echo more >>pkg/sub/b.txt; rm pkg/sub/lib/a.py; echo 1 >pkg/sub/in/deep/new; git -C pkg/sub add -A"
              "; git -C pkg/sub -c user.name=a -c user.email=a@b commit -qm x; printf 'x\\r\\ny\\r\\n' >pkg/sub/crlf.txt")  # fmt: skip
    patch = checkout.diff()
    assert [line for line in patch.decode().splitlines() if line.startswith("diff")] == [
        f"diff --git a/{path} b/{path}"
        for path in ("pkg/sub/b.txt", "pkg/sub/crlf.txt", "pkg/sub/in/deep/new", "pkg/sub/lib/a.py")
    ]
    assert b"+y\n" in patch

    def edited(at: Path) -> bool:
        files = at / "pkg/sub/b.txt", at / "pkg/sub/in/deep/new", at / "pkg/sub/crlf.txt"
        expected = "b\nmore\n", "1\n", "x\ny\n"
        return (
            tuple(file.read_text() for file in files) == expected
            and not (at / "pkg/sub/lib/a.py").exists()
        )

    assert edited(tree)
    checkout.snapshot("s")
    with checkout.fork() as fork:
        assert edited(fork.path)
        assert fork.diff() == patch
    with Client(world.running.socket) as client, checkout.grade() as grade:
        assert edited(grade.path)
        with client.checkout("i", backend=checkout.lease.backend, view=View.GRADER) as plain:
            plain.apply(patch)
            assert edited(plain.path)
            assert plain.diff() == patch
            plain.apply(patch, reverse=True)
            assert plain.diff() == b""
    proof = checkout.reset()
    assert proof.tree == checkout.lease.tree
    assert run(tree, "git status --porcelain; git -C pkg/sub log --format=%H").split() == [
        world.inner
    ]
    assert checkout.diff() == b""
    checkout.reset(to="s")
    assert edited(tree)
    assert checkout.diff() == patch
    checkout.reset()
    assert not verify_seal(tree, world.base).leaks


def _pointers(world: World, new: str, old: str = "") -> dict[str, str]:
    """Return how git records that a submodule moves: as a commit, and by `diff --submodule`."""
    old = old or world.inner
    header = f"diff --git a/pkg/sub b/pkg/sub\nindex {old[:7]}..{new[:7]} 160000\n"
    names = "--- a/pkg/sub\n+++ b/pkg/sub\n@@ -1 +1 @@\n"
    lines = f"-Subproject commit {old}\n+Subproject commit {new}\n"
    return {
        "plain": header + names + lines,
        "no header": names + lines,
        "log": f"Submodule pkg/sub {old[:7]}..{new[:7]}:\n  > later\n",
    }


@pytest.mark.parametrize("backend", [Backend.OVERLAY, Backend.POOL])
def test_a_patch_that_moves_a_submodule_has_its_files(world: World, backend: Backend) -> None:
    """Both ways, beside another file's change, and in a grade; not for an agent."""
    other = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -1 +1 @@\n-x\n+y\n"
    with Client(world.running.socket) as client:
        with client.checkout("i", backend=backend, view=View.GRADER) as made:
            for how, text in _pointers(world, world.secret).items():
                answer = client.apply_patch(made.id, (text + other).encode())
                assert (answer.notes, answer.strategy) == ([], "exact"), how
                assert (made.path / "pkg/sub/b.txt").read_text() == "of the future\n", how
                assert (made.path / "pkg/x.py").read_text() == "y\n"
                moved = made.diff()
                assert b"pkg/sub/b.txt" in moved
                made.apply((other + text).encode(), reverse=True)
                assert made.diff() == b"", how
            text = _pointers(world, world.secret)["plain"]
            (made.path / "pkg/sub/b.txt").write_text("edited\n")
            with pytest.raises(PatchConflictError, match=r"pkg/sub/b\.txt"):
                made.apply(text)
            made.reset()
            dirty = _pointers(world, f"{world.inner}-dirty")["plain"]
            deep = f"Submodule pkg/sub {world.inner[:9]}..{world.secret[:9]}:\n" + moved.decode()
            for patch, files in {
                _pointers(world, "3" * 40)["plain"] + other: "commit 333",
                dirty + other: "edited",
                deep: None,
                text.replace("pkg/sub", "notes")
                .replace("index ", "new file mode 100644\nindex ")
                .replace("--- a/notes", "--- /dev/null")
                .replace("@@ -1 +1 @@", "@@ -0,0 +1 @@")
                .replace(f"-Subproject commit {world.inner}\n", "")
                .replace(" 160000", ""): None,
                text.replace("pkg/sub", "gone").replace(world.inner, "1" * 40): "not had",
            }.items():
                notes = client.apply_patch(made.id, patch.encode()).notes
                assert len(notes) == bool(files), patch
                assert (files or "") in "".join(notes)
                made.reset()
            renamed = (
                "diff --git a/pkg/sub b/pkg/new\nsimilarity index 100%\n"
                "rename from pkg/sub\nrename to pkg/new\n"
            )
            named = f"diff --git a/pkg/x.py b/pkg/x.py\n{other}"
            for sections in (renamed + named, other + renamed):
                notes = client.apply_patch(made.id, sections.encode()).notes
                assert notes == [
                    "submodule 'pkg/sub': its files stay: the patch renames it to 'pkg/new'"
                ]
                assert made.diff().count(b"diff --git") == 1
                made.reset()
            gone = text.replace("index ", "deleted file mode 160000\nindex ").replace(
                "+++ b/pkg/sub\n@@ -1 +1 @@", "+++ /dev/null\n@@ -1 +0,0 @@"
            )
            made.apply(gone.partition("+Subproject")[0])
            assert not (made.path / "pkg/sub/b.txt").exists()
        with client.grade("i", (text + other).encode(), backend=backend) as grade:
            assert (grade.path / "pkg/sub/b.txt").read_text() == "of the future\n"
            assert grade.report.notes == []
        with client.grade("i", patch.encode(), backend=backend) as grade:
            assert "not had" in "".join(grade.report.notes)
        with client.checkout("i", backend=backend) as made:
            notes = client.apply_patch(made.id, text.encode()).notes
            assert "agent view" in "".join(notes)
            assert made.diff() == b""


def test_a_store_of_a_submodule_with_more_is_a_leak(world: World, tmp_path: Path) -> None:
    """A later commit, another HEAD, a setting, a store that no submodule of HEAD has."""
    with Client(world.running.socket) as client, client.checkout("i") as made:
        found = {}
        for what, script in {
            "nothing": "true",
            "later": "git -C pkg/sub fetch -q UP main",
            "hook": "echo x >'.git/modules/my sub/hooks'",
            "setting": "git -C pkg/sub config core.fsmonitor x",
            "work tree": "git config -f '.git/modules/my sub/config' core.worktree /etc",
            "another": "cp -a '.git/modules/my sub' .git/modules/other",
            "no .git": "rm pkg/sub/.git",
            "a link": "mv '.git/modules/my sub' x; ln -s ../../x '.git/modules/my sub'",
        }.items():
            copy = tmp_path / what.replace(" ", "-")
            subprocess.run(["cp", "-a", str(made.path), str(copy)], check=True)
            up = git(made.path, "--version") and world.running.root
            mirror = world.running.state_dir / "mirrors/o__sub"
            subprocess.run(["sh", "-ec", script.replace("UP", str(mirror))], cwd=copy, check=True)
            assert up
            found[what] = bool(verify_seal(copy, world.base).leaks)
            shutil.rmtree(copy)
    assert found == {what: what != "nothing" for what in found}


def test_submodules_are_recorded_and_audited(world: World) -> None:
    """Pinned for the data set in their own mirrors; an export and its digest are without them."""
    with Client(world.running.socket) as client:
        pins = {(pin.mirror, pin.commit, pin.reason) for pin in client.list_pins()}
        assert ("o__sub", world.inner, "submodule") in pins
        assert {name for name, _, reason in pins if reason == "submodule"} == {"o__sub", "o__deep"}
        assert {mirror.name for mirror in client.list_mirrors()} == {"o__top", "o__sub", "o__deep"}
        row = client.get_instance("i", view=View.GRADER)
        assert row.submodules == ["pkg/sub", "pkg/sub/in/deep"]
        assert (row.lfs_pointers, row.lfs_missing) == (3, 1)
        assert {*(row.missing or {})} == {"gone", "odd", "unnamed", "evil", "far"}
        assert [each.role for each in row.commits or ()] == ["base"]
        assert client.get_instance("i").missing is None
        exported = b"".join(client.export_dataset("rows"))
        assert world.inner.encode() not in exported


def test_a_bundle_has_the_submodules_and_lfs_objects(world: World, tmp_path: Path) -> None:
    """A host without the upstreams serves the same trees; each mirror has its own objects alone.

    What is not had is named there as here, and git reads the file as a bundle of the mirror.
    """
    file = tmp_path / "top.bundle"
    with Client(world.running.socket) as client, client.checkout("i") as made:
        client.create_bundle("o/top", file)
        tree, missing = made.tree, {*(client.get_instance("i", view=View.GRADER).missing or {})}
    git(tmp_path, "clone", "-q", str(file), "clone")
    assert git(tmp_path / "clone", "log", "-1", "--format=%H", world.base) == world.base
    with daemon('[upstream]\nurl = "file:///nonexistent/{owner}/{name}"\n') as other:
        with Client(other.socket) as client:
            result = client.wait(client.import_bundle(file)).result or {}
            assert (result["submodules"], result["lfs_objects"]) == (["o__deep", "o__sub"], 2)
            assert {each["path"] for each in result["needs"]["missing"]} == missing
            assert (result["needs"]["submodules"], result["needs"]["lfs_missing"]) == (2, 1)
            for backend in (Backend.OVERLAY, Backend.POOL):
                with client.checkout("i", owner=AGENT, backend=backend) as made:
                    assert made.tree == tree
                    assert (made.path / "pkg/sub/in/deep/deep.txt").read_text() == "deep\n"
                    assert (made.path / "pkg/sub/o.bin").read_bytes() == OTHER
                    assert (made.path / "big.bin").read_bytes() == BIG
                    assert run(made.path, "git status --porcelain") == ""
                    assert not verify_seal(made.path, world.base).leaks
            pins = {(pin.mirror, pin.commit, pin.owner) for pin in client.list_pins()}
            assert ("o__sub", world.inner, "dataset/rows") in pins
            audit = client.wait(client.start_audit(level=AuditLevel.CONTENT, heal=False)).result
            assert (audit or {})["findings"] == []
            again = client.wait(client.import_bundle(file)).result or {}
            assert (again["created"], again["lfs_objects"]) == (False, 2)
        for name, stranger in (("o__top", world.inner), ("o__sub", world.base)):
            assert git_fails(other.state_dir / "mirrors" / name, "cat-file", "-e", stranger)


def test_lfs_objects_are_audited_and_healed(world: World) -> None:
    """By size, and by sha256 at level `content`; stores that share a damaged file are discarded."""
    big, other = (hashlib.sha256(data).hexdigest() for data in (BIG, OTHER))
    (damaged,) = world.running.state_dir.glob(f"mirrors/o__top/lfs/objects/*/*/{big}")
    (lost,) = world.running.state_dir.glob(f"mirrors/o__sub/lfs/objects/*/*/{other}")
    damaged.chmod(0o644)
    damaged.write_bytes(BIG.upper())
    lost.unlink()
    with Client(world.running.socket) as client:

        def found(level: AuditLevel, *, heal: bool) -> set[tuple[str, str]]:
            client.wait(client.start_audit(level=level, heal=heal))
            audit = client.list_audits()[0]
            return {(each.mirror, each.detail.rpartition(": ")[2]) for each in audit.findings
                    if each.kind is FindingKind.OBJECT}  # fmt: skip

        assert found(AuditLevel.CLOSURE, heal=False) == {("o__sub", "it is gone")}
        every = {("o__sub", "it is gone"), ("o__top", "sha256 mismatch")}
        assert found(AuditLevel.CONTENT, heal=False) == every
        assert found(AuditLevel.CONTENT, heal=True) == set()
        assert (damaged.read_bytes(), lost.read_bytes()) == (BIG, OTHER)
        with client.checkout("i", owner=AGENT) as made:
            assert (
                run(made.path, "rm big.bin; git checkout -q -- big.bin; cat big.bin")
                == BIG.decode()
            )


def test_a_host_without_the_lfs_objects_says_so(world: World, tmp_path: Path) -> None:
    """As another daemon of a fleet is; an import there fetches them again."""
    shutil.rmtree(world.running.state_dir / "mirrors/o__top/lfs/objects")
    composed = world.running.state_dir / "templates/o__top/whole.git"
    with Client(world.running.socket) as client:
        until(lambda: client.gc() and not composed.exists())
        with pytest.raises(CommitUnservableError, match="LFS objects"):
            client.checkout("i")
        row = {"instance_id": "i", "repo": "o/top", "base_commit": world.base}
        needs = _import(world.running, tmp_path, "rows", [row])["needs"]
        assert (needs["lfs_pointers"], needs["lfs_missing"]) == (3, 1), needs
        with client.checkout("i") as made:
            assert (made.path / "big.bin").read_bytes() == BIG


def test_every_history_has_what_it_says(world: World) -> None:
    with Client(world.running.socket) as client:
        with client.checkout("i", history=History.SQUASHED) as made:
            assert (made.path / "pkg/sub/b.txt").read_text() == "b\n"
            assert git(made.path, "status", "--porcelain") == ""
        with client.checkout("i", history=History.LINKED) as made:
            assert list((made.path / "pkg/sub").iterdir()) == []
            assert made.diff() == b""


def test_a_data_set_that_is_removed_leaves_nothing(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No pin, so the mirrors of submodules may go; a checkout by commit then has none of them."""
    root = tmp_path_factory.mktemp("other")
    up = Upstream(root / "p" / "top")
    sub = Upstream(root / "p" / "low")
    up.write({".gitmodules": '[submodule "s"]\n\tpath = s\n\turl = ../low\n'})
    up.git("add", "-A")
    _link(up, sub.commit({"f": "1\n"}), "s")
    up.git("commit", "-qm", "one")
    base = up.git("rev-parse", "HEAD")
    with daemon(f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n') as running:
        row = {"instance_id": "i", "repo": "p/top", "base_commit": base}
        assert _import(running, root, "one", [row])["needs"]["submodules"] == 1
        with Client(running.socket) as client:
            composed = running.state_dir / "templates/p__top/whole.git"
            for _ in range(2):  # a collection removes the composed tree with its last user
                with client.checkout("i") as made:
                    client.gc()
                    assert composed.exists()
                    assert (made.path / "s/f").read_text() == "1\n"
                    assert made.diff() == b""
                # what was mounted is let go just after the answer
                until(lambda: client.gc() and not composed.exists())
            client.remove_dataset("one")
            assert [pin.mirror for pin in client.list_pins()] == []
            client.remove_mirror("p/low")
            for backend in (Backend.OVERLAY, Backend.POOL):
                with client.checkout(f"p__top@{base}", backend=backend) as made:
                    assert made.diff() == b""
                    made.reset()
        running.stop()
        running.write_config(
            f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[datasets]\nsubmodules = false\n'
        )
        running.start()
        result = _import(running, root, "one", [row])["needs"]
        assert (result["submodules"], result["missing_count"]) == (0, 1)
        with Client(running.socket) as client, client.checkout("i") as made:
            assert list((made.path / "s").iterdir()) == []


@pytest.mark.parametrize(
    ("parent", "url", "joined"),
    [
        ("https://h/o/top.git", "../sub.git", "https://h/o/sub.git"),
        ("https://h/o/top", "./sub", "https://h/o/top/sub"),
        ("https://h/o/top/", "../../x/sub", "https://h/x/sub"),
        ("git@h:o/top.git", "../sub.git", "git@h:o/sub.git"),
        ("/srv/o/top", "../sub", "/srv/o/sub"),
        ("https://h/o/top", "https://other/o/sub", "https://other/o/sub"),
    ],
)
def test_urls_are_joined_as_git_does(parent: str, url: str, joined: str) -> None:
    assert join_url(parent, url) == joined


def test_a_name_with_quotes_is_written_as_git_reads_it(tmp_path: Path) -> None:
    name, url = 'a"b\\c', "../x;y#z"
    module = Module("p", name, f"modules/{name}", url, "o__n", "1" * 40)
    (tmp_path / "config").write_bytes(config_of([module]))
    read = ["git", "config", "--file", str(tmp_path / "config"), f"submodule.{name}.url"]
    assert subprocess.run(read, capture_output=True, text=True, check=True).stdout == f"{url}\n"
