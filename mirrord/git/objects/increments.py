"""What a commit adds to existing packs, walked and packed in a worker, without a process of git."""

import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import pygit2
from pygit2.enums import ObjectType

from ..packs import PackIndex
from ..packwriter import Packed, write_pack
from .repository import as_oid, corrupt_object, links_of, open_objects, tree_entries

# an increment larger than these is left to git, which writes it to disk, not to memory
_OBJECTS_MAX = 2000
_BYTES_MAX = 16 * 1024**2


def pack_increment(git_dir: Path, tip: str, below: Sequence[Path], into: Path) -> Packed | None:
    """Pack what the closure of `tip` adds to the packs with indexes `below`; None if too much.

    The walk follows every link from the commit except those into the packs below. Those packs are
    closed, so the result with them is exactly the closure. Commits are read from their own bytes:
    no commit-graph, bitmap, graft or replacement changes the walk. Raises CorruptObjectError when
    an object is missing or damaged.
    """
    added: dict[bytes, tuple[int, bytes]] = {}
    visited: set[bytes] = set()  # added, or in a pack below
    indexes = [_open_index(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in below]
    size_bytes = 0

    def is_new(oid: bytes) -> bool:
        if oid in visited:
            return False
        visited.add(oid)
        return not any(oid in index for index in indexes)

    def add(oid: bytes, kind: ObjectType) -> bytes:
        nonlocal size_bytes
        data = objects.read(oid, kind)
        added[oid] = int(kind), data
        size_bytes += len(data)
        return data

    with open_objects(git_dir) as objects:
        commits = [bytes.fromhex(tip)]
        while commits:
            if not is_new(commit := commits.pop()):
                continue
            root, parents = links_of(add(commit, ObjectType.COMMIT))
            commits += reversed(parents)
            trees = [root]
            while trees:
                if not is_new(tree := trees.pop()):
                    continue
                entries = tree_entries(add(tree, ObjectType.TREE))
                if entries is None:
                    raise corrupt_object(tree, "it is malformed")
                for mode, _, oid in entries:
                    # old histories have modes such as 040000 (fsck's zeroPaddedFilemode)
                    mode = mode.lstrip(b"0")
                    if oid in visited or mode == b"160000":  # a submodule
                        continue
                    if mode == b"40000":
                        trees.append(oid)
                    elif is_new(oid):
                        add(oid, ObjectType.BLOB)
                if len(added) > _OBJECTS_MAX or size_bytes > _BYTES_MAX:
                    return None
        packed = write_pack(added, into)
    check_packs(into, added)
    return packed


def check_packs(directory: Path, oids: Iterable[bytes]) -> None:
    """Raise CorruptObjectError unless the packs in `directory` have all of `oids`, undamaged."""
    with tempfile.TemporaryDirectory(dir=directory) as objects:  # libgit2 opens only whole stores
        Path(objects, "pack").symlink_to(directory.absolute())
        packs = pygit2.Odb(objects)
        for oid in oids:
            try:
                packs.read(as_oid(oid))  # libgit2 hashes what it has inflated
            except (pygit2.GitError, KeyError) as error:
                raise corrupt_object(oid, error) from error


# of chains of layers, which share all but their last packs; a mapping holds no descriptor
@lru_cache(maxsize=128)
def _open_index(path: Path, inode: int, mtime_ns: int) -> PackIndex:
    """Map an index once. One that was damaged and built again has the same name."""
    return PackIndex(path, mapped=True)
