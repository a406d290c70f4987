"""Heals as the daemon runs them: one mirror at a time under its lock, tried again while open.

A mirror whose heal left something open is tried again after pauses that double, and at once after a
start, which an operator makes who has just repaired something. A heal answers what it did; whether
the mirror is sound is for the audit after it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import structlog
from anyio import to_thread

from ..audit.findings import Judged
from ..audit.object_files import BadFile, FileKind
from ..catalog import Catalog, MirrorRow
from ..config import Settings
from ..errors import MirrordError, StoppingError, UpstreamError
from ..git.command import Git
from ..git.workers import Workers
from ..jobs.events import Events
from ..layout import Layout
from ..mirrors.history import columns_of
from ..mirrors.service import Mirrors
from ..model import AuditLevel, MirrorName
from ..protocol import Audit, ProgressSink, Repair
from ..units import Backoff
from .donors import Donors
from .publish import DamagedFiles, Step
from .repair import MirrorRepair

log = structlog.get_logger()


class Heals:
    """Repairs mirrors. `step` is called before each change of a mirror."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        mirrors: Mirrors,
        catalog: Catalog,
        git: Git,
        workers: Workers,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
        step: Step = lambda _name: None,
    ) -> None:
        self._layout = Layout(settings().state_dir)
        self._mirrors = mirrors
        self._catalog = catalog
        self._git = git
        self._workers = workers
        self._events = events
        self._clock = clock
        self._step = step
        self._lent: list[Path] = []
        self._open: dict[str, tuple[MirrorName, Backoff, float]] = {}  # and when to try again

    async def open(self) -> None:
        """Take up what the last heals before the start left open."""
        settled: set[str] = set()
        for audit in await self._catalog.list_audits():
            ends = _ends(audit)
            for mirror in ends.keys() - settled:
                if ends[mirror]:
                    name = MirrorName.parse(mirror)
                    self._open[name.key] = (name, _backoff(), self._clock())
            settled |= ends.keys()

    def settle(self, audit: Audit) -> None:
        """Do not try mirrors again that an audit found sound."""
        for mirror, is_open in _ends(audit).items():
            if not is_open:
                self._open.pop(MirrorName.parse(mirror).key, None)

    def due(self) -> list[MirrorName]:
        """Mirrors whose last heal left something open and whose time has come."""
        now = self._clock()
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
        self._events.publish(
            "mirror.repaired",
            mirror=str(name),
            objects=sum(repair.objects.values()),
            files=len(repair.files),
            refs=len(repair.refs),
            unhealed=repair.unhealed_count,
        )
        return repair

    def _postpone(self, name: MirrorName) -> None:
        _, backoff, _ = self._open.get(name.key, (name, _backoff(), math.inf))
        self._open[name.key] = (name, backoff, self._clock() + backoff.next().total_seconds())

    # -- one mirror --------------------------------------------------------------------------------

    async def _repair(self, judged: Judged, progress: ProgressSink | None) -> Repair:
        row = await self._catalog.find_mirror(judged.name.key)
        if row is None and not await self._catalog.list_recorded(judged.name.key):
            return Repair(mirror=str(judged.name))  # it was removed since the audit looked
        row = row or await self._mirrors.add(judged.name.repo)
        refused = await self._make_again(row, progress)
        async with self._mirrors.lock(row.name), self._mirrors.quarantine.directory("heal") as work:
            pinned = {pin.commit for pin in await self._catalog.list_pins(row.name.key)}
            donors = Donors(
                git=self._git,
                workers=self._workers,
                mirrors=self._mirrors,
                layout=self._layout,
                row=row,
                names=[other.name for other in await self._catalog.list_mirrors()],
                lent=tuple(self._lent),
                work=work,
                progress=progress,
            )
            repair = await MirrorRepair(
                donors,
                self._mirrors.path(row.name),
                recorded=pinned | {recorded.commit for recorded in judged.rows},
                suspects=judged.examined.defects,
                step=self._step,
            ).perform()
            if refused and not repair.objects:
                await self._mirrors.quarantine.discard(self._mirrors.path(row.name))
                raise refused
            # a history that could not be had whole is the one there is
            known = None if repair.history else row.history
            columns = await columns_of(self._mirrors.repository(row.name), known)
            await self._catalog.update_mirror(row.name.key, **columns)
        await self._mirrors.restore_pins(row.name)
        return repair

    async def _make_again(
        self, row: MirrorRow, progress: ProgressSink | None
    ) -> UpstreamError | None:
        """Make a mirror that is gone from upstream; or empty, and answer why, for other donors."""
        path = self._mirrors.path(row.name)
        if os.path.lexists(path) and not path.is_dir():
            bad = BadFile(path.name, FileKind.LAYOUT, "it is no directory")
            root = self._mirrors.quarantine.root
            async with self._mirrors.lock(row.name):
                damaged = await to_thread.run_sync(
                    DamagedFiles.begin, root, row.name, path.parent, [bad]
                )
                await to_thread.run_sync(damaged.move, bad.path)
        if path.exists():
            return None
        try:
            await self._mirrors.sync(row.name, progress)
        except UpstreamError as error:
            if row.history is None:
                raise
            await self._mirrors.make_empty(row.name)
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
