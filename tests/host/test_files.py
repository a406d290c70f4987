"""What cannot be read is not taken for what is not there."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mirrord.host import files
from mirrord.host.files import opened, read_flags
from mirrord.trees.pooled import has_top


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Inside, every open(2) of this process fails with EMFILE."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_top_directory_that_cannot_be_opened_was_not_replaced(tmp_path: Path) -> None:
    """Or a diff would say that every file was removed."""
    me = os.geteuid(), os.getegid()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    seen = {name: has_top(tmp_path / name, me) for name in (".", "file", "link", "gone")}
    assert seen == {".": True, "file": False, "link": False, "gone": False}
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        has_top(tmp_path, me)


def test_flags_that_cannot_be_read_are_not_clear(tmp_path: Path) -> None:
    """The kernel tells nothing of a file that is open as a path only."""
    with opened(os.open(tmp_path, os.O_PATH)) as place, pytest.raises(OSError, match="Bad file"):
        read_flags(place)
    with opened(os.open(tmp_path, os.O_RDONLY)) as directory:
        assert isinstance(read_flags(directory), int)


@pytest.mark.root
def test_a_file_system_without_extended_attributes_has_none(tmp_path: Path) -> None:
    """Most of FUSE, and NFS of version 3, answer EOPNOTSUPP; a tree there is written and read all the same."""
    if not shutil.which("bindfs"):
        pytest.skip("this machine has no bindfs")
    below, place = tmp_path / "below", tmp_path / "place"
    below.mkdir()
    place.mkdir()
    os.setxattr(below, "user.there", b"1")
    assert files.list_attributes(str(below)) == ["user.there"]
    subprocess.run(["bindfs", "--xattr-none", below, place], check=True)
    try:
        with pytest.raises(OSError, match="not supported"):
            os.listxattr(place)
        assert files.list_attributes(str(place)) == []
    finally:
        subprocess.run(["umount", place], check=True)
