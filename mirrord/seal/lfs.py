"""The LFS objects of a repository, judged by the pointers in HEAD's tree."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from ..git.batch import read_objects_sync
from ..git.command import run_git_sync
from ..git.lfs import OBJECTS, POINTER_BYTES, parse_pointer
from ..host.files import open_plain
from ..model import shown
from ..presence import is_dir, is_symlink
from ..protocol import SealLeak
from ..quoting import decode_name
from .repository import walk

_NAME = re.compile(r"([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{60})")
_SMALL_BLOB = re.compile(r"100\d{3} blob ([0-9a-f]{40}) +(\d+)\t")


def lfs_leaks(git_dir: Path, private: Path, head: str | None) -> Iterator[SealLeak]:
    """Find LFS objects that no pointer of HEAD means, and files that are none."""
    if not is_dir(git_dir / OBJECTS) or is_symlink(git_dir / "lfs"):
        return
    named = _pointers_of(private, head) if head else set[str]()
    for file in walk(git_dir / OBJECTS):
        where = f"{OBJECTS}/{shown(file.where)}"
        match = _NAME.fullmatch(file.where) if file.kind == "file" else None
        if match is None:
            yield SealLeak(kind="stray-file", detail=f"{where} is not an LFS object")
        elif match[3] not in named:
            yield SealLeak(kind="object", detail=f"LFS object {match[3]} is of no pointer of HEAD")
        elif _digest(file.path) != match[3]:
            yield SealLeak(kind="damaged", detail=f"LFS object {match[3]} does not match its id")


def _pointers_of(private: Path, head: str) -> set[str]:
    listed = run_git_sync(
        "ls-tree", "-r", "-z", "-l", head, git_dir=private, ok=range(256), doing=f"list {head}"
    )
    rows = (_SMALL_BLOB.match(row) for row in decode_name(listed.stdout).split("\0"))
    small = {row[1] for row in rows if row and int(row[2]) < POINTER_BYTES}
    blobs = read_objects_sync(private, sorted(small), doing=f"read pointers of {head}")
    return {pointer.oid for blob in blobs if (pointer := parse_pointer(blob.data))}


def _digest(path: Path) -> str | None:
    try:
        with open_plain(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
