"""Refs and HEAD read from files: what git says, or None where git has to be asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import Upstream, git

from mirrord.mirrors.repository import read_head, read_refs


@pytest.fixture
def bare(tmp_path: Path, make_upstream: Callable[..., Upstream]) -> Path:
    """Loose refs over packed ones, an annotated tag, names with other bytes than ASCII."""
    upstream = make_upstream("upstream")
    upstream.history(2)
    tip = upstream.git("rev-parse", "HEAD")
    upstream.git("tag", "--annotate", "-m", "one", "v1")
    for name in ("a/b/c", "packed", "grün", b"\xff\xfe"):
        upstream.git("branch", name, "HEAD~1")
    path = tmp_path / "bare"
    git(tmp_path, "clone", "--quiet", "--mirror", str(upstream.path), str(path))
    git(path, "pack-refs", "--all")
    git(path, "update-ref", "refs/heads/packed", tip)
    git(path, "update-ref", "refs/mirrord/kept/" + tip, tip)
    return path


def test_the_files_say_what_git_says(bare: Path) -> None:
    """In the same order."""
    listed = git(bare, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    refs = read_refs(bare)
    assert refs is not None
    assert [f"{ref} {oid}" for ref, oid in refs.items()] == listed
    assert read_head(bare) == git(bare, "symbolic-ref", "HEAD")
    (bare / "packed-refs").unlink()
    left = git(bare, "for-each-ref", "--format=%(refname)").splitlines()
    assert list(read_refs(bare) or {}) == left


def _append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


OID = b"1" * 40


@pytest.mark.parametrize(
    "harm",
    [
        lambda bare: (bare / "refs/heads/packed").write_bytes(b""),
        lambda bare: (bare / "refs/heads/packed").write_bytes(b"0" * 40 + b"\n"),
        lambda bare: (bare / "refs/heads/packed").write_bytes(b"ref: refs/heads/main\n"),
        lambda bare: (bare / "refs/heads/link").symlink_to("packed"),
        lambda bare: (bare / "refs/heads/away").symlink_to(bare / "refs/tags"),
        lambda bare: os.mkfifo(bare / "refs/heads/pipe"),
        lambda bare: (bare / "refs/heads/a..b").write_bytes(OID + b"\n"),
        lambda bare: _append(bare / "packed-refs", OID + b" refs/heads/a..b\n"),
        lambda bare: _append(bare / "packed-refs", OID + b" refs/heads/a:b\n"),
        lambda bare: _append(bare / "packed-refs", OID + b" refs/heads/cut"),
        lambda bare: _append(bare / "packed-refs", b"what is this\n"),
        lambda bare: _append(bare / "packed-refs", OID + b" refs/heads/packed\n"),
        lambda bare: (bare / "refs").rename(bare / "gone"),
    ],
)
def test_what_is_not_plain_is_left_to_git(bare: Path, harm: Callable[[Path], object]) -> None:
    """Half a file, a link, a pipe, a name that git forbids, a ref twice."""
    harm(bare)
    assert read_refs(bare) is None


@pytest.mark.parametrize("content", [b"", OID + b"\n", b"ref: refs/heads/a..b\0\n", None])
def test_a_head_that_names_no_ref_is_left_to_git(bare: Path, content: bytes | None) -> None:
    """Empty, detached, damaged, gone."""
    (bare / "HEAD").unlink()
    if content is not None:
        (bare / "HEAD").write_bytes(content)
    assert read_head(bare) is None


def test_locks_and_hidden_files_are_no_refs(bare: Path) -> None:
    """As for git, which leaves them where a process was killed."""
    before = read_refs(bare)
    for name in ("packed.lock", ".hidden"):
        (bare / "refs/heads" / name).write_bytes(b"")
    assert before is not None
    assert read_refs(bare) == before
