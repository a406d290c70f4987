"""What clients of the soak were answered, and how long it took; every code is held against docs/errors.md."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from mirrord.errors import MirrordError

T = TypeVar("T")

_ERRORS = Path(__file__).parents[1] / "docs/errors.md"
_FAULTS = {
    *("internal", "integrity", "commit-unservable", "proof-failed", "corrupt-object"),
    *("git-failed", "deadline-exceeded", "upstream-failed"),
}
"""Documented codes that say that mirrord, or the machine, failed: no client may cause one."""


@cache
def documented() -> dict[str, int]:
    """HTTP statuses by the codes in docs/errors.md."""
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", _ERRORS.read_text(), re.MULTILINE)
    return {code: int(status) for code, status in rows}


@dataclass
class Tally:
    """Seconds and errors by what was asked for, and answers that break a promise. Any thread."""

    taken: dict[str, list[float]] = field(default_factory=dict)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0
    """Of the clients that were at work longest, their start not included."""

    def ask(self, what: str, work: Callable[[], T]) -> T:
        """Do one request, timed. Raises its MirrordError, counted."""
        began = time.perf_counter()
        try:
            answer = work()
        except MirrordError as error:
            self.refuse(what, error.code, error.message)
            raise
        self.note(what, time.perf_counter() - began)
        return answer

    def note(self, what: str, seconds: float) -> None:
        self.taken.setdefault(what, []).append(seconds)

    def refuse(self, what: str, code: str, message: str, status: int | None = None) -> None:
        self.refused[what, code] += 1
        self.examples.setdefault(code, f"{what}: {message}")
        known = documented().get(code)
        if known is None or code in _FAULTS or status not in {None, known}:
            self.broken.append(f"{what}: {status or ''} {code}: {message}")

    def add(self, other: Tally) -> None:
        for what, seconds in other.taken.items():
            self.taken.setdefault(what, []).extend(seconds)
        self.refused += other.refused
        self.examples = other.examples | self.examples
        self.broken += other.broken
        self.elapsed_s = max(self.elapsed_s, other.elapsed_s)
