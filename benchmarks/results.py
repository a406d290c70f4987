"""What a run of the bench comes to: comparisons and figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Row:
    """One comparison. Times are seconds of each round; `goal` is the ratio theirs/ours to reach."""

    work: str
    against: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    goal: float | None = None

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
