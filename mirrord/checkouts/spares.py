"""Overlays made ahead, for checkouts that are reset again and again: a fresh layer, mounted over a template, but nowhere yet.

Owns when one is made, and for how long it is kept. Most of what a reset waits for on a disk is the mount, for which the kernel
makes seven files of its own, and the directories of the layer. A spare was open to nobody and is given away once; where there is
none, a reset makes what it needs. A crash leaves a directory without a lease: the next start removes it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import structlog

from ..errors import MirrordError
from ..host.userns import Owner
from .templates import Template

SPARE = ".spare-"

_PAUSE_S = 0.05  # whoever resets is answered first
_OFTEN_S = 10.0
_MOST = 4

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Spare:
    """`directory` is made as a checkout's is; `mount` is a descriptor."""

    directory: Path
    mount: int
    template: Template
    owner: Owner


class Spares:
    """`make`, in a thread, makes the directory and the mount; `remove` takes the directory away. Belongs to one event loop."""

    def __init__(self, checkouts: Path, make: Callable[[Path, Template, Owner], int], remove: Callable[[Path], None]) -> None:
        self._checkouts = checkouts
        self._make = make
        self._remove = remove
        self._spares: list[Spare] = []
        self._last: tuple[Template, Owner, float] | None = None
        self._making: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._making:
            await self._making
        for spare in list(self._spares):
            self._expire(spare)

    def take(self, template: Template, owner: Owner) -> Spare | None:
        """One over this very template: one that was built anew since is another, although it is equal."""
        for spare in self._spares:
            if spare.template is template and spare.owner == owner:
                self._spares.remove(spare)
                return spare
        return None

    def spend(self, spare: Spare) -> None:
        """Let go of what is left of one that was taken."""
        os.close(spare.mount)
        self._remove(spare.directory)

    def note_reset(self, template: Template, owner: Owner) -> None:
        """Make one soon, where this was not the first reset to it in a while."""
        last, self._last = self._last, (template, owner, time.monotonic())
        is_often = last and last[0] is template and last[1] == owner and self._last[2] - last[2] < _OFTEN_S
        if is_often and len(self._spares) < _MOST and (self._making is None or self._making.done()):
            self._making = asyncio.get_running_loop().create_task(self._add(template, owner))

    async def _add(self, template: Template, owner: Owner) -> None:
        await asyncio.sleep(_PAUSE_S)
        directory = self._checkouts / f"{SPARE}{secrets.token_hex(8)}"
        try:
            mount = await anyio.to_thread.run_sync(self._make, directory, template, owner)
        except (MirrordError, OSError) as error:
            log.info("spare.failed", error=str(error))
            self._remove(directory)
            return
        spare = Spare(directory, mount, template, owner)
        self._spares.append(spare)
        asyncio.get_running_loop().call_later(_OFTEN_S, self._expire, spare)

    def _expire(self, spare: Spare) -> None:
        if spare in self._spares:
            self._spares.remove(spare)
            self.spend(spare)
