"""Diffs of random changes, byte for byte what git prints after `git add --all`."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from edited_trees import Tree, clone, make_tree
from gitrepos import git

from mirrord.errors import MirrordError
from mirrord.model import DiffFormat

CASES = int(os.environ.get("MIRRORD_DIFF_CASES", "40"))
"""For each seed; run thousands after a change of the code."""
REASONS = {None, "renames", "binary", "driver"}


def compare(tree: Tree) -> str | None:
    """Both on the tree as it is; answers why git was asked, or `refused`."""
    try:
        ours = {form: tree.diff(form) for form in DiffFormat}
    except MirrordError as error:
        assert tree.add_all() is not None, error
        return "refused"
    assert tree.add_all() is None
    for form, (content, _) in ours.items():
        assert content == tree.git_diff(form)
    return ours[DiffFormat.PATCH][1].reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_changes_are_printed_as_git_prints_them(seed: int, tmp_path: Path) -> None:
    """Edits, modes, links, renames, binary files, rules of every kind, odd names, files that become directories: as a
    patch, with --stat, with --name-status.
    """
    random, reasons = Random(seed), Counter[str | None]()
    tree = None
    for case in range(CASES):
        if tree is None or case % 8 == 0:
            tree = make_tree(tmp_path / str(case), random)
            if tree.add_all() is not None or tree.git_diff(DiffFormat.NAME_STATUS):
                tree = None  # git itself cannot check it out
                continue
        tree.change(random.choice((1, 2, 4, 10, 25)))
        reasons[compare(tree)] += 1
        tree.clean()
    assert set(reasons) <= REASONS | {"refused"}
    assert reasons[None] > CASES // 5


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A clone of a repository with what git alone can print."""
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    git(upstream, "init", "--quiet")
    made = Tree.__new__(Tree)
    made.top, made.tracked = os.fsencode(upstream), []
    files = {
        b"a.py": b"def f():\n" + b"    x = 1\n" * 9,
        b"page": b"title \x0c\n" + b"  text\n" * 9,
        b"image": bytes(range(256)) * 9,
        b"empty/one": b"",
        b"empty/two": b"",
        b"same/name": b"the same\n",
        b"other/name": b"the same\n",
        b"other/file": b"the same\n",
        b"a.rs": b"fn f() {\n" + b"    x();\n" * 9,
        b".gitattributes": b"*.py diff=python\n*.rs diff=rust\n",
    }
    for path, content in files.items():
        made.put(path, content)
    git(upstream, "add", "--all")
    git(upstream, "commit", "--quiet", "--message", "one")
    return clone(tmp_path, upstream, Random(0))


@pytest.mark.parametrize(
    ("reason", "path", "content"),
    [
        (None, b"a.py", b"def f():\n" + b"    x = 1\n" * 8 + b"    y = 2\n"),
        (None, b"page", b"title \x0c\n" + b"  text\n" * 8 + b"  end\n"),
        ("driver", b"a.rs", b"fn f() {\n" + b"    x();\n" * 8 + b"    y();\n"),
        ("binary", b"image", bytes(range(256)) * 8 + b"end"),
    ],
)
def test_a_diff_by_git_names_the_reason(
    tree: Tree, reason: str | None, path: bytes, content: bytes
) -> None:
    """The text behind `@@` by the rules of most drivers, and git's delta."""
    tree.put(path, content)
    assert compare(tree) == reason


@pytest.mark.parametrize("size", [99, 2 * 1024**2], ids=["short", "long"])
def test_git_prints_what_only_it_can_between_the_rest(tree: Tree, size: int) -> None:
    """Two entries of git's beside edits, a new binary file, an exact rename and a deletion. A long answer is git's."""
    tree.put(b"a.py", b"def f():\n" + b"    x = 1\n" * 8 + b"    y = 2\n")
    tree.put(b"a.rs", b"fn f() {\n" + b"    x();\n" * 8 + b"    y();\n")
    tree.put(b"image", Random(1).randbytes(size))
    tree.put(b"jpeg", bytes(range(256)))
    tree.put(b"page", b"diff --git a/x b/x\n")
    tree.remove(b"same/name")
    tree.put(b"same/renamed", b"the same\n")
    tree.remove(b"empty/one")
    assert compare(tree) == "driver"


def test_a_rename_with_an_edit_is_found_by_git(tree: Tree) -> None:
    """A deletion and an addition whose sizes leave room for it; others are none, and git is not asked."""
    tree.remove(b"a.py")
    tree.put(b"b.py", b"def f():\n" + b"    x = 1\n" * 8 + b"    y = 2\n")
    assert compare(tree) == "renames"
    assert b"similarity index" in tree.git_diff(DiffFormat.PATCH)
    tree.clean()
    tree.remove(b"a.py")
    tree.put(b"b.py", b"x\n")
    assert compare(tree) is None


def test_exact_renames_are_paired_as_git_pairs_them(tree: Tree) -> None:
    """By the same name first, then by order; empty files too."""
    for path in (b"empty", b"same", b"other"):
        tree.remove(path)
    for path, content in {
        b"new/file": b"the same\n",
        b"new/name": b"the same\n",
        b"zero": b"",
        b"zeros/two": b"",
    }.items():
        tree.put(path, content)
    assert compare(tree) is None
    assert tree.git_diff(DiffFormat.NAME_STATUS).count(b"R100") == 4


_started: list[object] = []
sys.addaudithook(lambda event, _: _started.append(event) if event == "subprocess.Popen" else None)


def test_a_plain_diff_starts_no_process_and_another_one(tree: Tree) -> None:
    """Edits, new files, modes, removals: none; where git is needed, it is one `git diff-tree`."""
    tree.put(b"a/b/new.py", b"new\n")
    tree.put(b"empty/one", b"now a line\n", 0o755)
    tree.remove(b"same")
    changed = tree.changed()
    counts = []
    for reason in (None, "binary"):
        began = len(_started)
        assert tree.diff(DiffFormat.PATCH, changed)[1].reason == reason
        counts.append(len(_started) - began)
        tree.put(b"image", bytes(9))
    assert counts == [0, 1]


def test_a_new_file_costs_no_stat(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory says what it is, its descriptor how long it is and whether it may be run."""
    stats: list[object] = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: stats.append(path) or stat(path, **how))
    counts = []
    for number in range(30):
        tree.put(b"new/%d" % number, b"new\n", 0o755 if number % 2 else 0o644)
        if number in (2, 29):
            stats.clear()
            tree.diff(DiffFormat.PATCH, [b"new"])
            counts.append(len(stats))
    assert counts[0] == counts[1]
    monkeypatch.undo()
    assert compare(tree) is None


@pytest.mark.parametrize("mode", [0o600, 0o400, pytest.param(0, marks=pytest.mark.root)])
def test_directories_that_their_owner_cannot_enter_are_read(tree: Tree, mode: int) -> None:
    tree.put(b"new/locked/file", b"new\n")
    tree.put(b"new/locked/sub/file", b"new\n")
    tree.put(b"empty/one", b"now a line\n")
    for path in ("new/locked/sub", "new/locked", "new", "empty"):
        (tree.path / path).chmod(mode)
    assert compare(tree) is None
    assert tree.git_diff(DiffFormat.NAME_STATUS).count(b"\n") == 3


def test_a_long_diff_is_in_the_spool(tree: Tree) -> None:
    """Not twice in memory: it is written as it is made."""
    tree.put(b"long", b"0123456789\n" * 200_000)
    content, made = tree.diff(DiffFormat.PATCH)
    assert made.content is None
    assert tree.add_all() is None
    assert content == tree.git_diff(DiffFormat.PATCH)
