"""What a closure pack must hold, and whether the store it is copied from can be believed.

git copies packed objects after checking their CRC but reads others without hashing them, loose ones above all. A small pack is
hashed after it was written; for a large one that takes longer than all else, so the packs it comes from are: their checksums are
of bytes that were hashed object by object when they arrived. Runs beside pack-objects, in a worker where the list is long.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptObjectError
from ..git.packs import pack_is_whole

VERIFIED_WHOLE = 20_000
HINT = "audit the mirror with --level content and heal it"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Survey:
    """`digest` is the SHA-1 of all ids, sorted and joined."""

    object_count: int
    digest: bytes


def survey(listing: Path, stores: tuple[Path, ...]) -> Survey:
    """Read the ids that the lines of `listing` begin with; raises CorruptObjectError for damage in `stores`."""
    with listing.open("rb") as file:
        wanted = {bytes.fromhex(line[:40].decode()) for line in file}
    for store in stores:
        _check_loose(store, wanted)
        if len(wanted) > VERIFIED_WHOLE:
            _check_packs(store)
    return Survey(len(wanted), digest_of(b"".join(sorted(wanted))))


def digest_of(ids: bytes) -> bytes:
    return hashlib.sha1(ids, usedforsecurity=False).digest()


def _check_packs(store: Path) -> None:
    for pack in (store / "pack").glob("pack-*.pack"):
        try:
            whole = pack_is_whole(pack)
        except FileNotFoundError:  # repacked meanwhile
            continue
        if not whole:
            raise CorruptObjectError(f"cannot pack out of {pack.name}: its bytes are not what they were", hint=HINT)


def _check_loose(store: Path, wanted: set[bytes]) -> None:
    for directory in store.iterdir():
        if len(directory.name) != 2 or not directory.is_dir():
            continue
        for file in directory.iterdir():
            oid = directory.name + file.name
            if len(oid) == 40 and bytes.fromhex(oid) in wanted and loose_digest(file) != oid:
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
