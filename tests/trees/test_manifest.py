"""The private record survives its file, and a torn file is noticed."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gitrepos import Upstream, git
from hypothesis import given
from hypothesis import strategies as st
from trees import awkward, record_control

from mirrord.errors import ProofFailedError
from mirrord.git.modes import DIRECTORY
from mirrord.trees.manifest import Entries, Entry, Manifest
from mirrord.trees.tree import materialise

WORD, LONG, OID = (
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=20, max_size=20),
)
ENTRIES = st.dictionaries(
    st.binary(max_size=40).filter(lambda path: b"\0" not in path),
    st.builds(Entry, WORD, OID, OID, WORD, LONG, LONG, LONG, LONG, WORD, WORD),
)


@given(ENTRIES, ENTRIES)
def test_a_saved_manifest_is_read_back(
    files: dict[bytes, Entry], control: dict[bytes, Entry]
) -> None:
    """Any names and numbers, in the order of their names."""
    manifest = Manifest("1" * 40, "2" * 40, 3, Entries(files), control)
    read = Manifest.from_bytes(b"".join(manifest.pieces()))
    assert read == manifest
    assert list(read.files) == sorted(files)


PATHS = st.lists(
    st.sampled_from([b"a", b"b", b"a.b", b"a-", b"ab", b"0"]), min_size=1, max_size=4
).map(b"/".join)


@given(st.sets(PATHS), st.dictionaries(PATHS, st.booleans()))
def test_children_of_a_directory_are_found(read: set[bytes], later: dict[bytes, bool]) -> None:
    """As looking at every path finds it, whatever was recorded or removed since; and again when that was written."""
    entry = Entry(0, bytes(20), bytes(20))
    records = Entries.from_bytes(b"".join(Entries(dict.fromkeys({b"", *read}, entry)).pieces()))
    for path, is_there in later.items():
        if is_there:
            records[path] = entry
        elif path in records:
            del records[path]
    paths = {b"", *read} | {path for path, is_there in later.items() if is_there}
    paths -= {path for path, is_there in later.items() if not is_there}
    above_all = Entry(DIRECTORY, bytes(20), bytes(20))
    directories = {path.rpartition(b"/")[0] for path in paths}
    expected = {
        above: sorted(path for path in paths if path and path.rpartition(b"/")[0] == above)
        for above in directories
    }
    for each in (records, Entries.from_bytes(b"".join(records.pieces()))):
        assert set(each) == paths
        assert len(each) == len(paths)
        assert {
            above: sorted(found)
            for above, found in each.children(dict.fromkeys(directories, above_all)).items()
        } == expected


def test_a_real_tree_survives_its_file(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """With control files; private to the daemon; replaced as a whole."""
    upstream = make_upstream("up")
    manifest = materialise(upstream.path / ".git", awkward(upstream)[0], tmp_path / "tree")
    git(tmp_path / "tree", "init", "-q")
    manifest = record_control(tmp_path / "tree", manifest)
    for record in (replace(manifest, index="longer"), manifest, manifest):
        record.save(tmp_path / "manifest")
        assert Manifest.load(tmp_path / "manifest") == record
    assert stat.S_IMODE((tmp_path / "manifest").stat().st_mode) == 0o600
    assert b".git/HEAD" in manifest.control
    assert sorted(path.name for path in tmp_path.glob("manifest*")) == [
        "manifest",
        "manifest.spare",
    ]


@pytest.mark.parametrize("damage", [b"", b"mirrord manifest 1\n", b"garbage", None])
def test_a_torn_manifest_is_refused(tmp_path: Path, damage: bytes | None) -> None:
    """Cut short, empty or altered: an error, never half a record."""
    path = tmp_path / "manifest"
    entry = Entry(0, bytes(20), bytes(20))
    whole = b"".join(Manifest("1" * 40, "2" * 40, 3, Entries({b"a": entry})).pieces())
    path.write_bytes(whole[:-30] + b"x" * 30 if damage is None else damage)
    with pytest.raises(ProofFailedError):
        Manifest.load(path)
