"""Durations and sizes in human form, such as `1h30m` and `50GiB`; exponential back-off.

Pure. The parsers raise ValueError with a reason.
"""

import random
import re
from collections.abc import Callable
from datetime import datetime, timedelta

from .model import shown

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d|w))+", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)
# ten years; more is a slip of the pen
_LONGEST = timedelta(days=3660)
_BYTES = {
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("kMGT", 1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)},
}
# what SQLite's and Linux's signed sizes hold
_LARGEST = 1 << 63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.ASCII)


def parse_duration(value: object) -> timedelta:
    """Parse `90s`, `10m`, `1h30m`, `7d`, `0`."""
    if isinstance(value, timedelta):
        return value
    if value == "0" or (type(value) is int and value == 0):
        return timedelta()
    if not isinstance(value, str) or not _DURATION.fullmatch(value):
        raise ValueError(
            f"{shown(str(value))} is not a duration; "
            "write a number and one of ms, s, m, h, d, w, for example 10m"
        )
    seconds = sum(float(n) * _SECONDS[unit] for n, unit in _DURATION_PART.findall(value))
    if seconds > _LONGEST.total_seconds():
        raise ValueError(f"{shown(value)} is longer than ten years")
    return timedelta(seconds=seconds)


def in_seconds(value: timedelta | float) -> float:
    """Return a duration as seconds; a number is seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def format_duration(value: timedelta) -> str:
    """Format a duration in the largest unit that divides it, so that it parses back."""
    milliseconds = round(value.total_seconds() * 1000)
    for unit in ("w", "d", "h", "m", "s", "ms"):
        size = round(_SECONDS[unit] * 1000)
        # up to four weeks in days: 7d stays as config.toml has it
        if milliseconds and milliseconds % size == 0 and (unit != "w" or milliseconds > 4 * size):
            return f"{milliseconds // size}{unit}"
    return "0"


def parse_size(value: object) -> int:
    """Parse `512MiB` or `50GB`; an integer is bytes."""
    if type(value) is int and 0 <= value < _LARGEST:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if not match or not isinstance(value, str):
        raise ValueError(
            f"{shown(str(value))} is not a size; "
            "write a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    size = float(match[1]) * _BYTES[match[2]]
    if size >= _LARGEST:
        raise ValueError(f"{shown(value)} is more than any disk")
    return int(size)


def format_size(value: int) -> str:
    """Format bytes in the largest binary unit that divides them, so that they parse back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _BYTES[unit] == 0:
            return f"{value // _BYTES[unit]}{unit}"
    return f"{value}B"


def readable_size(size: float) -> str:
    """Format bytes in a binary unit with two or three digits."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.{0 if units[0] == 'B' or size >= 100 else 1}f} {units[0]}"


def when(time: datetime) -> str:
    """Return a local time with its offset, in seconds, as every verb accepts it."""
    return time.astimezone().isoformat(timespec="seconds")


def counted(number: int, noun: str) -> str:
    """Format a count: `1 mirror`, `2 mirrors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class Backoff:
    """Exponential back-off: pauses double from `first` up to `longest`.

    `spread` is the share by which each varies at random, so that clients do not retry together.
    """

    def __init__(
        self,
        first: timedelta,
        longest: timedelta,
        *,
        spread: float = 0.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first, self._longest = first, longest
        self._spread, self._chance = spread, chance
        self._pause = first

    def next(self) -> timedelta:
        """Count a failure; return the pause before the next try."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return pause * (1 + self._spread * (2 * self._chance() - 1))

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._pause = self._first
