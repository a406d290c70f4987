"""Heals as the daemon runs them: one mirror at a time under its lock, lost pins made again, and patience with what nobody has.

Owns when a mirror is tried again: after a time that doubles with each heal that left something open; after a start at once, which
is what a person does who has just mended something. What a heal says is what it did; whether the mirror is sound is for the audit
after it.
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
from .donors import Donors, Shelf
from .publish import Evidence, Step, no_step
from .repair import Outcome, Treatment

FIRST_RETRY = timedelta(minutes=10)
LONGEST_RETRY = timedelta(hours=24)

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
        step: Step = no_step,
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
        self._open: dict[str, tuple[MirrorName, int, float]] = {}

    async def open(self) -> None:
        """Take up what the last heals before the start left open."""
        settled: set[str] = set()
        for audit in await self._catalog.list_audits():
            ends = _ends(audit)
            for name in ends.keys() - settled:
                if ends[name]:
                    self._reopen(MirrorName.parse(name))
            settled |= ends.keys()

    def _reopen(self, name: MirrorName) -> None:
        self._open[name.key] = (name, 0, self._clock())

    def settle(self, audit: Audit) -> None:
        """Have no more patience with mirrors of which an audit found that they are sound."""
        for name, is_open in _ends(audit).items():
            if not is_open:
                self._open.pop(MirrorName.parse(name).key, None)

    async def repair(self, judged: Judged, progress: ProgressSink | None = None) -> Repair:
        """Heal what an audit found, as far as donors allow. An error is told in the answer: the others are not kept waiting."""
        name = judged.name
        try:
            outcome = await self._repair(judged, progress)
        except StoppingError:
            raise
        except (MirrordError, OSError) as error:
            reason = (
                error.message
                if isinstance(error, MirrordError)
                else f"cannot heal mirror {name}: {error}"
            )
            log.warning("heal.failed", mirror=str(name), detail=reason)
            self._postpone(name)
            return Repair(mirror=str(name), error=reason)
        if outcome.unhealed:
            self._postpone(name)
        else:
            self._open.pop(name.key, None)
        self._events.publish(
            "mirror.treated",
            mirror=str(name),
            objects=sum(outcome.objects.values()),
            files=len(outcome.bad_files),
            refs=len(outcome.refs),
            unhealed=len(outcome.unhealed),
        )
        return _told(name, outcome)

    @contextmanager
    def lending(self, bundle: Path) -> Iterator[None]:
        """Have a bundle among the donors of every heal that begins meanwhile."""
        self._lent.append(bundle)
        try:
            yield
        finally:
            self._lent.remove(bundle)

    def due(self) -> list[MirrorName]:
        """Mirrors whose last heal left something open and whose time has come."""
        now = self._clock()
        return [name for name, _, at in self._open.values() if at <= now]

    def _postpone(self, name: MirrorName) -> None:
        _, tries, _ = self._open.get(name.key, (name, 0, math.inf))
        wait = min(FIRST_RETRY * 2 ** min(tries, 20), LONGEST_RETRY)
        self._open[name.key] = (name, tries + 1, self._clock() + wait.total_seconds())

    # -- one mirror ---------------------------------------------------------------------------------------------------

    async def _repair(self, judged: Judged, progress: ProgressSink | None) -> Outcome:
        row = await self._catalog.find_mirror(judged.name.key)
        if row is None and not await self._catalog.list_recorded(judged.name.key):
            return Outcome()  # it was removed since the audit looked
        row = row or await self._mirrors.add(judged.name.repo)
        refused = await self._make_again(row, progress)
        async with self._mirrors.lock(row.name), self._mirrors.quarantine.directory("heal") as work:
            outcome = await self._treat(row, judged, work, progress)
            if refused and not outcome.objects:
                await self._mirrors.quarantine.discard(self._mirrors.path(row.name))
                raise refused
            await self._note(row, outcome)
        await self._mirrors.restore_pins(row.name)
        return outcome

    async def _make_again(
        self, row: MirrorRow, progress: ProgressSink | None
    ) -> UpstreamError | None:
        """Have a repository where the mirror is gone: a new one from upstream, or an empty one and
        why, where other donors may have what it had.
        """
        path = self._mirrors.path(row.name)
        if os.path.lexists(path) and not path.is_dir():
            bad = BadFile(path.name, FileKind.LAYOUT, "it is no directory")
            root = self._mirrors.quarantine.root
            async with self._mirrors.lock(row.name):
                evidence = await to_thread.run_sync(
                    Evidence.begin, root, row.name, path.parent, [bad]
                )
                await to_thread.run_sync(evidence.move, bad.path)
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

    async def _note(self, row: MirrorRow, outcome: Outcome) -> None:
        """Bring the catalog in line; a history that could not be had whole is the one there is."""
        known = None if outcome.history else row.history
        columns = await columns_of(self._mirrors.repository(row.name), known)
        await self._catalog.update_mirror(row.name.key, **columns)

    async def _treat(
        self, row: MirrorRow, judged: Judged, work: Path, progress: ProgressSink | None
    ) -> Outcome:
        view = work / "view"
        donors = Donors(
            mirrors=self._mirrors,
            row=row,
            names=[other.name for other in await self._catalog.list_mirrors()],
            templates=self._layout.templates,
            work=work,
            view=view,
            shelf=Shelf(
                self._git,
                self._mirrors.quarantine,
                self._layout.bundles,
                tuple(self._lent),
                row.name,
                work,
                view,
            ),
            progress=progress,
        )
        pinned = {pin.commit for pin in await self._catalog.list_pins(row.name.key)}
        treatment = Treatment(
            git=self._git,
            workers=self._workers,
            name=row.name,
            git_dir=self._mirrors.path(row.name),
            work=work,
            quarantine=self._mirrors.quarantine.root,
            donors=donors,
            recorded=pinned | {recorded.commit for recorded in judged.rows},
            suspects=judged.examined.faults,
            default_branch=row.default_branch,
            record=row.history,
            step=self._step,
            progress=progress,
        )
        return await treatment.perform()


def _ends(audit: Audit) -> dict[str, bool]:
    """Whether a heal of each mirror left something open, as far as this audit can tell: a shallow one does not see all."""
    tried = {repair.mirror: bool(repair.unhealed_count or repair.error) for repair in audit.repairs}
    found = {finding.mirror for finding in audit.findings if not finding.accepted}
    sound = set(audit.mirrors) - found if audit.level is AuditLevel.CONTENT else set[str]()
    return dict.fromkeys(sound, False) | tried


def _told(name: MirrorName, outcome: Outcome) -> Repair:
    return Repair(
        mirror=str(name),
        objects=outcome.objects,
        files=[bad.path for bad in outcome.bad_files],
        kept_in=str(outcome.evidence) if outcome.evidence else None,
        refs=outcome.refs,
        unhealed=sorted(outcome.unhealed)[:100],
        unhealed_count=len(outcome.unhealed),
        history=outcome.history,
        refusals=outcome.refusals,
    )
