"""One mirror in an audit: looked at in a worker, healed where asked, looked at again before it is said to be in order.

Reads only, but for what it hands to the repairer and the scrubber it was given. Remembers what kept the recorded commits of each
mirror alive, for as long as its refs stay the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

from ..catalog.catalog import Catalog
from ..git.workers import Workers
from ..jobs.events import Events
from ..mirrors.pins import stands_alone
from ..mirrors.service import Mirrors
from ..model import AuditLevel, CommitId, CommitState, MirrorName, Reach
from ..protocol import AuditPart, Progress, Repair
from .closures import Verdict
from .examine import Examined, examine
from .reach import Reached
from .report import Judged, is_sound, part_of

_TIMEOUT = timedelta(hours=12)

ProgressSink = Callable[[Progress], None]
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
    ) -> None:
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
        bad = [oid for oid, verdict in first.examined.verdicts.items() if verdict.state is not CommitState.OK]
        now = again.examined.verdicts
        healed = {oid for oid in bad if oid in now and now[oid].state is CommitState.OK}
        judged = replace(again, healed=len(healed), repair=repaired)
        if is_sound(judged):
            self._events.publish("mirror.healed", mirror=str(first.name), commits=len(healed), of=len(bad))
        return judged

    async def _look(self, name: MirrorName, dataset: str | None, level: AuditLevel) -> Judged:
        """What is recorded is read at each look: an audit may take hours, and datasets come and go meanwhile."""
        path = self._mirrors.path(name)
        rows = await self._catalog.list_recorded(name.key, dataset)
        pins = [pin for pin in await self._catalog.list_pins(name.key) if stands_alone(pin)]
        commits = sorted({row.commit for row in rows} | {pin.commit for pin in pins if not dataset})
        if not path.exists():
            return Judged(name, rows, _not_mirrored(name, commits))
        owned = [f"{pin.owner}/{pin.commit}" for pin in pins]
        known = self._reached.get(name.key)
        examined = await self._workers.call(examine, path, commits, level, owned, known, timeout=_TIMEOUT)
        self._reached[name.key] = examined.reached
        return Judged(name, rows, examined)


def _not_mirrored(name: MirrorName, commits: Collection[CommitId]) -> Examined:
    absent = Verdict(CommitState.NOT_MIRRORED, detail=f"there is no mirror {name}, or it was never synced")
    return Examined(dict.fromkeys(commits, absent), Reached("", dict.fromkeys(commits, Reach.NOTHING)))
