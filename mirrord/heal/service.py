"""Heals as the daemon runs them: one mirror at a time under its lock, tried again while open.

A mirror whose heal left something open is tried again after pauses that double, and at once after a
start, which an operator makes who has just repaired something. A heal answers what it did; whether
the mirror is sound is for the audit after it.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from anyio import to_thread

from ..audit.findings import Judged
from ..audit.object_files import BadFile, FileKind
from ..catalog import MirrorRow
from ..errors import MirrordError, StoppingError, UpstreamError
from ..mirrors.history import columns_of
from ..mirrors.service import Mirrors
from ..model import AuditLevel, MirrorName
from ..protocol import Audit, ProgressSink, Repair
from ..telemetry import log
from ..units import Backoff
from .donors import Donors
from .publish import DamagedFiles, Step
from .repair import MirrorRepair


class Heals:
    """Repairs mirrors. `step` is called before each change of a mirror."""

    def __init__(self, mirrors: Mirrors, step: Step = lambda _name: None) -> None:
        self.mirrors, self.catalog, self.step = mirrors, mirrors.catalog, step
        self._lent: list[Path] = []
        # mirrors that a heal left open, by key, and when to try again
        self._open: dict[str, tuple[MirrorName, Backoff, float]] = {}

    async def open(self) -> None:
        """Take up what the last heals before the start left open."""
        settled: set[str] = set()
        for audit in await self.catalog.list_audits():
            ends = _ends(audit)
            for mirror in ends.keys() - settled:
                if ends[mirror]:
                    name = MirrorName.parse(mirror)
                    self._open[name.key] = (name, _backoff(), time.monotonic())
            settled |= ends.keys()

    def settle(self, audit: Audit) -> None:
        """Do not try mirrors again that an audit found sound."""
        for mirror, is_open in _ends(audit).items():
            if not is_open:
                self._open.pop(MirrorName.parse(mirror).key, None)

    def due(self) -> list[MirrorName]:
        """Mirrors whose last heal left something open and whose time has come."""
        now = time.monotonic()
        return [name for name, _, at in self._open.values() if at <= now]

    @contextmanager
    def lending(self, bundle: Path) -> Iterator[None]:
        """Have a bundle among the donors of every heal that begins meanwhile."""
        self._lent.append(bundle)
        try:
            yield
        finally:
            self._lent.remove(bundle)

    async def repair(self, judged: Judged, progress: ProgressSink | None = None) -> Repair:
        """Heal what an audit found, as far as donors allow.

        Errors are in the answer: they keep no other mirror waiting.
        """
        name = judged.name
        try:
            repair = await self._repair(judged, progress)
        except StoppingError:
            raise
        except (MirrordError, OSError) as error:
            reason = f"cannot heal mirror {name}: {error}"
            reason = error.message if isinstance(error, MirrordError) else reason
            log.warning("heal.failed", mirror=str(name), detail=reason)
            self._postpone(name)
            return Repair(mirror=str(name), error=reason)
        if repair.unhealed_count:
            self._postpone(name)
        else:
            self._open.pop(name.key, None)
        self.mirrors.events.publish(
            "mirror.repaired", mirror=str(name), objects=sum(repair.objects.values()),
            files=len(repair.files), refs=len(repair.refs), unhealed=repair.unhealed_count,
        )  # fmt: skip
        return repair

    def _postpone(self, name: MirrorName) -> None:
        _, backoff, _ = self._open.get(name.key, (name, _backoff(), math.inf))
        self._open[name.key] = (name, backoff, time.monotonic() + backoff.next().total_seconds())

    async def _repair(self, judged: Judged, progress: ProgressSink | None) -> Repair:
        row = await self.catalog.find_mirror(judged.name.key)
        if row is None and not await self.catalog.list_recorded(judged.name.key):
            return Repair(mirror=str(judged.name))  # it was removed since the audit looked
        row = row or await self.mirrors.add(judged.name.repo)
        refused = await self._make_again(row, progress)
        async with self.mirrors.lock(row.name), self.mirrors.quarantine.directory("heal") as work:
            pinned = {pin.commit for pin in await self.catalog.list_pins(row.name.key)}
            donors = Donors(self.mirrors, row, tuple(self._lent), work, progress)
            recorded = pinned | {recorded.commit for recorded in judged.rows}
            suspects, path = judged.examined.defects, self.mirrors.path(row.name)
            repair = await MirrorRepair(donors, path, recorded, suspects, self.step).perform()
            if refused and not repair.objects:
                await self.mirrors.quarantine.discard(path)
                raise refused
            # a history that could not be had whole is the one there is
            known = None if repair.history else row.history
            columns = await columns_of(self.mirrors.repository(row.name), known)
            await self.catalog.update_mirror(row.name.key, **columns)
        await self.mirrors.restore_pins(row.name)
        return repair

    async def _make_again(
        self, row: MirrorRow, progress: ProgressSink | None
    ) -> UpstreamError | None:
        """Make a mirror that is gone from upstream; or empty, and answer why, for other donors."""
        path, root = self.mirrors.path(row.name), self.mirrors.quarantine.root
        if os.path.lexists(path) and not path.is_dir():
            bad = BadFile(path.name, FileKind.LAYOUT, "it is no directory")
            async with self.mirrors.lock(row.name):
                damaged = await to_thread.run_sync(DamagedFiles, root, row.name, path.parent, [bad])
                await to_thread.run_sync(damaged.move, bad.path)
        if path.exists():
            return None
        try:
            await self.mirrors.sync(row.name, progress)
        except UpstreamError as error:
            if row.history is None:
                raise
            await self.mirrors.make_empty(row.name)
            return error
        return None


def _backoff() -> Backoff:
    return Backoff(timedelta(minutes=10), timedelta(hours=24))


def _ends(audit: Audit) -> dict[str, bool]:
    """Whether a heal of each mirror left something open, as far as this audit can tell.

    An audit below `content` does not see all.
    """
    tried = {repair.mirror: bool(repair.unhealed_count or repair.error) for repair in audit.repairs}
    found = {finding.mirror for finding in audit.findings if not finding.accepted}
    sound = set(audit.mirrors) - found if audit.level is AuditLevel.CONTENT else set[str]()
    return dict.fromkeys(sound, False) | tried
