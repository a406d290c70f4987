"""Proof by content: what is on disk, hashed as git hashes it.

Never believes a stat, an index or a manifest's own hash alone: the tree's id is computed from the
bytes on disk.
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
from .reader import TreeReader, content_id, open_top

_HINT = "another try makes it again; if this repeats, the disk is failing"


def hash_tree(dest: Path, manifest: Manifest) -> str:
    """Read every file back and answer git's id of the tree that they make.

    Raises ProofFailedError with the path that differs. A converted file is compared with the bytes
    that its conversion gave, and stands for its blob.
    """
    files = manifest.files.decoded()
    prove_files(dest, manifest.owner, files, files)
    return tree_id(manifest)


def prove_files(
    dest: Path, owner: tuple[int, int], files: Mapping[bytes, Entry], paths: Iterable[bytes]
) -> None:
    """Compare files on disk with their entries: kind, mode, bytes."""
    with (
        opened(open_top(dest)) as root,
        ActingAs(owner) as acting,
        TreeReader(root, acting) as reader,
    ):
        for path in paths:
            try:
                if _is_as_recorded(reader, path, files[path]):
                    continue
            except OSError:
                pass
            raise ProofFailedError(
                f"cannot prove {shown_path(path)}: what is on disk is not what git has", hint=_HINT
            )


def _is_as_recorded(reader: TreeReader, path: bytes, entry: Entry) -> bool:
    found = reader.find_stat(path)
    if found is None or stat.S_IMODE(found.st_mode) != entry.permissions:
        return False
    if entry.is_directory:
        if entry.mode == DIRECTORY or not stat.S_ISDIR(found.st_mode):
            return stat.S_ISDIR(found.st_mode)
        with opened(open_child(*reader.locate(path))) as fd:
            return not os.listdir(fd)  # a submodule
    is_link = stat.S_ISLNK(found.st_mode)
    return is_link == entry.is_symlink and content_id(*reader.locate(path), found) == entry.content


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
        below[above].append(_line(name, entry.mode, oid))
    return _hash(below[b""]).hex()


def prove_directories(manifest: Manifest, changed: Collection[bytes]) -> None:
    """Hash the trees of directories from their entries; ProofFailedError where git has another."""
    files = manifest.files
    for directory, paths in files.children(changed).items():
        entries = ((path.rpartition(b"/")[2], files[path]) for path in paths)
        lines = [_line(name, entry.mode, entry.oid) for name, entry in entries]
        if _hash(lines) != files[directory].oid:
            raise ProofFailedError(
                f"cannot prove {shown_path(directory)}: its entries are not what git has",
                hint=_HINT,
            )


def _line(name: bytes, mode: int, oid: bytes) -> tuple[bytes, bytes]:
    """An entry of a tree, and what git sorts it by: a directory as if its name ended in a slash."""
    return name + b"/" if mode == DIRECTORY else name, b"%o %s\0%s" % (mode, name, oid)


def _hash(lines: list[tuple[bytes, bytes]]) -> bytes:
    """The id of one tree object."""
    data = b"".join(line for _, line in sorted(lines))
    return hashlib.sha1(b"tree %d\0" % len(data) + data).digest()
