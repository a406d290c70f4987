"""How many instances of each dataset can be served: counted after changes, not for each request.

The catalog knows which base commits are pinned; the newest audit of each mirror knows which commits
are damaged or gone. Health quotes no texts of errors, and names no mirrors to strangers.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import anyio

from ..catalog import MirrorRow, Servable
from ..errors import MirrordError
from ..mirrors.service import Mirrors
from ..protocol import Audit, DatasetSummary, Finding, NotReady
from ..telemetry import log
from ..units import counted
from .service import SERVABLE, Audits

D = TypeVar("D", bound=DatasetSummary)

_AUDITS = 5  # recent audits that are searched for the latest findings of each mirror
# health is read by people and by alerts: the worst by name, the rest as a count
_DATASETS_NAMED, _MIRRORS_NAMED = 5, 3
_SUBJECTS = {"dataset", "mirror", "audit", "commits", "pins", "bundle", "refs"}
READY = {Servable.READY, Servable.PARTLY}


class MirrorAudit(NamedTuple):
    """The newest audit of a mirror, with its findings there."""

    audit: Audit
    findings: list[Finding]

    @property
    def open_count(self) -> int:
        return sum(not finding.accepted for finding in self.findings)


async def newest_audits(audits: Audits) -> dict[str, MirrorAudit]:
    """Return the newest audit of each mirror, by mirror key."""
    newest: dict[str, MirrorAudit] = {}
    for audit in await audits.list_audits(_AUDITS):
        of_mirror: dict[str, list[Finding]] = {}
        for finding in audit.findings:
            of_mirror.setdefault(finding.mirror.lower(), []).append(finding)
        for name in audit.mirrors:
            newest.setdefault(name.lower(), MirrorAudit(audit, of_mirror.get(name.lower(), [])))
    return newest


def unservable_commits(newest: Mapping[str, MirrorAudit], *, accepted: bool = False) -> set[str]:
    """Return the commits that audits found unservable; those that [audit] accept lists, or not."""
    return {
        finding.commit
        for audit in newest.values()
        for finding in audit.findings
        if finding.commit and finding.accepted is accepted and finding.state not in SERVABLE
    }


@dataclass(frozen=True, slots=True)
class Unserved:
    """Instances of a dataset that cannot be served: how many of each mirror, and why."""

    dataset: str
    total: int
    mirrors: list[tuple[str, str, int]]

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.mirrors)

    @property
    def summary(self) -> str:
        of = f"{self.count:,} of {counted(self.total, 'instance')}"
        return f"dataset {self.dataset}: {of} cannot be served"

    def __str__(self) -> str:
        named = [f"{name} {count:,} ({why})" for name, why, count in self.mirrors[:_MIRRORS_NAMED]]
        if more := len(self.mirrors) - len(named):
            named.append(f"and {counted(more, 'more mirror')}")
        return f"{self.summary}: {', '.join(named)}"


_MAX_AGE_S = 60.0  # other daemons of a fleet change the catalog without an event here
_PATIENCE_S = 2.0  # health answers with the last count while the catalog is slow


class ReadinessCount:
    """The last count. Belongs to the event loop's thread."""

    def __init__(self, mirrors: Mirrors, audits: Audits) -> None:
        self._catalog, self._events, self._audits = mirrors.catalog, mirrors.events, audits
        self._lock = anyio.Lock()
        self._seen, self._counted_at = -1, 0.0
        self.unserved: list[Unserved] = []
        self._ready: dict[str, int] | None = None  # by dataset; None until the first count

    def reasons(self) -> list[str]:
        """Return why health is degraded: a reason for each dataset, the worst first."""
        reasons = [str(lack) for lack in self.unserved[:_DATASETS_NAMED]]
        if more := len(self.unserved) - len(reasons):
            count = sum(lack.count for lack in self.unserved[_DATASETS_NAMED:])
            reasons.append(f"{counted(more, 'more dataset')}: {count:,} cannot be served")
        return reasons

    def without_mirrors(self, reasons: Iterable[str]) -> list[str]:
        """Return the reasons of a health report as strangers may see them."""
        public = {str(lack): lack.summary for lack in self.unserved}
        return [public.get(reason, reason) for reason in reasons]

    async def refresh(self) -> bool:
        """Count again if something may have changed since; return whether that was done."""
        if self._is_fresh():
            return False
        async with self._lock:
            if self._is_fresh():
                return False
            # before the count: what changes meanwhile is counted again
            seen = self._changes()
            try:
                with anyio.move_on_after(_PATIENCE_S):
                    self.unserved, self._ready = await self._count()
            except MirrordError as error:  # health reports a catalog that cannot be read itself
                log.debug("readiness.uncounted", detail=error.message)
            self._seen, self._counted_at = seen, time.monotonic()
        return True

    def _is_fresh(self) -> bool:
        is_recent = time.monotonic() - self._counted_at < _MAX_AGE_S
        return is_recent and self._seen == self._changes()

    def _changes(self) -> int:
        """Return a number that grows with each event after which a count may differ."""
        counts = self._events.counts.items()
        return sum(count for name, count in counts if name.partition(".")[0] in _SUBJECTS)

    def describe(self, dataset: D) -> D:
        """Return a dataset with the number of its instances that can be checked out."""
        if self._ready is None:
            return dataset
        unserved = next((lack for lack in self.unserved if lack.dataset == dataset.name), None)
        reasons = [
            NotReady(mirror=mirror, reason=reason, count=count)
            for mirror, reason, count in (unserved.mirrors if unserved else ())
        ]
        ready = self._ready.get(dataset.name, 0)
        return replace(dataset, ready_count=ready, not_ready=reasons)

    async def _count(self) -> tuple[list[Unserved], dict[str, int]]:
        newest = await newest_audits(self._audits)
        lost, accepted = unservable_commits(newest), unservable_commits(newest, accepted=True)
        counts = await self._catalog.count_servable(lost, accepted=accepted)
        rows = {row.name.key: row for row in await self._catalog.list_mirrors()}
        ready: Counter[str] = Counter()
        for dataset, _, state, count in counts:
            ready[dataset] += count if state in READY else 0
        unserved = sorted(_unserved(counts, rows), key=lambda lack: (-lack.count, lack.dataset))
        return unserved, dict(ready)


def _unserved(
    counts: Iterable[tuple[str, str, Servable, int]], rows: Mapping[str, MirrorRow]
) -> Iterator[Unserved]:
    """Group what cannot be served by dataset; in each the mirrors with the most come first."""
    totals: dict[str, int] = {}
    missing: dict[str, dict[tuple[str, str], int]] = {}
    for dataset, mirror, state, count in counts:
        totals[dataset] = totals.get(dataset, 0) + count
        if state not in READY:
            why = mirror, _why(state, rows.get(mirror.lower()))
            of_dataset = missing.setdefault(dataset, {})
            of_dataset[why] = of_dataset.get(why, 0) + count
    for dataset, reasons in missing.items():
        worst = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        mirrors = [(name, why, count) for (name, why), count in worst]
        yield Unserved(dataset, totals[dataset], mirrors)


def _why(state: Servable, row: MirrorRow | None) -> str:
    if row is None:
        return "no mirror"
    return str(row.error.get("code", state)) if row.error else str(state)
