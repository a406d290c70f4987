"""Requests answered since the start, by endpoint: the one histogram of their times, and snapshots.

Metrics show the counts; their differences between snapshots are the latest rates and latencies.
Belongs to the event loop's thread, so that counting a request takes no lock.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
SNAPSHOT_S = 5.0
WINDOW_S = 60.0


class Answered(NamedTuple):
    """Answers by bucket of their time (one more for longer ones), and how many were 5xx."""

    buckets: tuple[int, ...]
    failed: int

    @property
    def total(self) -> int:
        return sum(self.buckets)


class _Snapshot(NamedTuple):
    at: float
    answered: dict[str, Answered]


class Traffic:
    """`answers` counts by endpoint and status, `refusals` by error code what was refused for now.

    `connections` answers the open ones by user; the server sets it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.answers: Counter[tuple[str, int]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.connections: Callable[[], Mapping[int, int]] = dict
        self.buckets: dict[str, list[int]] = {}
        self.sums_s: dict[str, float] = {}
        self._failed: Counter[str] = Counter()
        keep = round(WINDOW_S / SNAPSHOT_S) + 1
        self._snapshots = deque([_Snapshot(clock(), {})], maxlen=keep)

    def observe(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        buckets = self.buckets.get(endpoint)
        if buckets is None:
            buckets = self.buckets[endpoint] = [0] * (len(BUCKETS_S) + 1)
            self.sums_s[endpoint] = 0.0
        buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self.sums_s[endpoint] += seconds
        self.answers[endpoint, status] += 1
        if status >= 500:
            self._failed[endpoint] += 1

    def snapshot(self) -> None:
        """Remember the counts; call it every `SNAPSHOT_S`."""
        self._snapshots.append(_Snapshot(self._clock(), self._now()))

    def latest(self) -> tuple[float, dict[str, Answered]]:
        """What each endpoint answered in the last minute, or as much as there was; its seconds."""
        before, now = self._snapshots[0], self._now()
        found = {}
        for endpoint, answered in now.items():
            past = before.answered.get(endpoint)
            since = _difference(answered, past) if past else answered
            if since.total:
                found[endpoint] = since
        return self._clock() - before.at, found

    def _now(self) -> dict[str, Answered]:
        return {
            endpoint: Answered(tuple(buckets), self._failed[endpoint])
            for endpoint, buckets in self.buckets.items()
        }


def summed(answered: Iterable[Answered]) -> Answered:
    """All of them as one."""
    known = list(answered)
    columns = zip(*(each.buckets for each in known), strict=True)
    buckets = tuple(map(sum, columns)) or (0,) * (len(BUCKETS_S) + 1)
    return Answered(buckets, sum(each.failed for each in known))


def quantile(buckets: Sequence[int], share: float) -> float | None:
    """The time within which this share was answered, as Prometheus' histogram_quantile has it:
    evenly spread within a bucket, and the last bound for what took longer.
    """
    rank, below = share * sum(buckets), 0
    for number, count in enumerate(buckets[:-1]):
        if count and below + count >= rank:
            low = BUCKETS_S[number - 1] if number else 0.0
            return low + (BUCKETS_S[number] - low) * (rank - below) / count
        below += count
    return BUCKETS_S[-1] if buckets[-1] else None


def _difference(now: Answered, past: Answered) -> Answered:
    buckets = tuple(a - b for a, b in zip(now.buckets, past.buckets, strict=True))
    return Answered(buckets, now.failed - past.failed)
