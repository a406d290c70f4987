"""What the store no longer needs of a mirror: found and dropped, by one daemon at a time.

The caller holds the mirror's claim, so that nobody publishes meanwhile. Ages are told by the
store's clock. The newest manifest of a mirror stays with its packs whatever the catalog says: a
catalog that is lost, or another one, drops no backup.
"""

import secrets
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import NamedTuple

from ..catalog import Generation
from ..errors import StoreUnavailableError
from ..model import MirrorName
from .generations import (
    index_key,
    list_published,
    manifest_key,
    pack_key,
    prefix_of,
    read_manifest,
)
from .objects import ObjectInfo, ObjectStore

GRACE = timedelta(days=1)
"""Followers read what was the newest generation a while ago; restores of a catalog too."""


class Collected(NamedTuple):
    """What was dropped, and what the newest generation needs that the store has not, or not so."""

    objects: int
    size_bytes: int
    lost: list[str]


def clock_of(store: ObjectStore) -> datetime:
    """What time it is in the store."""
    key = f"checks/{secrets.token_hex(16)}"
    store.put(key, b"")
    written = [each.written_at for each in store.iterate("checks/") if each.key == key]
    store.delete([key])
    if not written:
        raise StoreUnavailableError(f"cannot tell the time of store {store.shown}")
    return written[0]


def collect(
    store: ObjectStore,
    name: MirrorName,
    newest: Generation | None,
    now: datetime,
    grace: timedelta = GRACE,
    kept: Collection[str] = (),
) -> Collected:
    """Drop manifests that are neither the newest nor young, and packs that none of the rest names.

    `newest` is the catalog's, and so are the keys `kept`, of closures. Raises StoreDamagedError
    where a manifest that stays cannot be read, and drops nothing.
    """
    prefix = prefix_of(name)
    found = {each.key: each for each in store.iterate(prefix)}
    old = {key for key, each in found.items() if now - each.written_at > grace}
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
                lost += [key for key, size in sizes.items() if _size(found.get(key)) != size]
    # manifests first: one that stayed alone would name packs that are gone
    dropped = sorted(old - needed, key=lambda key: ("/packs/" in key, key))
    store.delete(dropped)
    return Collected(len(dropped), sum(found[key].size_bytes for key in dropped), lost)


def _size(found: ObjectInfo | None) -> int | None:
    return found.size_bytes if found else None
