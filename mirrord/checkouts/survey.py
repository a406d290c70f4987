"""Whether what a closure pack is copied from can be believed, and what the pack must hold.

git copies packed objects after checking their CRC but reads others without hashing them, loose ones above all. A small pack is
hashed after it was written; for a large one that takes longer than all else, so the packs it comes from are: their checksums are
of bytes that were hashed object by object when they arrived. A pack found whole is not read again until its file changes.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptObjectError
from ..git.packs import PackIndex, pack_is_whole

VERIFIED_WHOLE = 20_000
HINT = "audit the mirror with --level content and heal it"
_BLOCK = 1 << 20
_KEPT_MAX = 10_000


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
    """The packs that were read whole, by what would change with them. Methods are for threads."""

    def __init__(self) -> None:
        self._whole: dict[tuple[str | int, ...], None] = {}

    def check_packs(self, store: Path) -> None:
        """Raises CorruptObjectError for a pack in `store` whose bytes do not have its checksum."""
        for pack in (store / "pack").glob("pack-*.pack"):
            try:
                self._check_pack(pack)
            except FileNotFoundError:  # repacked meanwhile
                continue

    def _check_pack(self, pack: Path) -> None:
        found = pack.stat()
        key = (str(pack), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        if key in self._whole:
            return
        if not pack_is_whole(pack):
            raise CorruptObjectError(f"cannot pack out of {pack.name}: its bytes are not what they were", hint=HINT)
        while len(self._whole) >= _KEPT_MAX:
            self._whole.pop(next(iter(self._whole)), None)
        self._whole[key] = None


def check_loose(store: Path, packed: PackIndex) -> None:
    """Raises CorruptObjectError when one of the packed objects has a damaged loose file in `store`."""
    for directory in store.iterdir():
        if len(directory.name) != 2 or not directory.is_dir():
            continue
        for file in directory.iterdir():
            oid = directory.name + file.name
            if len(oid) == 40 and bytes.fromhex(oid) in packed and loose_digest(file) != oid:
                raise CorruptObjectError(f"cannot pack object {oid}: its loose file is damaged", hint=HINT, objects=[oid])


def loose_digest(file: Path) -> str | None:
    """The id that the bytes of a loose object hash to; None when they do not inflate. In bounded memory."""
    digest, inflate = hashlib.sha1(usedforsecurity=False), zlib.decompressobj()
    try:
        with file.open("rb") as stream:
            while block := inflate.unconsumed_tail or stream.read(_BLOCK):
                digest.update(inflate.decompress(block, _BLOCK))
    except zlib.error:
        return None
    return digest.hexdigest() if inflate.eof else None
