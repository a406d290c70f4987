"""Trees that are written ahead of the pool's next checkouts.

A tree that a lease had is never handed on: a process that its client left behind may still hold it
by working directory, descriptor, mapping, mount or a message in flight, and not every process is
visible to the daemon. So the next checkout gets new inodes: a spare tree that no client has seen,
written in the background when an owner releases a checkout, and again when it takes a spare.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import anyio

from ...errors import MirrordError
from ...host.trash import Trash
from ...model import new_checkout_id
from ...telemetry import log
from ...workers.turns import Askers
from ..lease import Directories, Lease

_EACH_MAX, _MAX = 2, 32  # of one owner and mirror; in all
# A tree of 5,000 files is written in half a second. A spare that takes longer waits for its turn,
# or for the disk, as a tree of one's own would: then that one is begun, too.
_WAIT_S = 2.0


@dataclass(eq=False)
class _Spare:
    """A tree that is being written, until `task` has ended."""

    like: Lease
    askers: Askers = field(default_factory=Askers)
    since: float = field(default_factory=time.monotonic)
    task: asyncio.Task[bool] | None = None

    @property
    def directories(self) -> Directories:
        return self.like.directories

    @property
    def is_ready(self) -> bool:
        return self.task is not None and self.task.done()

    def fits(self, lease: Lease) -> bool:
        return (self.like.owner, self.like.mirror.key) == (lease.owner, lease.mirror.key)


class Spares:
    """The spare trees of a pool, the oldest first. `write` writes the tree of a lease, which is
    in no list of leases. Belongs to one event loop.
    """

    def __init__(self, write: Callable[[Lease], Awaitable[object]], trash: Trash) -> None:
        self._write = write
        self._trash = trash
        self._spares: list[_Spare] = []
        self._closed = False

    @property
    def ready(self) -> list[Directories]:
        return [spare.directories for spare in self._spares if spare.is_ready]

    def order(self, like: Lease) -> None:
        """Write a tree like that of a lease, unless its owner has enough spares of the mirror."""
        if self._closed or sum(spare.fits(like) for spare in self._spares) >= _EACH_MAX:
            return
        if len(self._spares) >= _MAX:
            self._discard(self._spares[0])
        directories = like.directories.renamed(f".warm-{new_checkout_id()}")
        spare = _Spare(
            replace(like, directories=directories, base=replace(like.base, layer=None, saved=None))
        )
        self._spares.append(spare)
        spare.task = asyncio.get_running_loop().create_task(self._fill(spare))

    async def take(self, lease: Lease) -> Directories | None:
        """Take a spare for a lease; waits for one that is being written.

        The caller removes what it leaves of the directories.
        """
        spare = next((spare for spare in self._spares if spare.fits(lease)), None)
        if spare is None or spare.task is None:
            return None
        self._spares.remove(spare)
        is_written = None
        try:
            with spare.askers.joined(Askers.present()), anyio.move_on_after(_WAIT_S):
                is_written = await asyncio.shield(spare.task)
        finally:
            if is_written is None:  # the wait ended first
                self._spares.append(spare)
        return spare.directories if is_written else None

    def drop(self, idle: timedelta) -> None:
        """Remove the spares that nobody took for `idle`."""
        before = time.monotonic() - idle.total_seconds()
        for spare in [spare for spare in self._spares if spare.since <= before]:
            self._discard(spare)

    async def close(self) -> None:
        """Stop writing. The next start removes all spares: they have no lease."""
        self._closed = True
        tasks = [spare.task for spare in self._spares if spare.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _discard(self, spare: _Spare) -> None:
        self._spares.remove(spare)
        if spare.is_ready:
            self._trash.add(*spare.directories)
        elif spare.task:
            spare.task.cancel()

    async def _fill(self, spare: _Spare) -> bool:
        spare.askers.bind()
        is_written = False
        try:
            await self._write(spare.like)
            is_written = True
        except (MirrordError, OSError) as error:
            log.info("spare.failed", mirror=str(spare.like.mirror), problem=str(error))
        finally:
            if not is_written:
                # `take` and `_discard` have removed it before
                with suppress(ValueError):
                    self._spares.remove(spare)
                if not self._closed:
                    self._trash.add(*spare.directories)
        return is_written
