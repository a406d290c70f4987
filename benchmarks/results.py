"""What a run of the bench comes to: comparisons and figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Row:
    """One comparison. Times are seconds of each round; `goal` is the ratio theirs/ours to reach, `most_ms` the median."""

    work: str
    against: str
    goal: float | None = None
    most_ms: float | None = None
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.theirs) / statistics.median(self.ours)


@dataclass
class Figure:
    """A number that is not a comparison of times."""

    name: str
    value: float
    unit: str
    goal: str = ""


@dataclass
class Growth:
    """A cost for a tenth of something, and for all of it. `most` is the goal for all of it."""

    what: str
    tenth: float
    whole: float
    unit: str
    most: float | None = None


@dataclass
class Latency:
    """How long something took that many did at once."""

    what: str
    count: int
    p50_ms: float
    p99_ms: float
    longest_ms: float

    @classmethod
    def of(cls, what: str, seconds: list[float]) -> Self:
        taken = sorted(seconds)
        p50, p99, longest = (
            1000 * taken[min(int(len(taken) * part), len(taken) - 1)] for part in (0.5, 0.99, 1)
        )
        return cls(what, len(taken), p50, p99, longest)
