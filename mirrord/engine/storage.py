"""Disk usage and garbage collection of the state directory: `du` and `gc`.

Templates are weighed by their records; a worker walks the rest, for a limited time. A collection
drops caches that no checkout needs and that the daemon can make again. Everything is renamed before
it is removed, so a crash leaves trash, which the next start removes.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, get_args

import anyio
import anyio.to_thread

from ..checkouts.layers import layer_path
from ..checkouts.lease import Lease
from ..checkouts.service import Checkouts
from ..environments.service import Environments
from ..errors import CatalogUnavailableError
from ..host.peers import Peer
from ..host.trash import TRASH_PREFIX, find_trash
from ..mirrors.service import Mirrors
from ..model import History
from ..places import Layout
from ..presence import lexists, matching
from ..protocol import Dropped, Garbage, Usage, UsageKind, UsageRow, UsageTotal
from ..templates.service import Templates
from ..templates.store import SealedStore
from ..trees.reader import weigh


class _Item(NamedTuple):
    """Paths that are weighed as one row; `checkouts` is how many checkouts use them."""

    name: str
    paths: tuple[Path, ...]
    checkouts: int = 0
    is_garbage: bool = False

    @property
    def exists(self) -> bool:
        return any(map(lexists, self.paths))


_Items = dict[UsageKind, list[_Item]]


class _Kind(NamedTuple):
    """All rows of a kind. A file that several rows share counts once in `size_bytes`."""

    kind: UsageKind
    rows: list[UsageRow]
    size_bytes: int
    reclaimable_bytes: int = 0

    @property
    def total(self) -> UsageTotal:
        used = sum(row.checkouts > 0 for row in self.rows)
        return UsageTotal(
            kind=self.kind, count=len(self.rows), used=used,
            size_bytes=self.size_bytes, reclaimable_bytes=self.reclaimable_bytes,
        )  # fmt: skip


# a walk that takes longer gives what it has weighed so far, and says so
_WALK_TIME = timedelta(seconds=20)
# spare trees unused for that long go before templates are evicted
_IDLE = timedelta(minutes=10)


@dataclass(kw_only=True, eq=False)
class Storage:
    """The disk of one daemon."""

    layout: Layout
    mirrors: Mirrors
    templates: Templates
    checkouts: Checkouts
    environments: Environments
    _collecting: anyio.Lock = field(default_factory=anyio.Lock)
    _is_low: bool = False

    def __post_init__(self) -> None:
        self.room, self.trash = self.mirrors.room, self.mirrors.trash
        self.quarantine, self.events = self.mirrors.quarantine, self.mirrors.events
        self.room.evict = self._make_room

    async def usage(self, peer: Peer, *, is_admin: bool, verbose: bool) -> Usage:
        """Return what is on disk; without `is_admin`, the peer's own checkouts and layers."""
        leases = self.checkouts.leases_of(peer)
        items: _Items = {"layers": self._find_layers(peer)}
        kinds: list[_Kind] = []
        if is_admin:
            items |= await anyio.to_thread.run_sync(self._find_items, leases)
            kinds += [await self._weigh_templates(leases), *await self._weigh_catalog(leases)]
        # checkouts last: trees of the pool can use up the walk's time
        kinds += await self._weigh(items | _find_checkouts(self.layout.root, leases))
        kinds.sort(key=lambda kind: get_args(UsageKind).index(kind.kind))
        rows = [row for kind in kinds for row in kind.rows]
        disk = await anyio.to_thread.run_sync(os.statvfs, self.layout.root)
        return Usage(
            size_bytes=sum(kind.size_bytes for kind in kinds),
            reclaimable_bytes=sum(kind.reclaimable_bytes for kind in kinds),
            disk_bytes=disk.f_blocks * disk.f_frsize,
            # not f_bfree, which counts what only root may use: 5 % of an ext4
            disk_free_bytes=disk.f_bavail * disk.f_frsize,
            totals=[kind.total for kind in kinds if kind.rows],
            rows=rows if verbose else [],
            partial=sum(not row.is_whole for row in rows),
        )

    async def collect(self, *, dry_run: bool) -> Garbage:
        """Drop unused caches, or with `dry_run` list them. One collection runs at a time."""
        async with self._collecting:
            items = await anyio.to_thread.run_sync(self._find_garbage)
            weighed = await self._weigh(items)
            keep = self.checkouts.needed_templates
            if dry_run:
                templates = {
                    weight.name: (
                        sum(not one.is_needed for one in weight.templates),
                        weight.free_bytes,
                    )
                    for weight in await self.templates.weigh(keep)
                }
            else:
                self.checkouts.pool.spares.drop(timedelta())
                templates = await self.templates.collect(keep)
                await self.quarantine.clean()
                await self.environments.builds.drop_caches()
                self.environments.images.drop_unused()
                await self.trash.settle()
            # what resisted its removal was not freed
            kept = set() if dry_run else await anyio.to_thread.run_sync(_find_existing, items)
        dropped = [
            Dropped(kind="templates", name=str(name), count=count, size_bytes=size)
            for name, (count, size) in templates.items()
            if count or size
        ]
        dropped += [
            Dropped(kind=row.kind, name=row.name, size_bytes=row.size_bytes)
            for kind in weighed
            for row in kind.rows
            if row.size_bytes and (row.kind, row.name) not in kept
        ]
        freed_bytes = sum(item.size_bytes for item in dropped)
        if not dry_run:
            self.events.publish("garbage.collected", count=len(dropped), size_bytes=freed_bytes)
        return Garbage(dry_run=dry_run, freed_bytes=freed_bytes, dropped=dropped)

    async def look(self) -> None:
        """Evict caches before the disk is full; publish `disk.ran_low` and `disk.recovered`."""
        await self.room.look_for_fault()
        space = await self.room.look()
        if bool(space.shortage) != self._is_low:
            self._is_low = not self._is_low
            self.events.publish(
                "disk.ran_low" if self._is_low else "disk.recovered",
                free_bytes=space.free_bytes, reserve_bytes=space.reserve_bytes,
                free_inodes=space.free_inodes,
            )  # fmt: skip

    async def _make_room(self, short_bytes: int) -> None:
        """Drop caches that were not used recently until about `short_bytes` are freed.

        Environments are kept: building one again needs room and a package index.
        """
        wanted_bytes = self.room.measure().free_bytes + short_bytes
        async with self._collecting:
            if await anyio.to_thread.run_sync(self.environments.builds.caches):
                await self.environments.builds.drop_caches()
            await self.trash.settle()
            missing = wanted_bytes - self.room.measure().free_bytes
            if missing > 0:
                self.checkouts.pool.spares.drop(_IDLE)
                await self.templates.evict(missing)
                await self.trash.settle()

    # -- items, found in threads -------------------------------------------------------------------

    def _find_items(self, leases: list[Lease]) -> _Items:
        """Find everything but checkouts, templates and the catalog."""
        held = Counter(str(lease.mirror) for lease in leases)
        leftovers = self.quarantine.leftovers
        layout, garbage, store = self.layout, self._find_garbage(), self.environments.store
        environments = [
            _Item(
                ready.name,
                (store.root / ready.digest, *store.lowers(ready.digest)[1:]),
                store.held[ready.digest],
            )
            for ready in store.list()
        ]
        mirrors, quarantine = _paths_in(layout.mirrors), _paths_in(layout.quarantine)
        return {
            "mirrors": [_Item(path.name, (path,), held[path.name]) for path in mirrors],
            **garbage,
            "environments": [*environments, *garbage["environments"]],
            "quarantine": [_Item(path.name, (path,), 0, path in leftovers) for path in quarantine],
            "other": [
                _Item(path.name, (path,)) for path in (layout.datasets, layout.bundles, layout.home)
            ],
        }

    def _find_layers(self, peer: Peer) -> list[_Item]:
        """Find the prepared layers that a peer saved; for an administrator all."""
        prepared = self.checkouts.prepared
        return [
            _Item(
                f"{record.saved.name} {record.mirror}@{record.commit}",
                prepared.paths_of(record),
                holders,
            )
            for record, holders in self.checkouts.layers_of(peer)
        ]

    def _find_garbage(self) -> _Items:
        """Find unused caches, released trees, leftovers of killed processes, and trash."""
        layout, templates = self.layout, self.layout.templates
        directories = [
            *(layout.mirrors, layout.quarantine, layout.checkouts, layout.leases, templates),
            *matching(layout.leases, "[!.]*"),
            *matching(templates, "*"),
            *matching(templates, "[!.]*/*"),
        ]
        trash = sorted(path for directory in directories for path in find_trash(directory))
        leftovers = sorted(self.quarantine.leftovers)
        fetched = self.environments.images.fetched()
        spares, caches = self.checkouts.pool.spares.ready, self.environments.builds.caches()
        return {
            "environments": [
                *(_Item(f"cache of {path.name}", (path,), is_garbage=True) for path in caches),
                *(_Item(f"image {path.name}", (path,), is_garbage=True) for path in fetched),
            ],
            "warm-trees": [_Item(spare.public.name, spare, is_garbage=True) for spare in spares],
            "quarantine": [_Item(path.name, (path,), is_garbage=True) for path in leftovers],
            "trash": [
                _Item(str(path.relative_to(layout.root)), (path,), is_garbage=True)
                for path in trash
            ],
        }

    # -- sizes -------------------------------------------------------------------------------------

    async def _weigh(self, items: _Items) -> list[_Kind]:
        """Weigh items by a walk."""
        limit_s = _WALK_TIME.total_seconds()
        paths = {str(kind): [item.paths for item in some] for kind, some in items.items()}
        # the walk ends by itself after half of this, unless the disk hangs
        weights = await self.mirrors.workers.run(weigh, paths, limit_s, timeout=_WALK_TIME * 2)
        kinds = []
        for kind, some in items.items():
            rows = [
                UsageRow(
                    kind=kind, name=item.name, checkouts=item.checkouts, is_whole=weight.is_whole,
                    size_bytes=weight.size_bytes, shared_bytes=weight.shared_bytes,
                    reclaimable_bytes=weight.size_bytes if item.is_garbage else 0,
                )
                for item, weight in zip(some, weights[kind].each, strict=True)
            ]  # fmt: skip
            free = sum(row.reclaimable_bytes for row in rows)
            kinds.append(_Kind(kind, rows, weights[kind].total_bytes, free))
        return kinds

    async def _weigh_templates(self, leases: Iterable[Lease]) -> _Kind:
        """Weigh templates by their records."""
        held = Counter((lease.mirror.key, lease.base.commit, lease.history) for lease in leases)
        weights = await self.templates.weigh(self.checkouts.needed_templates)
        rows = [
            UsageRow(
                kind="templates",
                name=_template_name(one.store),
                size_bytes=one.size_bytes,
                shared_bytes=one.shared_bytes,
                reclaimable_bytes=0 if one.is_needed else one.size_bytes - one.shared_bytes,
                checkouts=held[one.store.mirror.key, one.store.commit, one.store.history],
                used_at=datetime.fromtimestamp(one.used_at, UTC),
            )
            for weight in weights
            for one in weight.templates
        ]
        sizes = (
            sum(weight.size_bytes for weight in weights),
            sum(weight.free_bytes for weight in weights),
        )
        return _Kind("templates", rows, *sizes)

    async def _weigh_catalog(self, leases: Iterable[Lease]) -> list[_Kind]:
        """Weigh datasets by the values of their rows; the rest of the database is one row."""
        held = Counter(lease.base.dataset for lease in leases)
        try:
            sizes = await self.mirrors.catalog.weigh_datasets()
        except CatalogUnavailableError:
            unknown = UsageRow(kind="datasets", name="unknown", size_bytes=0, is_whole=False)
            return [_Kind("datasets", [unknown], 0)]
        rows = [
            UsageRow(kind="datasets", name=name, size_bytes=size, checkouts=held[name])
            for name, size in sizes.items()
        ]
        kinds = [_Kind("datasets", rows, sum(sizes.values()))]
        path = self.layout.catalog
        database = await anyio.to_thread.run_sync(
            # st_blocks counts 512 bytes whatever the file system's block is
            lambda: sum(
                file.stat().st_blocks * 512 for file in matching(path.parent, f"{path.name}*")
            )
        )
        if database:  # none with a PostgreSQL
            other_bytes = max(0, database - sum(sizes.values()))
            row = UsageRow(kind="catalog", name=path.name, size_bytes=other_bytes)
            kinds.append(_Kind("catalog", [row], other_bytes))
        return kinds


def _find_checkouts(root: Path, leases: Iterable[Lease]) -> _Items:
    """Find the private files of checkouts, of an overlay its upper layer, and snapshots."""
    layers = Counter(layer for lease in leases for layer in lease.own_layers)
    checkouts = [_Item(lease.id, lease.own_paths, 1) for lease in leases]
    snapshots = [
        _Item(layer, (layer_path(root, layer),), count) for layer, count in sorted(layers.items())
    ]
    return {"checkouts": checkouts, "snapshots": snapshots}


def _paths_in(directory: Path) -> list[Path]:
    """Return the paths in a directory, without trash."""
    return sorted(path for path in directory.iterdir() if not path.name.startswith(TRASH_PREFIX))


def _find_existing(items: _Items) -> set[tuple[UsageKind, str]]:
    """Return kind and name of the items that still exist."""
    return {(kind, item.name) for kind, some in items.items() for item in some if item.exists}


def _template_name(store: SealedStore) -> str:
    name = f"{store.mirror}@{store.commit}"
    return name if store.history is History.SEALED else f"{name} {store.history}"
