"""Trees made ahead, for checkouts that are reset to where they are: what the next reset would make, made after the last answer.

Owns when one is made, and for how long it is kept. Most of what a reset waits for is the mount, for which the kernel makes seven
files of its own, and the directories. A spare is made for one checkout and given to it once; where there is none, the reset makes
what it needs in the same way. A crash leaves a directory without a lease: the next start removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import structlog

from ..errors import MirrordError
from ..model import CheckoutId, new_checkout_id
from .leases import Lease
from .templates import Template

_NEXT = ".next-"
_PAUSE_S = 0.05  # whoever resets is answered first
_KEPT_S = 5.0
_MOST = 4

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Fresh:
    """A directory as a checkout has it, all but its lease, with the mount; `head` is what its HEAD was seen to say."""

    directory: str
    template: Template
    head: str


class Spares:
    """`make`, in a thread, makes a directory for a lease; `remove` takes one away. Belongs to one event loop."""

    def __init__(self, checkouts: Path, make: Callable[[str, Lease, Template], Fresh], remove: Callable[[str], None]) -> None:
        self._checkouts = checkouts
        self._make = make
        self._remove = remove
        self._spares: dict[CheckoutId, Fresh] = {}
        self._making: dict[CheckoutId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # those that are not wanted any more too

    async def close(self) -> None:
        for checkout in {*self._making, *self._spares}:
            self.drop(checkout)
        await asyncio.gather(*self._tasks)

    def new_directory(self) -> str:
        """A name for what is no checkout yet; nothing is there."""
        return f"{self._checkouts}/{_NEXT}{new_checkout_id()}"

    def take(self, checkout: CheckoutId, template: Template) -> Fresh | None:
        """The one over this very template: one that was built anew since is another, although it is equal."""
        spare = self._spares.get(checkout)
        if spare is not None and spare.template is template:
            return self._spares.pop(checkout)
        self.drop(checkout)
        return None

    def make_ahead(self, lease: Lease, template: Template) -> None:
        """Make one soon, unless there are enough."""
        if len(self._spares) + len(self._tasks) < _MOST:
            task = self._making[lease.id] = asyncio.get_running_loop().create_task(self._add(lease, template))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def drop(self, checkout: CheckoutId) -> None:
        """Take away what was made for a checkout, or is being made."""
        self._making.pop(checkout, None)
        if spare := self._spares.pop(checkout, None):
            self._remove(spare.directory)

    async def _add(self, lease: Lease, template: Template) -> None:
        await asyncio.sleep(_PAUSE_S)
        if not self._is_wanted(lease):
            return
        directory = self.new_directory()
        try:
            spare = await anyio.to_thread.run_sync(self._make, directory, lease, template)
        except (MirrordError, OSError) as error:
            log.info("spare.failed", checkout=lease.id, error=str(error))
            self._remove(directory)
            return
        if self._is_wanted(lease):
            self._spares[lease.id] = spare
            asyncio.get_running_loop().call_later(_KEPT_S, self._expire, lease.id, spare)
        else:
            self._remove(directory)

    def _is_wanted(self, lease: Lease) -> bool:
        """Whether it was neither released nor reset since."""
        return self._making.get(lease.id) is asyncio.current_task()

    def _expire(self, checkout: CheckoutId, spare: Fresh) -> None:
        if self._spares.get(checkout) is spare:
            self.drop(checkout)
