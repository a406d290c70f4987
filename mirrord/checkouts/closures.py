"""The objects of a sealed store, counted and hashed for receipts.

Runs in workers, so it imports neither the catalog nor pydantic: in `receipts.py` it cost each new
worker 0.8 s of processor time, and the first receipts beside other load 12 to 18 s.
"""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ..git.packs import ID_BYTES, PackIndex, merged_ids
from ..model import CommitId
from ..protocol import Closure
from ..templates.packer import listed_ids
from ..templates.store import SealedStore

# of ids at a time: a history has millions
_HASHED_BYTES = 50_000 * ID_BYTES


class StoreFacts(NamedTuple):
    """A store's objects, and when it was built."""

    closure: Closure
    built_at: datetime


def read_store(store: SealedStore) -> StoreFacts:
    """Count and hash the ids in the pack indexes of a store."""
    packs = (store.git / "objects/pack" / name for name in store.packs)
    closure = _closure(merged_ids([PackIndex(pack.with_suffix(".idx")) for pack in packs]))
    # its HEAD is never written again, so its time is that of the build
    built_at = (store.git / "HEAD").stat().st_mtime
    return StoreFacts(closure, datetime.fromtimestamp(built_at, UTC))


def closure_of_listing(listing: Path, head: CommitId) -> Closure:
    """Count and hash the ids that a walk listed, and `head`."""
    return _closure(b"".join(sorted({*listed_ids(listing), bytes.fromhex(head)})))


def _closure(ids: bytes) -> Closure:
    """Hash ids, sorted and joined, as lines."""
    lines = hashlib.sha256()
    for start in range(0, len(ids), _HASHED_BYTES):
        lines.update((ids[start : start + _HASHED_BYTES].hex("\n", ID_BYTES) + "\n").encode())
    return Closure(objects=len(ids) // ID_BYTES, sha256=lines.hexdigest())
