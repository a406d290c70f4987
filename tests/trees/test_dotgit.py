"""The index we write is one that git takes for its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import ENV, Upstream, git
from trees import awkward, tree_of

from mirrord.trees.dotgit import index_bytes
from mirrord.trees.manifest import Manifest
from mirrord.trees.tree import materialise

Make = Callable[[str], Upstream]


def checked_out(upstream: Upstream, commit: str, root: Path) -> Manifest:
    """A tree with our index and a `.git` that reads the upstream's objects."""
    manifest = materialise(upstream.path / ".git", commit, root)
    git(root, "init", "-q")
    (root / ".git/objects/info/alternates").write_text(f"{upstream.path}/.git/objects\n")
    (root / ".git/HEAD").write_text(f"{commit}\n")
    (root / ".git/index").write_bytes(index_bytes(manifest))
    return manifest


@pytest.mark.parametrize("which", [0, 1])
def test_git_finds_a_clean_tree_without_hashing(
    make_upstream: Make, tmp_path: Path, which: int
) -> None:
    """`diff-files` compares stat data only; status writes no new index, since it learnt nothing."""
    upstream = make_upstream("up")
    commit = awkward(upstream)[which]
    checked_out(upstream, commit, tmp_path / "tree")
    before = (tmp_path / "tree/.git/index").stat()
    assert git(tmp_path / "tree", "diff-files") == ""
    assert git(tmp_path / "tree", "status", "--porcelain", "--ignored") == ""
    assert git(tmp_path / "tree", "diff-index", "--cached", "HEAD") == ""
    after = (tmp_path / "tree/.git/index").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("which", [0, 1])
def test_the_cached_trees_are_right(make_upstream: Make, tmp_path: Path, which: int) -> None:
    """write-tree takes them, and gets the same where it must compute them."""
    upstream = make_upstream("up")
    commit = awkward(upstream)[which]
    checked_out(upstream, commit, tmp_path / "tree")
    assert git(tmp_path / "tree", "write-tree") == tree_of(upstream, commit)
    assert (
        git(tmp_path / "tree", "fsck", "--cache", "--connectivity-only", check=False).count("error")
        == 0
    )
    git(tmp_path / "tree", "update-index", "--force-remove", "run.sh")
    git(tmp_path / "tree", "update-index", "--add", "run.sh")
    assert git(tmp_path / "tree", "write-tree") == tree_of(upstream, commit)


def test_the_index_equals_that_of_git(make_upstream: Make, tmp_path: Path) -> None:
    """Entries, modes and order are those of `git read-tree`."""
    upstream = make_upstream("up")
    commit = awkward(upstream)[0]
    checked_out(upstream, commit, tmp_path / "tree")
    ours = git(tmp_path / "tree", "ls-files", "--stage", "-z")
    git(tmp_path / "tree", "read-tree", commit)
    assert ours == git(tmp_path / "tree", "ls-files", "--stage", "-z")


def test_a_changed_file_shows(make_upstream: Make, tmp_path: Path) -> None:
    """The stat data is the file's own: a change within the same second is seen."""
    upstream = make_upstream("up")
    checked_out(upstream, awkward(upstream)[0], tmp_path / "tree")
    (tmp_path / "tree/plain.txt").write_text("plaim\n")
    assert git(tmp_path / "tree", "status", "--porcelain") == " M plain.txt"


def test_long_paths_and_an_empty_tree_are_written(make_upstream: Make, tmp_path: Path) -> None:
    """The longest path that a tree may have, nearly; an index with nothing in it."""
    upstream = make_upstream("up")
    empty = upstream.commit()
    checked_out(upstream, empty, tmp_path / "empty")
    assert git(tmp_path / "empty", "write-tree") == tree_of(upstream, empty)
    long = "/".join(["d" * 200] * 15) + "/file"
    oid = upstream.git("hash-object", "-w", "--stdin", stdin=b"x")
    upstream.git("update-index", "--add", "--index-info", stdin=f"100644 {oid}\t{long}\n".encode())
    tree = upstream.git("write-tree")
    commit = upstream.git("commit-tree", "-m", "long", tree)
    manifest = materialise(upstream.path / ".git", commit, tmp_path / "long")
    index = tmp_path / "index"
    index.write_bytes(index_bytes(manifest))
    listed = git(upstream.path, "ls-files", env={**ENV, "GIT_INDEX_FILE": str(index)})
    assert listed == long
    assert os.fsencode(long) in manifest.files
