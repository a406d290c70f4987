"""Packs written without git: git reads them, and their content is right."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from gitrepos import git

from mirrord.errors import CorruptObjectError
from mirrord.git.objects.increments import check_packs
from mirrord.git.packs import PackIndex, merged_ids
from mirrord.git.packwriter import write_pack

_BLOB = 3
Objects = dict[bytes, tuple[int, bytes]]


def blobs(*contents: bytes) -> Objects:
    return {oid_of(each): (_BLOB, each) for each in contents}


def oid_of(data: bytes) -> bytes:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).digest()


def test_git_reads_back_what_was_written(tmp_path: Path) -> None:
    """Sizes around each further byte of an object's header."""
    sizes = (0, 1, 15, 16, 2047, 2048, (1 << 18) - 1, 1 << 18, 700_000)
    objects = blobs(*(bytes(range(256)) * (size // 256) + bytes(size % 256) for size in sizes))
    git(tmp_path, "init", "-q", "--bare", "repo")
    repository = tmp_path / "repo"
    packed = write_pack(objects, repository / "objects/pack")
    index = (repository / "objects/pack" / packed.name).with_suffix(".idx")
    assert packed.object_count == len(objects) == PackIndex(index).count
    for oid, (_, data) in objects.items():
        assert git(repository, "cat-file", "-s", oid.hex()) == str(len(data))
    git(repository, "fsck", "--full", "--strict")


def test_git_makes_the_same_index(tmp_path: Path) -> None:
    packed = write_pack(blobs(b"", b"one", b"two"), tmp_path)
    git(tmp_path, "index-pack", "--index-version=2", "-o", "by-git.idx", packed.name)
    ours = (tmp_path / packed.name).with_suffix(".idx")
    assert (tmp_path / "by-git.idx").read_bytes() == ours.read_bytes()


def test_an_object_that_does_not_match_its_id_is_found(tmp_path: Path) -> None:
    wrong = oid_of(b"one thing")
    write_pack({**blobs(b"x"), wrong: (_BLOB, b"another")}, tmp_path)
    check_packs(tmp_path, [oid_of(b"x")])
    for oid in (wrong, oid_of(b"absent")):
        with pytest.raises(CorruptObjectError):
            check_packs(tmp_path, [oid])


def test_the_ids_of_several_packs_are_merged(tmp_path: Path) -> None:
    """Each once, whichever pack has it; before, between and behind those of the largest pack."""
    contents = [b"%d" % number for number in range(300)]
    for some in (contents[:200], contents[150:260], contents[255:], contents[:1]):
        write_pack(blobs(*some), tmp_path)
    indexes = [PackIndex(path) for path in tmp_path.glob("*.idx")]
    assert merged_ids(indexes) == b"".join(sorted(map(oid_of, contents)))
    assert len(indexes) == 4
