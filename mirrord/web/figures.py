"""Values for people: sizes, durations, users, and plots of the last day as SVG coordinates.

Positions in a plot are shares of its size, so that it fits any screen while its text keeps its
size: lines are drawn in a nested SVG that is stretched; text and grid are not.
"""

import math
import pwd
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

from ..units import readable_size


# a name service on the network may take a second for each
@lru_cache(maxsize=1024)
def owner(uid: int) -> str:
    """Return a user's name, or its uid. Blocks if names come from a network."""
    try:
        return pwd.getpwuid(uid).pw_name
    # OverflowError: more than the 32 bits of a uid_t
    except (KeyError, OverflowError):
        return f"uid {uid}"


def size(count: float | None) -> str:
    return "–" if count is None else readable_size(count)


def duration(seconds: float) -> str:
    """Return an age in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def seconds(value: float | None) -> str:
    """Return a latency with three digits."""
    if value is None:
        return "–"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


class Point(NamedTuple):
    at: datetime
    value: float | None


class Tick(NamedTuple):
    """A label of an axis. `position` is in per cent from the top or from the left."""

    position: float
    label: str


class Line(NamedTuple):
    """A line of a plot. `paths` are its unbroken parts, `latest` is the text of its last value."""

    name: str
    paths: list[str]
    latest: str


class Chart(NamedTuple):
    title: str
    summary: str
    lines: list[Line]
    ticks: list[Tick]
    hours: list[Tick]


# a chart of a daemon that has just started
_SHORTEST = timedelta(hours=1)


def chart(
    title: str,
    lines: dict[str, Sequence[Point]],
    now: datetime,
    format_value: Callable[[float], str],
    *,
    log: bool = False,
    most: float = 0.0,
) -> Chart:
    """Plot lines from their first point, or an hour ago, to `now`.

    `log` selects a logarithmic scale; a linear one extends at least to `most`.
    """
    points = [point for line in lines.values() for point in line]
    begin = min([now - _SHORTEST, *(point.at for point in points[:1])])
    values = [point.value for point in points if point.value is not None]
    low, high = _bounds(values, log=log, most=most)
    scaled: Callable[[float], float] = math.log10 if log else float
    span = scaled(high) - scaled(low)

    def position(value: float) -> float:
        return 1 - (scaled(min(max(value, low), high)) - scaled(low)) / span

    drawn = []
    for name, line in lines.items():
        latest = next((p.value for p in reversed(line) if p.value is not None), None)
        paths = list(_iter_paths(line, begin, now, position))
        drawn.append(Line(name, paths, "–" if latest is None else format_value(latest)))
    labels = _decades(low, high) if log else [low, (low + high) / 2, high]
    ticks = [Tick(round(100 * position(value), 2), format_value(value)) for value in labels]
    summary = ", ".join(f"{line.name} {line.latest}" for line in drawn)
    if values:
        summary += f"; highest {format_value(max(values))}, lowest {format_value(min(values))}"
    hours = [Tick(50.0 * n, f"{begin + (now - begin) * n / 2:%H:%M}") for n in range(3)]
    return Chart(title, summary, drawn, ticks, hours)


def _bounds(values: Sequence[float], *, log: bool, most: float) -> tuple[float, float]:
    if not log:
        return 0.0, max([most, *values]) or 1.0
    # zero has no logarithm; 0.1 ms is below every bucket of response times
    low = 10.0 ** math.floor(math.log10(max(min(values, default=0.001), 1e-4)))
    high = 10.0 ** math.ceil(math.log10(max(max(values, default=0.1), 1e-4)))
    return low, max(high, 10 * low)


def _decades(low: float, high: float) -> list[float]:
    return [10.0**n for n in range(round(math.log10(low)), round(math.log10(high)) + 1)]


# of a chart's width: a day of points, one for every six minutes
_BUCKETS = 240


_WIDTH, _HEIGHT = 1000, 100  # of the stretched SVG


def _iter_paths(
    points: Sequence[Point], begin: datetime, end: datetime, position: Callable[[float], float]
) -> Iterator[str]:
    """Yield the unbroken parts of a line. Of several points in a bucket the highest counts."""
    highest: dict[int, float | None] = {}
    for point in points:
        bucket = int(_BUCKETS * ((point.at - begin) / (end - begin)))
        values = [v for v in (highest.get(bucket), point.value) if v is not None]
        highest[bucket] = max(values, default=None)
    path: list[str] = []
    for bucket, value in highest.items():
        if value is not None:
            path.append(f"{_WIDTH * bucket / _BUCKETS:.1f},{_HEIGHT * position(value):.1f}")
        elif path:
            yield _polyline(path)
            path = []
    if path:
        yield _polyline(path)


def _polyline(path: list[str]) -> str:
    """Repeat a single point: a line of no length is drawn as a dot."""
    return " ".join(path if len(path) > 1 else path * 2)
