"""Packs that earlier heals took out as donors: what nobody had then may be there, as a delta on what somebody has now.

Reads the evidence and never changes it. Owns the salvaged copies below the heal's own directory, made once for a heal and only of
packs that may hold something missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from ..audit.graph import TIMEOUT
from ..audit.view import borrow_from
from ..errors import CorruptObjectError
from ..git.workers import Workers
from ..host.files import full_disk_named
from ..model import MirrorName
from .donors import Donor, Lend
from .evidence import packs_taken
from .missing import Missing
from .salvage import SALVAGED, may_hold, salvage


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a mirror in `quarantine`. `view` is what it has that is good: deltas build on it."""

    workers: Workers
    quarantine: Path
    name: MirrorName
    work: Path
    view: Path

    def donors(self) -> list[Donor]:
        """The latest first."""
        packs = enumerate(packs_taken(self.quarantine, self.name))
        return [
            Donor(f"{SALVAGED}{pack.name} in quarantine", self._of(pack, self.work / f"kept-{n}"))
            for n, pack in packs
        ]

    def _of(self, pack: Path, into: Path) -> Lend:
        @asynccontextmanager
        async def lend(missing: Missing) -> AsyncIterator[Path | None]:
            there = into.exists() or await self._salvage(pack, into, missing)
            yield into if there else None

        return lend

    async def _salvage(self, pack: Path, into: Path, missing: Missing) -> bool:
        """Whether it was worth it. A person may have removed the pack, or taken it away from us."""
        try:
            if not await anyio.to_thread.run_sync(may_hold, pack, missing.all):
                return False
            with full_disk_named("quarantine"):
                await self.workers.call(salvage, pack, into, timeout=TIMEOUT)
        except OSError as error:
            raise CorruptObjectError(
                f"cannot salvage {pack.name} in quarantine: {error.strerror}"
            ) from error
        borrow_from(into, self.view)
        return True
