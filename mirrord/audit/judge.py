"""One mirror in an audit: looked at in a worker, healed where asked, looked at again before it is said to be in order.

Reads only, but for what it hands to the repairer and the scrubber it was given, and for the row of a mirror that git cannot open.
Remembers what kept the recorded commits of each
mirror alive, for as long as its refs stay the same.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

from ..catalog import Catalog
from ..errors import CorruptObjectError, DamagedMirrorError
from ..git.workers import Workers
from ..jobs.events import Events
from ..mirrors.pins import stands_alone
from ..mirrors.repository import PINS
from ..mirrors.service import Mirrors
from ..model import AuditLevel, CommitId, CommitState, FindingKind, MirrorName, Reach
from ..protocol import AuditPart, ProgressSink, Repair
from .closures import Verdict
from .examine import Examined, examine
from .files import Fault, no_directory
from .reach import Reached
from .report import Judged, is_sound, part_of

_TIMEOUT = timedelta(hours=12)
_STOPS_GIT = {FindingKind.LAYOUT, FindingKind.CONFIG, FindingKind.HEAD}

Repairer = Callable[[Judged, ProgressSink | None], Awaitable[Repair]]
Scrubber = Callable[[MirrorName], Awaitable[Mapping[str, str]]]


class Judge:
    """`scrub` proves what checkouts of a mirror are made from; it answers what was damaged, with what becomes of it."""

    def __init__(
        self,
        *,
        mirrors: Mirrors,
        catalog: Catalog,
        workers: Workers,
        events: Events,
        repair: Repairer | None = None,
        scrub: Scrubber | None = None,
        accept: Callable[[], Collection[str]],
    ) -> None:
        self._accept = accept
        self._mirrors = mirrors
        self._catalog = catalog
        self._workers = workers
        self._events = events
        self._repair = repair
        self._scrub = scrub
        self._reached: dict[str, Reached] = {}

    async def judge(
        self,
        name: MirrorName,
        dataset: str | None,
        level: AuditLevel,
        *,
        heal: bool,
        progress: ProgressSink | None,
    ) -> AuditPart:
        """The mirror itself, and the commits that one dataset records, or all do; then also those that persons pinned or that
        outlived a catalog.
        """
        look = partial(self._look, name, dataset)
        judged = await self._judged(look, level, self._repair if heal else None, progress)
        await self._mark(judged)
        stores = await self._scrub(name) if self._scrub and level is AuditLevel.CONTENT else {}
        return part_of(judged, stores)

    async def _judged(
        self,
        look: Callable[[AuditLevel], Awaitable[Judged]],
        level: AuditLevel,
        repair: Repairer | None,
        progress: ProgressSink | None,
    ) -> Judged:
        first = await look(level)
        if repair is None or is_sound(first):
            return first
        repaired = await repair(first, progress)
        again = await look(max(level, AuditLevel.CLOSURE, key=list(AuditLevel).index))
        bad = [
            oid
            for oid, verdict in first.examined.verdicts.items()
            if verdict.state is not CommitState.OK
        ]
        now = again.examined.verdicts
        healed = {oid for oid in bad if oid in now and now[oid].state is CommitState.OK}
        judged = replace(again, healed=len(healed), repair=repaired)
        if is_sound(judged):
            self._events.publish(
                "mirror.healed", mirror=str(first.name), commits=len(healed), of=len(bad)
            )
        return judged

    async def _look(self, name: MirrorName, dataset: str | None, level: AuditLevel) -> Judged:
        """What is recorded is read at each look: an audit may take hours, and datasets come and go meanwhile."""
        path = self._mirrors.path(name)
        mirror = await self._catalog.find_mirror(name.key)
        rows = await self._catalog.list_recorded(name.key, dataset)
        pins = await self._catalog.list_pins(name.key)
        alone = {pin.commit for pin in pins if stands_alone(pin) and not dataset}
        commits = sorted({row.commit for row in rows} | alone)
        record = mirror.history if mirror else None
        accept = tuple(self._accept())
        if not path.is_dir():
            was_there = record or pins or os.path.lexists(path)
            wrong = no_directory(path) if was_there else None
            return Judged(name, rows, _not_mirrored(name, commits, wrong), accept, row=mirror)
        owned = [f"{pin.owner}/{pin.commit}" for pin in pins]
        known = self._reached.get(name.key)
        examined = await self._workers.call(
            examine, path, commits, level, owned, known, record, timeout=_TIMEOUT
        )
        self._reached[name.key] = examined.reached
        examined.faults |= await self._unknown_pins(name, examined.unknown)
        await self._drop_given_up(name, examined.faults)
        return Judged(name, rows, examined, accept, row=mirror)

    async def _mark(self, judged: Judged) -> None:
        """Have the mirror's row say whether git can open it, for who asks without an audit."""
        if judged.row is None:
            return
        faults = sorted(judged.examined.faults.items())
        stops = [
            f"{subject}: {fault.reason}" for subject, fault in faults if fault.kind in _STOPS_GIT
        ]
        if stops:
            fact, hint = (
                f"cannot use mirror {judged.name}: {stops[0]}",
                f"`mirrord heal {judged.name}` repairs it",
            )
            problem = DamagedMirrorError(fact, hint=hint).problem()
            await self._catalog.update_mirror(judged.name.key, error=problem)
        elif (judged.row.error or {}).get("code") in {
            DamagedMirrorError.code,
            CorruptObjectError.code,
        }:
            await self._catalog.update_mirror(judged.name.key, error=None)

    async def _drop_given_up(self, name: MirrorName, faults: dict[str, Fault]) -> None:
        """Pins that were given up since the look began are not lost."""
        lost = {ref for ref, fault in faults.items() if fault.kind is FindingKind.PIN_LOST}
        for ref in lost - (await self._pins(name) if lost else lost):
            del faults[ref]

    async def _pins(self, name: MirrorName) -> set[str]:
        return {
            f"{PINS}{pin.owner}/{pin.commit}" for pin in await self._catalog.list_pins(name.key)
        }

    async def _unknown_pins(self, name: MirrorName, unknown: Collection[str]) -> dict[str, Fault]:
        """Pins without a row in the catalog: their refs are made first, under the mirror's lock, so
        while somebody holds that there is nothing to say.
        """
        if not unknown or self._mirrors.is_busy(name):
            return {}
        said = await self._pins(name)
        there = await self._mirrors.repository(name).all_refs()
        left = sorted(ref for ref in unknown if ref in there and ref not in said)
        return dict.fromkeys(left, Fault(FindingKind.PIN_UNKNOWN, "the catalog does not have it"))


def _not_mirrored(name: MirrorName, commits: Collection[CommitId], wrong: str | None) -> Examined:
    """Nothing can be served; `wrong` says what is where the mirror was."""
    absent = Verdict(
        CommitState.NOT_MIRRORED, detail=f"there is no mirror {name}, or it was never synced"
    )
    reached = Reached("", dict.fromkeys(commits, Reach.NOTHING))
    faults = {"mirror": Fault(FindingKind.LAYOUT, wrong)} if wrong else {}
    return Examined(dict.fromkeys(commits, absent), reached, faults)
