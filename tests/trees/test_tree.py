"""Trees on disk: git's own checkout is the oracle, and no user of the tree makes a write leave it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import Upstream, git
from trees import awkward, contents, tree_of, worktree

from mirrord.errors import (
    CheckoutBusyError,
    CommitNotFoundError,
    CommitUnservableError,
    ProofFailedError,
)
from mirrord.host.files import open_directory, opened
from mirrord.host.processes import ActingAs
from mirrord.host.trash import remove
from mirrord.trees.scan import hash_tree, scan
from mirrord.trees.tree import materialise, move, repair
from mirrord.trees.writer import TreeWriter

Make = Callable[[str], Upstream]
NOW = 1_600_000_000 * 10**9

as_root = pytest.mark.root


def git_dir(upstream: Upstream) -> Path:
    return upstream.path / ".git"


@pytest.mark.parametrize("which", [0, 1])
def test_a_tree_equals_a_checkout_of_git(make_upstream: Make, tmp_path: Path, which: int) -> None:
    """Kinds, modes, targets, bytes; and the hash read back from disk is git's."""
    upstream = make_upstream("up")
    commit = awkward(upstream)[which]
    manifest = materialise(git_dir(upstream), commit, tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(worktree(upstream, commit, tmp_path / "gits"))
    assert hash_tree(tmp_path / "ours", manifest) == tree_of(upstream, commit) == manifest.tree


def test_a_tree_does_not_depend_on_the_umask(make_upstream: Make, tmp_path: Path) -> None:
    """A daemon with umask 077 makes the same tree."""
    upstream = make_upstream("up")
    commit = awkward(upstream)[0]
    old = os.umask(0o077)
    try:
        materialise(git_dir(upstream), commit, tmp_path / "ours")
    finally:
        os.umask(old)
    assert contents(tmp_path / "ours") == contents(worktree(upstream, commit, tmp_path / "gits"))
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o755


@pytest.mark.parametrize("back", [False, True])
def test_a_move_is_the_other_tree(make_upstream: Make, tmp_path: Path, back: bool) -> None:
    """File, directory, symlink and submodule turn into each other, both ways; what is alike is not touched."""
    upstream = make_upstream("up")
    old, new = awkward(upstream)[:: -1 if back else 1]
    before = materialise(git_dir(upstream), old, tmp_path / "ours")
    kept = (tmp_path / "ours/run.sh").stat()
    after = move(git_dir(upstream), before, new, tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(worktree(upstream, new, tmp_path / "gits"))
    assert hash_tree(tmp_path / "ours", after) == tree_of(upstream, new)
    assert scan(tmp_path / "ours", after).is_empty
    found = (tmp_path / "ours/run.sh").stat()
    assert (found.st_ino, found.st_ctime_ns) == (kept.st_ino, kept.st_ctime_ns)


def test_the_empty_tree_is_an_empty_directory(make_upstream: Make, tmp_path: Path) -> None:
    """A commit with nothing in it, and moves from it and to it."""
    upstream = make_upstream("up")
    empty = upstream.commit()
    full = upstream.commit({"a/b": "c"})
    manifest = materialise(git_dir(upstream), empty, tmp_path / "ours")
    assert hash_tree(tmp_path / "ours", manifest) == tree_of(upstream, empty)
    manifest = move(git_dir(upstream), manifest, full, tmp_path / "ours")
    manifest = move(git_dir(upstream), manifest, empty, tmp_path / "ours")
    assert list((tmp_path / "ours").iterdir()) == []


ATTRIBUTES = """
*.crlf text eol=crlf
*.auto text=auto eol=crlf
*.lf text eol=lf
*.only eol=crlf
*.bin binary
*.notext -text eol=crlf
*.old crlf eol=crlf
*.ident ident
*.u16 text working-tree-encoding=UTF-16
*.u16le text working-tree-encoding=UTF-16LE-BOM eol=crlf
*.u8ident ident working-tree-encoding=UTF-16LE
*.autoident ident text=auto eol=crlf
*.l1 text working-tree-encoding=ISO-8859-1
*.lfs filter=lfs
[attr]windows text eol=crlf
*.macro windows
/anchored text eol=crlf
"""
SAMPLES = {
    "lines": b"one\ntwo\nthree\n",
    "crlf": b"one\r\ntwo\r\n",
    "mixed": b"one\r\ntwo\nthree",
    "cr": b"one\rtwo\nthree\n",
    "binary": b"a\0b\nc\n",
    "control": b"\x01\x02\x03\nabc\n",
    "eof": b"text\nand\n\x1a",
    "empty": b"",
    "utf8": "grüße\naus köln\n".encode(),
    "odd": b"$$Id$ $Id$$Id$ $Id\n$Id: a$ $Id:a b$ $Id: a\tb $ $Id",
    "ids": b"$Id$ $Id: old $ $Id: has two spaces $ $Id: a b $Id$\n$Id\n$Id:$ $Idx$ $Id: open\n",
}
KINDS = [
    "crlf",
    "auto",
    "lf",
    "only",
    "bin",
    "notext",
    "old",
    "ident",
    "u8ident",
    "autoident",
    "u16",
    "u16le",
    "l1",
    "lfs",
    "macro",
    "none",
]


def write_blobs(upstream: Upstream, blobs: dict[str, bytes]) -> None:
    """Put blobs into the index as they are: `git add` would convert them."""
    for path, data in blobs.items():
        oid = upstream.git("hash-object", "-w", "--stdin", "--no-filters", stdin=data)
        upstream.git("update-index", "--add", "--cacheinfo", f"100644,{oid},{path}")


def without_index(upstream: Upstream) -> None:
    """As a mirror is: libgit2 would read the attributes of an index too."""
    (upstream.path / ".git/index").unlink()


def test_files_are_converted_as_git_converts_them(make_upstream: Make, tmp_path: Path) -> None:
    """Line ends, idents, encodings and macros of `.gitattributes`, in directories too; every sample with every attribute."""
    upstream = make_upstream("up")
    blobs = {f"{name}.{kind}": data for kind in KINDS for name, data in SAMPLES.items()}
    blobs |= {
        ".gitattributes": ATTRIBUTES.encode(),
        "sub/.gitattributes": b"* -eol\n*.none text eol=crlf\n!x\nsp\xff eol=crlf\n",
    }
    blobs |= {
        "sub/x.crlf": b"a\nb\n",
        "sub/x.none": b"a\nb\n",
        "anchored": b"a\n",
        "sub/anchored": b"a\n",
    }
    write_blobs(upstream, blobs)
    upstream.git("commit", "-qm", "blobs")
    commit = upstream.git("rev-parse", "HEAD")
    without_index(upstream)
    manifest = materialise(git_dir(upstream), commit, tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(worktree(upstream, commit, tmp_path / "gits"))
    assert hash_tree(tmp_path / "ours", manifest) == tree_of(upstream, commit)


def test_a_move_converts_files_of_new_attributes(make_upstream: Make, tmp_path: Path) -> None:
    """Where only `.gitattributes` changes, the files it speaks of are written as a fresh checkout has them."""
    upstream = make_upstream("up")
    commits = []
    for attributes in (b"* text=auto\n", b"*.txt text eol=crlf\n", b"*.c eol=crlf\n*.txt ident\n"):
        write_blobs(
            upstream, {".gitattributes": attributes, "a.txt": b"$Id$\nb\n", "d/b.c": b"c\nd\n"}
        )
        upstream.git("commit", "-qm", "attributes")
        commits.append(upstream.git("rev-parse", "HEAD"))
    without_index(upstream)
    manifest = materialise(git_dir(upstream), commits[0], tmp_path / "ours")
    for number, commit in enumerate([commits[1], commits[2], commits[0]]):
        manifest = move(git_dir(upstream), manifest, commit, tmp_path / "ours")
        assert contents(tmp_path / "ours") == contents(
            worktree(upstream, commit, tmp_path / f"gits{number}")
        )
        assert scan(tmp_path / "ours", manifest).is_empty


def write_tree_raw(upstream: Upstream, entries: list[tuple[bytes, bytes]]) -> str:
    data = b"".join(
        mode + b" " + name + b"\0" + bytes.fromhex(blob(upstream)) for mode, name in entries
    )
    return upstream.git("hash-object", "-w", "--literally", "-t", "tree", "--stdin", stdin=data)


def blob(upstream: Upstream) -> str:
    return upstream.git("hash-object", "-w", "--stdin", stdin=b"hostile")


HOSTILE = [
    b".git",
    b".GIT",
    b".gIt",
    b"git~1",
    b"..",
    b".",
    b"",
    b"a/b",
    b"../../outside",
    b"/etc/passwd",
    b"x" * 256,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tree_is_refused(make_upstream: Make, tmp_path: Path, name: bytes) -> None:
    """A name that leaves the tree or is git's own directory is no file name, at the top or below."""
    upstream = make_upstream("up")
    tree = write_tree_raw(upstream, [(b"100644", name)])
    below = upstream.git("mktree", stdin=f"040000 tree {tree}\tsub".encode())
    for top in (tree, below):
        commit = upstream.git("commit-tree", "-m", "hostile", top)
        with pytest.raises(CommitUnservableError):
            materialise(git_dir(upstream), commit, tmp_path / "ours")
        shutil.rmtree(tmp_path / "ours")


def test_a_tree_that_names_a_path_twice_is_refused(make_upstream: Make, tmp_path: Path) -> None:
    """First a symlink, then a file that would be written through it."""
    upstream = make_upstream("up")
    tree = write_tree_raw(upstream, [(b"120000", b"a"), (b"100644", b"a")])
    with pytest.raises(CommitUnservableError):
        materialise(
            git_dir(upstream), upstream.git("commit-tree", "-m", "twice", tree), tmp_path / "ours"
        )


def test_old_file_modes_are_read(make_upstream: Make, tmp_path: Path) -> None:
    """Trees from before 2005 hold 100664; they are files as any other."""
    upstream = make_upstream("up")
    tree = write_tree_raw(upstream, [(b"100664", b"a"), (b"100775", b"b")])
    manifest = materialise(
        git_dir(upstream), upstream.git("commit-tree", "-m", "modes", tree), tmp_path / "ours"
    )
    assert hash_tree(tmp_path / "ours", manifest) == tree
    assert stat.S_IMODE((tmp_path / "ours/b").stat().st_mode) == 0o755


def test_an_unknown_commit_is_said(make_upstream: Make, tmp_path: Path) -> None:
    """The error names the commit."""
    upstream = make_upstream("up")
    upstream.commit({"a": "b"})
    with pytest.raises(CommitNotFoundError, match="1111"):
        materialise(git_dir(upstream), "1" * 40, tmp_path / "ours")


def test_a_wrong_byte_on_disk_fails_the_proof(make_upstream: Make, tmp_path: Path) -> None:
    """The hash is of what is on disk, not of what was meant."""
    upstream = make_upstream("up")
    manifest = materialise(git_dir(upstream), upstream.commit({"a/b": "right"}), tmp_path / "ours")
    (tmp_path / "ours/a/b").write_text("wrong")
    with pytest.raises(ProofFailedError, match="a/b"):
        hash_tree(tmp_path / "ours", manifest)


@as_root
def test_a_tree_for_another_user_is_theirs(make_upstream: Make, tmp_path: Path) -> None:
    """Every path belongs to the owner asked for, symlinks and directories included; also after a move."""
    upstream = make_upstream("up")
    commits = awkward(upstream)
    manifest = materialise(git_dir(upstream), commits[0], tmp_path / "ours", owner=(1234, 2345))
    move(git_dir(upstream), manifest, commits[1], tmp_path / "ours")
    for above, directories, names in os.walk(tmp_path / "ours"):
        for name in (".", *directories, *names):
            found = os.lstat(os.path.join(above, name))
            assert (found.st_uid, found.st_gid) == (1234, 2345), name


def test_a_repair_brings_everything_back_as_new_files(make_upstream: Make, tmp_path: Path) -> None:
    """A changed file gets another inode, so an open descriptor or a hard link of its user's no longer reaches it."""
    upstream = make_upstream("up")
    commit = awkward(upstream)[0]
    root = tmp_path / "ours"
    manifest = materialise(git_dir(upstream), commit, root)
    os.link(root / "plain.txt", tmp_path / "outside")
    shutil.rmtree(root / "Case")
    (root / "Case").symlink_to("/tmp")
    shutil.rmtree(root / "deep")
    (root / "run.sh").unlink()
    (root / "run.sh").mkdir()
    (root / "run.sh/inside").touch()
    (root / "case").chmod(0)
    (root / "modules/one/planted").touch()
    (root / "extra/deep").mkdir(parents=True)
    with open(root / "empty", "w") as held:
        mended = repair(git_dir(upstream), manifest, scan(root, manifest), root)
        held.write("late")
    (tmp_path / "outside").write_text("late")
    assert contents(root) == contents(worktree(upstream, commit, tmp_path / "gits"))
    assert hash_tree(root, mended) == tree_of(upstream, commit)
    assert scan(root, mended).is_empty


def test_writing_goes_through_no_link(tmp_path: Path) -> None:
    """A directory that is a symlink now is an error, or is replaced; what it points to stays as it was."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (outside / "victim").write_text("mine")
    root.mkdir()
    (root / "dir").symlink_to(outside)
    (root / "file").symlink_to(outside / "victim")
    with opened(open_directory(root)) as fd, TreeWriter(fd, ActingAs(None), mtime_ns=NOW) as writer:
        with pytest.raises(CheckoutBusyError):
            writer.write_file(b"dir/victim", b"theirs")
        writer.remove(b"dir/victim")
        writer.write_file(b"file", b"new")
        writer.make_directory(b"dir")
        writer.write_file(b"dir/victim", b"ours")
    assert (outside / "victim").read_text() == "mine"
    assert (root / "dir/victim").read_text() == "ours"
    assert not (root / "file").is_symlink()


@as_root
def test_a_directory_swapped_for_a_link_while_we_work_leads_nowhere(
    make_upstream: Make, tmp_path: Path
) -> None:
    """The owner of a tree swaps its directories for links to ours, again and again, while trees are written and removed."""
    upstream = make_upstream("up")
    commits = [
        upstream.commit({f"d/e/f{n}": f"{n} {way}" for n in range(40)}) for way in ("a", "b")
    ]
    root, outside = tmp_path / "tree", tmp_path / "outside"
    (outside / "e").mkdir(parents=True)
    for n in range(40):
        (outside / "e" / f"f{n}").write_text("mine")
    before = {path: os.lstat(path) for path in (outside, *outside.rglob("*"))}
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for path, target in ((root / "d", outside), (root / "d/e", outside / "e")):
                with contextlib.suppress(OSError):
                    os.rename(path, f"{root}/aside")
                    os.symlink(target, path)
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    os.rename(f"{root}/aside", path)

    manifest = materialise(git_dir(upstream), commits[0], root, owner=(1234, 1234))
    attacker = threading.Thread(target=swap)
    attacker.start()
    try:
        for turn in range(60):
            with contextlib.suppress(CheckoutBusyError, OSError):
                manifest = move(git_dir(upstream), manifest, commits[(turn + 1) % 2], root)
            with contextlib.suppress(CheckoutBusyError, OSError):
                manifest = repair(git_dir(upstream), manifest, scan(root, manifest), root)
            if turn % 10 == 9:
                with (
                    opened(open_directory(tmp_path)) as fd,
                    contextlib.suppress(OSError, CheckoutBusyError),
                ):
                    remove(fd, b"tree")
                with contextlib.suppress(CheckoutBusyError, OSError):
                    manifest = materialise(git_dir(upstream), commits[0], root, owner=(1234, 1234))
    finally:
        stop.set()
        attacker.join()
    assert {path: os.lstat(path) for path in (outside, *outside.rglob("*"))}.keys() == before.keys()
    for path, was in before.items():
        found = os.lstat(path)
        assert (found.st_uid, found.st_mode, found.st_mtime_ns) == (
            was.st_uid,
            was.st_mode,
            was.st_mtime_ns,
        ), path


@as_root
def test_anything_that_a_user_can_make_is_removed(tmp_path: Path) -> None:
    """Depth, modes, pipes, the immutable and append-only flags; a link's target stays."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    root = tmp_path / "root"
    (root / "a/b").mkdir(parents=True)
    os.mkfifo(root / "a/pipe")
    (root / "a/link").symlink_to(victim)
    (root / "a/b/file").touch()
    fd = os.open(root / "a/b", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    os.chmod(root / "a/b/file", 0)
    git(tmp_path, "init", "-q", "root/nested")
    os.chmod(root / "a", 0)
    locked = [(root / "a/b/file", "+i"), (root / "a/b", "+a"), (root / "a", "+i")]
    for path, flag in locked:
        if shutil.which("chattr") is None or os.system(f"chattr {flag} {path} 2>/dev/null") != 0:
            pytest.skip("this file system has no immutable flag")
    with opened(open_directory(tmp_path)) as top:
        remove(top, b"root")
        remove(top, b"root")
    assert not root.exists()
    assert victim.read_text() == "mine"
