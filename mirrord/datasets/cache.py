"""Instances asked for lately, so that a warm checkout needs no database. Of one event loop.

Never older than the catalog: a change of any dataset clears everything, and answers that were under
way then are not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable

from ..catalog import InstanceRow


class InstanceCache:
    """Evicts the least recently used instance over its limit."""

    def __init__(
        self,
        load: Callable[[str, str | None], Awaitable[InstanceRow | None]],
        *,
        limit_bytes: int = 16 * 1024**2,
    ) -> None:
        self._load = load
        self._limit_bytes = limit_bytes
        self._rows: OrderedDict[tuple[str, str | None], InstanceRow] = OrderedDict()
        self._size_bytes = 0
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
        if row is None or generation != self._generation or key in self._rows:
            return row
        size = _size_bytes(row)
        if size <= self._limit_bytes // 16:
            self._rows[key] = row
            self._size_bytes += size
            while self._size_bytes > self._limit_bytes:
                self._size_bytes -= _size_bytes(self._rows.popitem(last=False)[1])
        return row

    def clear(self) -> None:
        self._generation += 1
        self._rows.clear()
        self._size_bytes = 0


def _size_bytes(row: InstanceRow) -> int:
    tests = sum(len(test) + 60 for test in (*row.fail_to_pass, *row.pass_to_pass))
    return 1000 + len(row.patch or "") + len(row.test_patch or "") + tests
