"""Unknown is not absent, on each supported Python."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mirrord
from mirrord import presence

LOOKS: list[Callable[[Path], object]] = [
    presence.exists,
    presence.lexists,
    presence.is_file,
    presence.is_dir,
    presence.is_socket,
    presence.is_symlink,
    lambda path: presence.matching(path, "*"),
    lambda path: presence.matching(path.parent, path.name),
    lambda path: presence.matching(path.parent, f"{path.name}/*"),
    lambda path: list(presence.walk(path)),
    lambda path: list(presence.iter_below(path)),
]


@contextmanager
def anybody() -> Iterator[None]:
    """Root may look everywhere, so it is somebody else meanwhile."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("look", LOOKS)
def test_a_path_that_cannot_be_looked_at_is_an_error(
    tmp_path: Path, look: Callable[[Path], object]
) -> None:
    inside = tmp_path / "closed" / "inside"
    inside.mkdir(parents=True)
    inside.parent.chmod(0)
    try:
        with anybody(), pytest.raises(PermissionError):
            look(inside)
    finally:
        inside.parent.chmod(0o700)
    with pytest.raises(OSError, match="too long") as raised:
        look(tmp_path / ("n" * 300) / "x")
    assert raised.value.errno == errno.ENAMETOOLONG


def test_a_directory_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # no other user may enter the directories above it
    closed, here = Path("closed"), Path()
    closed.mkdir(0)
    looks: list[Callable[[], object]] = [
        lambda: presence.matching(here, "*/*"),
        lambda: presence.matching(here, "**/*"),
        lambda: list(presence.walk(here)),
        lambda: list(presence.iter_below(here)),
    ]
    with anybody():
        for look in looks:
            with pytest.raises(PermissionError):
                look()
        assert not list(here.glob("*/*"))  # the reason for `matching`
    closed.chmod(0o700)


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_is_where_a_component_is_missing_a_file_or_a_circle(
    tmp_path: Path, look: Callable[[Path], object]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    for name in "missing", "missing/x", "file/x", "circle/x":
        assert not look(tmp_path / name)


def test_what_exists_has_its_kind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dir").mkdir()
    (tmp_path / "to-dir").symlink_to("dir")
    (tmp_path / "nowhere").symlink_to("missing")
    kinds = presence.exists, presence.lexists, presence.is_file, presence.is_dir
    answers = {
        name: [*(kind(tmp_path / name) for kind in kinds), presence.is_symlink(tmp_path / name)]
        for name in ("file", "dir", "to-dir", "nowhere")
    }
    assert answers == {
        "file": [True, True, True, False, False],
        "dir": [True, True, False, True, False],
        "to-dir": [True, True, False, True, True],
        "nowhere": [False, True, False, False, True],
    }
    assert not presence.exists("null\0byte")


@pytest.mark.parametrize(
    "pattern",
    ["*", "a/*.idx", "[!.]*/*", "?/pack-*", "a", "none", "*/none", "**/*", "**/deep/*", "a/**/x*"],
)
def test_matches_are_those_of_pathlib(tmp_path: Path, pattern: str) -> None:
    for name in "a/one.idx", "a/pack-1", "b/pack-2", ".c/hidden", "a/deep/x1", "a/deep/deep/x2":
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert sorted(presence.matching(tmp_path, pattern)) == sorted(tmp_path.glob(pattern))
    assert sorted(presence.iter_below(tmp_path)) == sorted(tmp_path.rglob("*"))
    assert {path for path, _, _ in presence.walk(os.fsencode(tmp_path))} == {
        os.fsencode(tmp_path), *map(os.fsencode, filter(Path.is_dir, tmp_path.rglob("*")))
    }  # fmt: skip


GUESSES = {
    *("exists", "is_file", "is_dir", "is_symlink", "is_mount", "is_junction"),
    *("is_socket", "is_fifo", "is_block_device", "is_char_device", "glob", "rglob"),
}
OF_OS = {"walk": "os.walk"} | {
    it: f"os.path.{it}" for it in ("exists", "lexists", "isfile", "isdir", "islink")
}
# programs of the standard library alone, read as text and run where mirrord is not
ALONE = {
    *("environments/compiling.py", "environments/probe.py", "host/namespaces/holder.py"),
    *("sandbox/attacher.py", "sandbox/confine.py", "sandbox/gitremote.py", "sandbox/reporter.py"),
}
# of SQL, of an archive, and of directory entries, which raise what is not FileNotFoundError
OTHERS = {
    ("catalog/claims.py", "sa.exists()"),
    ("catalog/mirrors.py", "sa.exists()"),
    ("catalog/needs.py", "sa.exists()"),
    ("environments/images/tree_layers.py", "entry.is_symlink()"),
    ("host/files.py", "entry.is_symlink()"),
    ("presence.py", "os.walk"),
    ("seal/contents.py", "info.is_dir()"),
}


def test_no_module_takes_an_error_for_absence() -> None:
    """`Path.exists()` and its like do so since Python 3.14, `Path.glob` and `os.walk` ever did."""
    top = Path(mirrord.__file__).parent
    calls = set()
    any_guess = re.compile(rf"\.({'|'.join({*GUESSES, *OF_OS})})\b").search
    for file in top.rglob("*.py"):
        name = str(file.relative_to(top))
        if name not in ALONE and any_guess(text := file.read_text()):  # parsing all takes 3 s
            calls |= {(name, call) for call in _guesses_in(ast.parse(text))}
    assert calls == OTHERS


@pytest.mark.parametrize("name", sorted(ALONE))
def test_a_program_for_another_place_imports_nothing_of_ours(name: str) -> None:
    tree = ast.parse((Path(mirrord.__file__).parent / name).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports if node.level] == []


def _guesses_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OF_OS:
            yield from {ast.unparse(node)} & {OF_OS[node.attr]}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_of_entry = any(word.arg == "follow_symlinks" for word in node.keywords)
            if node.func.attr in GUESSES and not is_of_entry:
                yield ast.unparse(node)
