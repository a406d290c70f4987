"""Instances and base commits that were asked for lately, in memory, within a bound: what a warm checkout looks up without the
database.

Never older than the catalog: everything is forgotten when any dataset changes, and an answer that was under way then is not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable

from ..catalog import InstanceRow
from ..model import CommitId, MirrorName

_ROW_OVERHEAD_BYTES = 1000
_LIMIT_BYTES = 16 * 1024**2
_Key = tuple[str, str | None]
_Load = Callable[[str, str | None], Awaitable[InstanceRow | None]]
_COMMITS_LIMIT = 100_000


class InstanceCache:
    """Least recently used first out. Belongs to one event loop."""

    def __init__(
        self,
        load: Callable[[str, str | None], Awaitable[InstanceRow | None]],
        *,
        limit_bytes: int = _LIMIT_BYTES,
    ) -> None:
        self._load = load
        self._limit_bytes = limit_bytes
        self._rows: OrderedDict[_Key, InstanceRow] = OrderedDict()
        self._held_bytes = 0
        self._generation = 0

    async def find(self, identity: str, dataset: str | None = None) -> InstanceRow | None:
        """Of one dataset, or of any."""
        key = (identity, dataset)
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
            return row
        generation = self._generation
        row = await self._load(identity, dataset)
        if row is not None and generation == self._generation:
            self._keep(key, row)
        return row

    def forget(self) -> None:
        self._generation += 1
        self._rows.clear()
        self._held_bytes = 0

    def _keep(self, key: _Key, row: InstanceRow) -> None:
        size = _size_bytes(row)
        if key in self._rows or size > self._limit_bytes // 16:
            return
        self._rows[key] = row
        self._held_bytes += size
        while self._held_bytes > self._limit_bytes:
            self._held_bytes -= _size_bytes(self._rows.popitem(last=False)[1])


class BaseCommits:
    """Base commits of instances, by the digits that they were asked for with. Belongs to one event loop."""

    def __init__(self, load: Callable[[str, str], Awaitable[CommitId | None]]) -> None:
        self._load = load
        self._known: dict[tuple[str, str], CommitId] = {}

    async def find(self, name: MirrorName, digits: str) -> CommitId | None:
        """The one base commit of the mirror that begins with these digits. An answer of None is not
        remembered: anybody can ask for those without end."""
        known = self._known
        found = known.get((name.key, digits))
        if found is None:
            found = await self._load(name.key, digits)
            if found is not None and len(known) < _COMMITS_LIMIT:
                known[name.key, digits] = found  # lost where `forget` came in between
        return found

    def forget(self) -> None:
        self._known = {}


def _size_bytes(row: InstanceRow) -> int:
    tests = sum(len(test) + 60 for test in (*row.fail_to_pass, *row.pass_to_pass))
    return _ROW_OVERHEAD_BYTES + len(row.patch or "") + len(row.test_patch or "") + tests
