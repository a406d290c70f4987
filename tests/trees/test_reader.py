"""Disk space of trees: hard links count once, unreadable parts are reported."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mirrord.trees.reader import weigh


def disk(*paths: Path) -> int:
    out = subprocess.run(
        ["du", "--summarize", "--total", "--block-size=1", *paths], capture_output=True, check=True
    )
    return int(out.stdout.split()[-2])


def test_a_file_of_two_things_counts_once_and_is_shared_by_both(tmp_path: Path) -> None:
    """Two names in one thing are not shared; of all it is what `du` counts."""
    a, b, other = (tmp_path / name for name in ("a", "b", "other"))
    for tree in (a, b, other):
        (tree / "deep").mkdir(parents=True)
        (tree / "deep/own").write_bytes(bytes(9000))
    (a / "big").write_bytes(os.urandom(100_000))
    os.link(a / "big", a / "again")
    os.link(a / "big", b / "deep/same")
    (other / "twice").write_bytes(bytes(5000))
    os.link(other / "twice", other / "deep/twice")
    (b / "link").symlink_to("/")
    (found,) = weigh({"kind": [[a], [b], [other]]}, 60).values()
    assert [each.size_bytes for each in found.each] == [disk(a), disk(b), disk(other)]
    assert [each.shared_bytes for each in found.each] == [disk(a / "big"), disk(a / "big"), 0]
    assert found.total_bytes == disk(a, b, other)


def test_a_thing_of_several_places_is_one_and_a_missing_one_weighs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    (tmp_path / "tree").mkdir()
    gone = tmp_path / "gone"
    found = weigh({"x": [[tmp_path / "file", tmp_path / "tree"], [gone]], "y": []}, 60)
    assert [each.size_bytes for each in found["x"].each] == [
        disk(tmp_path / "file") + disk(tmp_path / "tree"),
        0,
    ]
    assert all(each.is_whole for each in found["x"].each)
    assert found["y"].total_bytes == 0


def test_parts_too_deep_or_too_late_are_reported(tmp_path: Path) -> None:
    """A client can make directories without end; a walk ends all the same."""
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    (deep,) = weigh({"kind": [[tmp_path / "d"]]}, 60)["kind"].each
    assert deep.size_bytes > 0
    assert not deep.is_whole
    (late,) = weigh({"kind": [[tmp_path / "d"]]}, -1)["kind"].each
    assert not late.is_whole
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


@pytest.mark.root
def test_a_mount_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "tree/mounted").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "tree/mounted"], check=True)
    try:
        (tmp_path / "tree/mounted/huge").write_bytes(bytes(10**6))
        (found,) = weigh({"kind": [[tmp_path / "tree"]]}, 60)["kind"].each
    finally:
        subprocess.run(["umount", tmp_path / "tree/mounted"], check=True)
    assert not found.is_whole
    assert found.size_bytes < 10**5
