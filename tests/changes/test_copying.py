"""The copy of a tree that changes meanwhile, and its bounds; no mounts, no daemon."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
from anyone import NOBODY

from mirrord import errors
from mirrord.changes import copying
from mirrord.changes.copying import copy_layer
from mirrord.changes.pieces import HIDDEN, CopyLimits, CopyRule, Piece, Pieces, Taken, Where
from mirrord.host.files import open_directory, opened
from mirrord.host.processes import ActingAs
from mirrord.trees.manifest import clock_ns
from mirrord.trees.reader import TreeReader

Change = Callable[[Path], object]
LIMITS = CopyLimits(1000, 1 << 40, timedelta(minutes=1))


def refused(_path: bytes, error: Exception) -> NoReturn:
    raise error


def copied(
    tmp_path: Path,
    *changes: Change,
    earlier: Path | None = None,
    torn: Callable[[Pieces], Pieces] | None = None,
    limits: CopyLimits = LIMITS,
) -> tuple[Path, Taken]:
    """Copy `tmp_path/tree`; before the nth look comes the nth change. The first look is `torn`."""
    tree, layer = tmp_path / "tree", tmp_path / f"layer{len(os.listdir(tmp_path))}"
    todo, tears = list(changes), [torn] if torn else []
    acting = ActingAs((os.geteuid(), os.getegid()))
    with opened(open_directory(tree)) as root, TreeReader(root, acting) as reader:

        def survey() -> Pieces:
            if todo:
                todo.pop(0)(tree)
            with acting:
                pieces = {
                    path: Piece.of(Where.CLIENT, found)
                    for name in reader.names_in(b"")
                    for path, found in reader.iter_stats_below(name, refused)
                }
            return tears.pop()(pieces) if tears else pieces

        return layer, copy_layer(layer, survey, reader, acting, CopyRule(limits), earlier=earlier)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "d/e").mkdir(parents=True)
    for name in ("a", "d/b", "d/e/c"):
        (tree / name).write_text(f"{name}\n")
    return tree


def rest(tree: Path) -> None:
    """Wait for the next tick of the clock."""
    last = max(path.lstat().st_ctime_ns for path in tree.rglob("*"))
    while clock_ns() <= last:
        pass


def nothing(_tree: Path) -> None:
    pass


def test_what_changes_while_it_is_copied_is_copied_again(tmp_path: Path, tree: Path) -> None:
    """Contents, kinds and names; what goes meanwhile is not there."""

    def rewrite(tree: Path) -> None:
        (tree / "a").write_text("b\n")  # of the same size
        (tree / "d/b").unlink()
        (tree / "d/b").mkdir()
        (tree / "d/b/new").write_text("new\n")
        (tree / "d/e/c").unlink()
        (tree / "d/e").rmdir()
        (tree / "d/e").symlink_to("b")

    layer, taken = copied(tmp_path, nothing, rewrite)
    assert (layer / "a").read_text() == "b\n"
    assert (layer / "d/b/new").read_text() == "new\n"
    assert os.readlink(layer / "d/e") == "b"
    assert taken.files == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_an_ordinary_user_copies_the_attributes_of_what_nobody_may_write() -> None:
    with tempfile.TemporaryDirectory() as area:
        os.chown(area, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            (file := Path(area, "tree/d/a")).parent.mkdir(parents=True)
            file.write_text("a\n")
            for path in (file, file.parent):
                os.setxattr(path, "user.note", b"kept")
                path.chmod(0o555)
            layer, _ = copied(Path(area), nothing, nothing)
            for path in (layer / "d", layer / "d/a"):
                assert os.getxattr(path, "user.note") == b"kept"
                assert stat.S_IMODE(path.stat().st_mode) == 0o555
        finally:
            os.seteuid(0)


def test_a_file_that_goes_between_look_and_copy_is_no_error(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look finds what it is then."""
    open_regular = ActingAs.open_regular
    gone: list[Path] = []

    def hasty(self: ActingAs, directory: int, name: bytes, *, keep_atime: bool = False) -> int:
        if name == b"c" and not gone:
            gone.append((tree / "d/e/c").rename(tree / "d/moved"))
        return open_regular(self, directory, name, keep_atime=keep_atime)

    monkeypatch.setattr(ActingAs, "open_regular", hasty)
    layer, _ = copied(tmp_path)
    assert gone
    assert not (layer / "d/e/c").exists()
    assert (layer / "d/moved").read_text() == "d/e/c\n"


def no_longer_there(_pieces: Pieces) -> Pieces:
    raise FileNotFoundError(errno.ENOENT, "no longer a directory", b"d")


def without_parent(pieces: Pieces) -> Pieces:
    return {path: piece for path, piece in pieces.items() if path != b"d/e"}


def below_a_file(pieces: Pieces) -> Pieces:
    return pieces | {b"a/x": HIDDEN}


