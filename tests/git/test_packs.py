"""Packs written without git: git takes them, and they hold what was put in."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
from gitrepos import git
from hypothesis import example, given
from hypothesis import strategies as st

from mirrord.errors import CorruptObjectError
from mirrord.git.objects.repository import check_packs
from mirrord.git.packs import Packed, PackIndex, PackObject, delta, write_pack

_BLOB = 3


def blob(data: bytes, near: bytes | None = None) -> PackObject:
    return PackObject(hashlib.sha1(b"blob %d\0" % len(data) + data).digest(), _BLOB, data, near)


def versions(count: int, size: int = 5000) -> list[PackObject]:
    """One text in many versions, each a small change of the one before."""
    found: list[PackObject] = []
    for number in range(count):
        lines = [b"line %d\n" % (at if at != number * 7 else -number) for at in range(size)]
        found.append(blob(b"".join(lines), found[-1].oid if found else None))
    return found


def written(objects: list[PackObject], into: Path) -> Packed:
    return write_pack({each.oid: each for each in objects}, into)


def test_git_reads_back_what_was_written(tmp_path: Path) -> None:
    """Empty ones, large ones, and chains of deltas longer than git follows by default."""
    objects = [*versions(120), blob(b""), blob(b"x"), blob(bytes(range(256)) * 3000)]
    git(tmp_path, "init", "-q", "--bare", "repo")
    repository = tmp_path / "repo"
    packed = written(objects, repository / "objects/pack")
    pack = repository / "objects/pack" / packed.name
    assert packed.object_count == len(objects) == PackIndex(pack.with_suffix(".idx")).count
    listed = git(repository, "verify-pack", "-v", str(pack.with_suffix(".idx")))
    depths = [int(line.split()[5]) for line in listed.splitlines() if len(line.split()) == 7]
    assert max(depths) == 50
    for each in objects[:: len(objects) // 10]:
        assert git(repository, "cat-file", "-s", each.oid.hex()) == str(len(each.data))
    git(repository, "fsck", "--full", "--strict")
    assert pack.stat().st_size < 3 * len(objects[0].data)


def test_git_makes_the_same_index(tmp_path: Path) -> None:
    packed = written(versions(5), tmp_path)
    git(tmp_path, "index-pack", "--index-version=2", "-o", "theirs.idx", packed.name)
    assert (tmp_path / "theirs.idx").read_bytes() == (tmp_path / packed.name).with_suffix(
        ".idx"
    ).read_bytes()


@given(
    base=st.binary(max_size=400),
    start=st.integers(0, 400),
    end=st.integers(0, 400),
    new=st.binary(max_size=300),
)
@example(base=bytes(200_000), start=100_000, end=70_000, new=b"in the middle")
@example(base=b"a" * 0x10000, start=0x10000, end=0, new=b"after a copy of the largest size")
def test_a_delta_makes_what_it_was_made_of(base: bytes, start: int, end: int, new: bytes) -> None:
    data = base[:start] + new + base[len(base) - end :]
    change = delta(base, data)
    assert change is None or len(change) < len(data)
    old = blob(base)
    objects = {each.oid: each for each in (old, blob(data, old.oid))}
    with tempfile.TemporaryDirectory() as into:
        write_pack(objects, Path(into))
        check_packs(Path(into), objects)


def test_an_object_that_is_not_what_it_names_is_found(tmp_path: Path) -> None:
    lie = PackObject(blob(b"one thing").oid, _BLOB, b"another", None)
    written([blob(b"x"), lie], tmp_path)
    check_packs(tmp_path, [blob(b"x").oid])
    for oid in (lie.oid, blob(b"not there").oid):
        with pytest.raises(CorruptObjectError):
            check_packs(tmp_path, [oid])
