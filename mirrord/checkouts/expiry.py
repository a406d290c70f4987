"""The end of leases that nobody releases: past their deadline, or bound to a process that ended."""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

from ..host.pidfds import Process, ProcessWatch, process_gone
from ..host.trash import Trash
from .leases import Lease, Leases
from .lifecycle import Lifecycle


class Expiry:
    """Ends leases at their deadlines, and with the processes that they are bound to.

    `publish` takes the name of an event and its lease. Belongs to one event loop.
    """

    def __init__(
        self,
        leases: Leases,
        lifecycle: Lifecycle,
        trash: Trash,
        publish: Callable[[str, Lease], Any],
        clock: Callable[[], datetime],
    ) -> None:
        self._leases = leases
        self._lifecycle = lifecycle
        self._trash = trash
        self._publish = publish
        self._clock = clock
        self._closing = False
        self._process_ended = asyncio.Event()
        self._processes = ProcessWatch(self._process_ended.set)
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """End the leases of an earlier daemon whose process has ended meanwhile; watch the rest."""
        for lease in self._leases:
            if lease.bound_to:
                self._processes.hold(lease.bound_to)
        await self.expire()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        self._closing = True
        if self._watching:
            self._watching.cancel()
        self._processes.keep_only(())

    def bind(self, lease: Lease, process: Process) -> None:
        """End a new lease with `process`; at once, with ProcessGoneError, where that has ended."""
        try:
            if not self._processes.hold(process):
                raise process_gone(process.pid)
        except BaseException:
            self._lifecycle.end(lease)
            raise

    async def expire(self) -> int:
        """Release idle checkouts that are past their deadline, or have outlived their process;
        answers how many.
        """
        if self._closing:
            return 0
        self._processes.keep_only({lease.bound_to for lease in self._leases if lease.bound_to})
        count = 0
        for lease in filter(self._is_over, self._leases):
            if self._lifecycle.is_locked(lease.id):
                continue
            async with self._lifecycle.locked(lease.id):
                current = self._leases.find(lease.id)
                if current is None or not self._is_over(current):
                    continue
                self._lifecycle.end(current)
            self._publish("checkout.expired", current)
            await self._trash.keep_up()
            count += 1
        return count

    def _is_over(self, lease: Lease) -> bool:
        is_orphaned = lease.bound_to is not None and lease.bound_to not in self._processes
        return is_orphaned or lease.expires_at <= self._clock()

    async def _watch(self) -> None:
        while True:
            await self._process_ended.wait()
            self._process_ended.clear()
            await self.expire()
