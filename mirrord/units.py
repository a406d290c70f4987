"""Durations and sizes as people write them, such as `1h30m` and `50GiB`, and pauses that double.

Pure. The parsers raise ValueError with half a sentence.
"""

import random
import re
from collections.abc import Callable
from datetime import timedelta

from .model import shown

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d|w))+", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)
_LONGEST = timedelta(days=3660)
_BYTES = {
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("kMGT", 1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)},
}
_LARGEST = 1 << 63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.ASCII)


def parse_duration(value: object) -> timedelta:
    """Read `90s`, `10m`, `1h30m`, `7d`; `0` is none at all."""
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


def format_duration(value: timedelta) -> str:
    """The shortest single-unit spelling that `parse_duration` reads back."""
    milliseconds = round(value.total_seconds() * 1000)
    for unit in ("w", "d", "h", "m", "s", "ms"):
        size = round(_SECONDS[unit] * 1000)
        if milliseconds and milliseconds % size == 0 and (unit != "w" or milliseconds > 4 * size):
            return f"{milliseconds // size}{unit}"
    return "0"


def parse_size(value: object) -> int:
    """Read `512MiB` or `50GB` as bytes; a whole number is bytes."""
    if type(value) is int and 0 <= value < _LARGEST:
        return value
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if not found or not isinstance(value, str):
        raise ValueError(
            f"{shown(str(value))} is not a size; "
            "write a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    size = float(found[1]) * _BYTES[found[2]]
    if size >= _LARGEST:
        raise ValueError(f"{shown(value)} is more than any disk")
    return int(size)


def format_size(value: int) -> str:
    """The largest binary unit that divides it, or plain bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _BYTES[unit] == 0:
            return f"{value // _BYTES[unit]}{unit}"
    return f"{value}B"


def three_digits(size: float) -> str:
    """Bytes for people to read, in a binary unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.{0 if units[0] == 'B' or size >= 100 else 1}f} {units[0]}"


def counted(number: int, noun: str) -> str:
    """`1 mirror`, `2 mirrors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class Backoff:
    """The pauses between tries: from `first` each doubles, up to `longest`.

    With `spread`, each is longer or shorter by up to that share, so that clients come apart.
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
        """Count a failure; answers how long to wait before the next try."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return pause * (1 + self._spread * (2 * self._chance() - 1))

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._pause = self._first
