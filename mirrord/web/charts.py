"""Plots as SVG, made on the server: values over the last day, as lines on a plain or log scale.

Places are shares of the plot, so that it fits any screen while its letters keep their size: lines
are drawn in a nested picture that is stretched, letters and grid are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

_WIDTH, _HEIGHT = 1000, 100  # of the stretched picture
_SHORTEST = timedelta(hours=1)
_BUCKETS = 240


class Point(NamedTuple):
    at: datetime
    value: float | None


class Tick(NamedTuple):
    """`place` is in per cent from the top, or from the left."""

    place: float
    label: str


class Line(NamedTuple):
    """`paths` are the points of each unbroken stretch; `said` is the latest value."""

    name: str
    paths: list[str]
    said: str


class Chart(NamedTuple):
    title: str
    summary: str
    lines: list[Line]
    ticks: list[Tick]
    hours: list[Tick]


def chart(
    title: str,
    lines: dict[str, Sequence[Point]],
    now: datetime,
    told: Callable[[float], str],
    *,
    log: bool = False,
    most: float = 0.0,
) -> Chart:
    """A plot from the first point, or an hour ago, till `now`; `told` writes a value."""
    every = [point for points in lines.values() for point in points]
    begin = min([now - _SHORTEST, *(point.at for point in every[:1])])
    known = [point.value for point in every if point.value is not None]
    low, high = _scale(known, log=log, most=most)
    scaled: Callable[[float], float] = math.log10 if log else float
    span = scaled(high) - scaled(low)

    def place(value: float) -> float:
        return 1 - (scaled(min(max(value, low), high)) - scaled(low)) / span

    drawn = []
    for name, points in lines.items():
        latest = next((p.value for p in reversed(points) if p.value is not None), None)
        paths = list(_paths(points, begin, now, place))
        drawn.append(Line(name, paths, "–" if latest is None else told(latest)))
    values = _decades(low, high) if log else [low, (low + high) / 2, high]
    ticks = [Tick(round(100 * place(value), 2), told(value)) for value in values]
    said = ", ".join(f"{line.name} {line.said}" for line in drawn)
    if known:
        said += f"; highest {told(max(known))}, lowest {told(min(known))}"
    return Chart(title, said, drawn, ticks, _hours(begin, now))


def _scale(known: Sequence[float], *, log: bool, most: float) -> tuple[float, float]:
    if not log:
        return 0.0, max([most, *known]) or 1.0
    low = 10.0 ** math.floor(math.log10(max(min(known, default=0.001), 1e-4)))
    high = 10.0 ** math.ceil(math.log10(max(max(known, default=0.1), 1e-4)))
    return low, max(high, 10 * low)


def _decades(low: float, high: float) -> list[float]:
    return [10.0**n for n in range(round(math.log10(low)), round(math.log10(high)) + 1)]


def _paths(
    points: Sequence[Point], begin: datetime, end: datetime, place: Callable[[float], float]
) -> Iterator[str]:
    """The stretches of points with a value; of several in one bucket the highest."""
    buckets: dict[int, float] = {}
    seen: list[int] = []
    for point in points:
        number = int(_BUCKETS * ((point.at - begin) / (end - begin)))
        seen.append(number)
        if point.value is not None:
            buckets[number] = max(point.value, buckets.get(number, point.value))
    path: list[str] = []
    for number in dict.fromkeys(seen):
        if number in buckets:
            x, y = _WIDTH * number / _BUCKETS, _HEIGHT * place(buckets[number])
            path.append(f"{x:.1f},{y:.1f}")
        elif path:
            yield _visible(path)
            path = []
    if path:
        yield _visible(path)


def _visible(path: list[str]) -> str:
    """A line that begins and ends in one point is drawn as a dot."""
    return " ".join(path if len(path) > 1 else path * 2)


def _hours(begin: datetime, end: datetime) -> list[Tick]:
    """Three times, the first at the left, the last at the right."""
    span = end - begin
    return [Tick(50.0 * n, f"{begin + span * n / 2:%H:%M}") for n in range(3)]
