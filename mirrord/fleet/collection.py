"""Garbage collection in the store, by one daemon at a time.

The caller holds the mirror's claim, so that no publication runs meanwhile. The store's clock tells
ages. The newest manifest of a mirror stays with its packs whatever the catalog says: a lost
catalog, or another one, drops no backup.
"""

import secrets
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import NamedTuple

from ..catalog import Generation
from ..errors import StoreUnavailableError
from ..model import MirrorName
from .generations import index_key, list_published, manifest_key, pack_key, prefix_of, read_manifest
from .objects import ObjectStore

# followers, and a catalog restored from a backup, may need an older generation for a while
_GRACE = timedelta(days=1)


class Collected(NamedTuple):
    """The objects dropped. `lost` are those of the newest generation that are gone or cut short."""

    objects: int
    size_bytes: int
    lost: list[str]


def clock_of(store: ObjectStore) -> datetime:
    """Return the store's time."""
    key = f"checks/{secrets.token_hex(16)}"
    store.put(key, b"")
    # stores tell their time only by that of an object; this node's may be minutes off
    written = [entry.written_at for entry in store.iterate("checks/") if entry.key == key]
    store.delete([key])
    if not written:
        raise StoreUnavailableError(f"cannot tell the time of store {store.shown}")
    return written[0]


def collect(
    store: ObjectStore,
    name: MirrorName,
    newest: Generation | None,
    now: datetime,
    kept: Collection[str] = (),
) -> Collected:
    """Drop manifests that are neither the newest nor young, and packs that no other one names.

    `newest` is the catalog's newest generation, `kept` are keys of closure packs. Raises
    StoreDamagedError where a manifest that stays cannot be read, and drops nothing then.
    """
    entries = {entry.key: entry for entry in store.iterate(prefix_of(name))}
    old = {key for key, entry in entries.items() if now - entry.written_at > _GRACE}
    published = list_published(store, name)
    stays = [it for it in published if manifest_key(name, it) not in old]
    stays += {*published[-1:], *([newest] if newest else [])} - {*stays}
    needed, lost = {*kept, *(manifest_key(name, it) for it in stays)}, list[str]()
    for generation in stays:
        for pack in read_manifest(store, name, generation).packs:
            sizes = {pack_key(name, pack): pack.pack.size_bytes,
                     index_key(name, pack): pack.index.size_bytes}  # fmt: skip
            needed |= sizes.keys()
            if generation == newest:
                stored = {key: entries[key].size_bytes for key in sizes.keys() & entries.keys()}
                lost += [key for key, size in sizes.items() if stored.get(key) != size]
    dropped = old - needed
    packs = {key for key in dropped if "/packs/" in key}
    # One after the other, because a store deletes what one call names in any order: a manifest that
    # outlived its packs would look like a generation that can be restored.
    store.delete(dropped - packs)
    store.delete(packs)
    return Collected(len(dropped), sum(entries[key].size_bytes for key in dropped), lost)
