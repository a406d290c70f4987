"""Whether what a closure pack is copied from can be believed, and what the pack must hold.

git copies packed objects after checking their CRC but reads others without hashing them, loose ones above all. So the packs that
a closure pack comes from are read whole, with their indexes, which say where each object is: their checksums are of bytes that
were hashed object by object when they arrived, and git asks no other file (`packing.UNTRUSTING`). One that was found whole is not
read again until it changes. Where they were not read yet, and a pack is small, its own objects are hashed after it was written
instead, which takes less; where they were, a small pack is read back, so that the disk has what git wrote.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import CorruptObjectError
from ...git.packfile import PackIndex, pack_is_whole, pack_trailer

VERIFIED_WHOLE = 20_000
HINT = "audit the mirror with --level content and heal it"
_BLOCK = 1 << 20
_KEPT_MAX = 10_000

_Seen = tuple[str, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Survey:
    """`digest` is the SHA-1 of all ids, sorted and joined."""

    object_count: int
    digest: bytes


def survey(listing: Path) -> Survey:
    """What the ids that are the lines of `listing` make."""
    ids = listing.read_text("ascii").split()
    return Survey(len(ids), digest_of(bytes.fromhex("".join(sorted(ids)))))


def digest_of(ids: bytes) -> bytes:
    return hashlib.sha1(ids, usedforsecurity=False).digest()


class Sources:
    """The packs and indexes that were read whole, by what would change with them. Methods are for threads."""

    def __init__(self) -> None:
        self._whole: dict[_Seen, None] = {}
        self._lock = threading.Lock()

    def check_packs(self, store: Path) -> None:
        """Raises CorruptObjectError for a pack in `store`, or an index, whose bytes do not have its checksum."""
        with self._lock:
            for file in _files(store):
                with suppress(FileNotFoundError):  # repacked meanwhile
                    self._check(file)

    def are_whole(self, stores: Iterable[Path]) -> bool:
        """Whether all packs in `stores` were read and found whole, as they are now; waits for a check that goes on."""
        with self._lock:
            try:
                return all(_seen(file) in self._whole for store in stores for file in _files(store))
            except FileNotFoundError:
                return False

    def _check(self, file: Path) -> None:
        key = _seen(file)
        if key in self._whole:
            return
        if not pack_is_whole(file):
            raise CorruptObjectError(
                f"cannot pack out of {file.name}: its bytes are not what they were", hint=HINT
            )
        while len(self._whole) >= _KEPT_MAX:
            self._whole.pop(next(iter(self._whole)), None)
        self._whole[key] = None


def _files(store: Path) -> Iterator[Path]:
    for kind in ("pack", "idx"):
        yield from (store / "pack").glob(f"pack-*.{kind}")


def _seen(file: Path) -> _Seen:
    found = file.stat()
    return str(file), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def check_written(index: PackIndex) -> None:
    """Raises CorruptObjectError unless a pack and its index have on disk what git wrote."""
    pack = index.path.with_suffix(".pack")
    if not (
        pack_is_whole(index.path)
        and pack_is_whole(pack)
        and pack_trailer(pack) == index.pack_checksum
    ):
        raise CorruptObjectError(
            f"cannot use {pack.name}: its bytes are not what was written", hint="check the disk"
        )


def check_loose(store: Path, packed: PackIndex) -> None:
    """Raises CorruptObjectError when one of the packed objects has a damaged loose file in `store`."""
    for directory in store.iterdir():
        if len(directory.name) != 2 or not directory.is_dir():
            continue
        for file in directory.iterdir():
            oid = directory.name + file.name
            if len(oid) == 40 and bytes.fromhex(oid) in packed and loose_digest(file) != oid:
                raise CorruptObjectError(
                    f"cannot pack object {oid}: its loose file is damaged", hint=HINT, objects=[oid]
                )


def loose_digest(file: Path) -> str | None:
    """The id that a loose object's bytes hash to; None when they do not inflate, or more follows. In bounded memory."""
    digest, inflate = hashlib.sha1(usedforsecurity=False), zlib.decompressobj()
    try:
        with file.open("rb") as stream:
            while block := inflate.unconsumed_tail or stream.read(_BLOCK):
                if inflate.eof:
                    return None
                digest.update(inflate.decompress(block, _BLOCK))
    except zlib.error:
        return None
    return digest.hexdigest() if inflate.eof and not inflate.unused_data else None
