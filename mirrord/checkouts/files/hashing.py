"""Proof by content: what is on disk, hashed as git hashes it.

Owns the reading back of a tree that was written, or is to be trusted again. Never believes a stat, an index or a manifest's own
hash alone: the tree's id is computed from the bytes on disk.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ...errors import ProofFailedError
from ...host.credentials import ActingAs
from ...host.files import open_child, opened, shown_path
from .manifest import DIRECTORY, Entry, Manifest
from .reader import Descent, content_id, open_top

_HINT = "another try makes it anew; if it happens again, the disk is failing"


def hash_tree(dest: Path, manifest: Manifest) -> str:
    """Read every file back and answer git's id of the tree that they make; raises ProofFailedError with the path that is wrong.

    A converted file is compared with the bytes that its conversion gave, and stands for its blob.
    """
    files = manifest.files.decoded()
    prove_files(dest, manifest.owner, files, files)
    return tree_id(manifest)


def prove_files(
    dest: Path, owner: tuple[int, int], files: Mapping[bytes, Entry], paths: Iterable[bytes]
) -> None:
    """Compare files on disk with their entries: kind, mode, bytes."""
    with opened(open_top(dest)) as root, ActingAs(owner) as acting, Descent(root, acting) as reader:
        for path in paths:
            if not _is_proven(reader, path, files[path]):
                raise ProofFailedError(
                    f"cannot prove {shown_path(path)}: what is on disk is not what git has",
                    hint=_HINT,
                )


def _is_proven(reader: Descent, path: bytes, entry: Entry) -> bool:
    try:
        found = reader.find_stat(path)
        return found is not None and _is_as_recorded(reader, path, entry, found)
    except OSError:
        return False


def _is_as_recorded(reader: Descent, path: bytes, entry: Entry, found: os.stat_result) -> bool:
    if stat.S_IMODE(found.st_mode) != entry.permissions:
        return False
    if entry.is_directory:
        return stat.S_ISDIR(found.st_mode) and (entry.mode == DIRECTORY or _is_empty(reader, path))
    if stat.S_ISLNK(found.st_mode) != entry.is_symlink:
        return False
    return content_id(*reader.locate(path), found) == entry.content


def _is_empty(reader: Descent, path: bytes) -> bool:
    with opened(open_child(*reader.locate(path))) as fd:
        return not os.listdir(fd)


def tree_id(manifest: Manifest) -> str:
    """git's id of the tree that the entries make, computed from the leaves up."""
    files = manifest.files.decoded()
    below: dict[bytes, list[tuple[bytes, bytes]]] = {
        path: [] for path, entry in files.items() if entry.mode == DIRECTORY
    }
    for path in sorted(filter(None, files), key=lambda path: path.count(b"/"), reverse=True):
        entry = files[path]
        above, _, name = path.rpartition(b"/")
        oid = _hash(below[path]) if entry.mode == DIRECTORY else entry.oid
        below[above].append((_order(name, entry.mode), b"%o %s\0%s" % (entry.mode, name, oid)))
    return _hash(below[b""]).hex()


def prove_directories(manifest: Manifest, changed: Collection[bytes]) -> None:
    """Hash the trees of the directories `changed` from the entries in them; raises ProofFailedError where git has another."""
    files = manifest.files
    for directory, paths in files.children(changed).items():
        entries = [(path.rpartition(b"/")[2], files[path]) for path in paths]
        lines = [
            (_order(name, entry.mode), b"%o %s\0%s" % (entry.mode, name, entry.oid))
            for name, entry in entries
        ]
        if _hash(lines) != files[directory].oid:
            raise ProofFailedError(
                f"cannot prove {shown_path(directory)}: its entries are not what git has",
                hint=_HINT,
            )


def _order(name: bytes, mode: int) -> bytes:
    """git sorts a directory as if its name ended in a slash."""
    return name + b"/" if mode == DIRECTORY else name


def _hash(lines: list[tuple[bytes, bytes]]) -> bytes:
    """The id of one tree object."""
    data = b"".join(line for _, line in sorted(lines))
    return hashlib.sha1(b"tree %d\0" % len(data) + data).digest()
