"""What a run of the suite tries: parts, each with a name, that yield rows. One seed makes all of them repeatable."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .report import Row


@dataclass(frozen=True)
class Plan:
    """What one part is asked for. `share` is how much of it, from 0 to 1; `crowd_s` is how long a crowd works."""

    seed: int
    share: float = 1.0
    crowd_s: float = 180.0

    def choices(self, part: str) -> random.Random:
        """The same for the same part, whatever else is run."""
        return random.Random(f"{self.seed} {part}")

    def some(self, count: int) -> int:
        """So many of `count`, and at least one."""
        return max(1, round(count * self.share))


class Part(NamedTuple):
    """Its name is what `--only` is looked for in, and stands for the operation where something went wrong outside of a row."""

    name: str
    rows: Callable[[Plan], Iterator[Row]]


def told(fault: str, operation: str, step: str, strike: Callable[[], Row]) -> Row:
    """What went wrong becomes a row too."""
    try:
        return strike()
    except Exception as error:
        return Row(fault, operation, step, "", what_went_wrong(error))


def what_went_wrong(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[-600:].replace("|", "/")