@pytest.mark.parametrize("torn", [no_longer_there, without_parent, below_a_file])
def test_a_look_that_saw_no_single_tree_is_repeated(
    tmp_path: Path, tree: Path, torn: Callable[[Pieces], Pieces]
) -> None:
    """A directory went, or became a file, while its content was looked at."""
    layer, taken = copied(tmp_path, torn=torn)
    assert {path.name for path in layer.rglob("*")} == {"a", "d", "b", "e", "c"}
    assert taken.files == 3


def test_a_tree_that_never_rests_is_busy(tmp_path: Path, tree: Path) -> None:
    changes = [lambda tree, n=n: (tree / "a").write_text(f"{n}\n") for n in range(9)]
    with pytest.raises(errors.CheckoutBusyError, match="it changed during each of 5 attempts"):
        copied(tmp_path, *changes)


def test_unchanged_files_are_shared_with_the_layer_before(tmp_path: Path, tree: Path) -> None:
    """Files written since are not, whatever their size and time; and none is shared with the client."""
    rest(tree)
    first, _ = copied(tmp_path)
    was = (tree / "a").stat()
    (tree / "a").write_text("A\n")
    os.utime(tree / "a", ns=(was.st_atime_ns, was.st_mtime_ns))
    second, _ = copied(tmp_path, earlier=first)
    assert (second / "a").read_text() == "A\n"
    assert (first / "a").read_text() == "a\n"
    assert (second / "d/b").stat().st_ino == (first / "d/b").stat().st_ino
    assert (second / "d/b").stat().st_ino != (tree / "d/b").stat().st_ino
    directory = tree / "d"
    directory.rename(tree / "x")
    (tree / "x/e").rename(tree / "d")
    third, _ = copied(tmp_path, earlier=second)
    assert (third / "d/c").read_text() == "d/e/c\n"
    assert (third / "x/b").read_text() == "d/b\n"


def test_an_unchanged_tree_is_not_copied_again(tmp_path: Path, tree: Path) -> None:
    """The answer says that the layer before is the same; a name more makes another."""
    rest(tree)
    first, taken = copied(tmp_path)
    assert not taken.is_same
    second, again = copied(tmp_path, earlier=first)
    assert again.is_same
    assert not second.exists()
    assert (again.files, again.size_bytes) == (taken.files, taken.size_bytes)
    (tree / "d/empty").mkdir()
    third, other = copied(tmp_path, earlier=first)
    assert not other.is_same
    assert (third / "d/empty").is_dir()


def test_what_was_written_in_this_very_moment_is_copied_again(tmp_path: Path, tree: Path) -> None:
    """Another write in the same tick of the clock may leave the same times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "clock_ns", lambda: (tree / "a").stat().st_ctime_ns)
        first, _ = copied(tmp_path)
    second, taken = copied(tmp_path, earlier=first)
    assert not taken.is_same
    assert (second / "a").stat().st_ino != (first / "a").stat().st_ino


def test_a_layer_before_that_is_gone_costs_a_copy(tmp_path: Path, tree: Path) -> None:
    first, _ = copied(tmp_path)
    for path in first.rglob("*"):
        if path.is_file():
            path.unlink()
    (tree / "a").write_text("changed\n")
    second, _ = copied(tmp_path, earlier=first)
    assert (second / "d/e/c").read_text() == "d/e/c\n"
    third, _ = copied(tmp_path, earlier=tmp_path / "never")
    assert (third / "a").read_text() == "changed\n"


def test_a_copy_is_bounded(tmp_path: Path, tree: Path) -> None:
    """In paths and bytes; a sparse file counts as long as it is."""
    with pytest.raises(errors.TooLargeError, match="5 changed paths"):
        copied(tmp_path, limits=LIMITS._replace(files=4))
    limits = LIMITS._replace(files=5, size_bytes=1 << 20)
    copied(tmp_path, limits=limits)
    os.truncate(tree / "a", 1 << 30)
    with pytest.raises(errors.TooLargeError, match="1024 MiB"):
        copied(tmp_path, limits=limits)


def test_a_long_file_is_copied_whole(tmp_path: Path, tree: Path) -> None:
    data = os.urandom(1 << 20)
    (tree / "long").write_bytes(data)
    layer, taken = copied(tmp_path)
    assert (layer / "long").read_bytes() == data
    assert taken.size_bytes > len(data)


def test_a_full_disk_is_named(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(copying, "write_all", full)
    with pytest.raises(errors.DiskFullError, match="a layer"):
        copied(tmp_path)


def test_locked_directories_and_files_stay_locked(tmp_path: Path, tree: Path) -> None:
    """On both sides; they are copied all the same."""
    (tree / "a").chmod(0)
    (tree / "d/e").chmod(0)
    layer, _ = copied(tmp_path)
    for each in (tree, layer):
        assert (each / "a").stat().st_mode & 0o777 == 0
        assert (each / "d/e").stat().st_mode & 0o777 == 0
        (each / "d/e").chmod(0o700)
        assert (each / "d/e/c").read_text() == "d/e/c\n"
