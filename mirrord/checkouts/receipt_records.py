"""Records of issued receipts in the catalog, whose writers can wait for an import to end.

A receipt waits for its record for a moment only, and the record for its turn. One that a kill or a
full disk takes is as one that is no longer among the newest: its client has the receipt.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from ..catalog import KEPT, Catalog, ReceiptRow
from ..errors import MirrordError
from ..telemetry import log

# SQLite has one writer, which an import is for seconds; a record of its own takes 5 ms
_WAIT_S = 0.5
# the engine has 20 s for its stop
_CLOSE_S = 5.0


@dataclass(eq=False, repr=False)
class ReceiptRecords:
    """Writes and finds records. Belongs to one event loop."""

    catalog: Catalog

    def __post_init__(self) -> None:
        self._unwritten: dict[str, ReceiptRow] = {}  # oldest first
        self._writing: asyncio.Task[None] | None = None
        self._next_written = asyncio.Event()

    async def keep(self, row: ReceiptRow) -> None:
        """Write a record, together with all that wait; returns after half a second at most."""
        self._unwritten[row.id] = row
        if len(self._unwritten) > KEPT:
            del self._unwritten[next(iter(self._unwritten))]
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._next_written.wait(), _WAIT_S)

    async def find(self, identity: str) -> ReceiptRow | None:
        return self._unwritten.get(identity) or await self.catalog.find_receipt(identity)

    async def close(self) -> None:
        """Write what is left, if that is possible within seconds."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_CLOSE_S)
            self._writing.cancel()

    async def _write(self) -> None:
        while rows := list(self._unwritten.values()):
            written, self._next_written = self._next_written, asyncio.Event()
            try:
                await self.catalog.put_receipts(rows)
            except MirrordError as error:
                lost = [row.receipt.checkout for row in rows]
                log.warning("receipt.not_kept", checkouts=lost, detail=error.message)
            for row in rows:
                self._unwritten.pop(row.id, None)
            written.set()
