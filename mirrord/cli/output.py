"""How values look to a human: tables, times, sizes. Columns are never wrapped or cut, so that a pipe gets whole lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a table with aligned columns; numbers to the right. The header is bold on a terminal."""
    cells = [[cell(value) for value in row] for row in rows]
    numeric = [bool(cells) and all(_is_number(row[n]) for row in cells) for n in range(len(header))]
    widths = [max(len(line[n]) for line in [list(header), *cells]) for n in range(len(header))]
    yield _strong(_line(header, widths, numeric))
    for row in cells:
        yield _line(row, widths, numeric)


def facts(pairs: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Lines of `name  value`, without those that are None."""
    shown = [(name, cell(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        yield f"{name.ljust(width)}  {value}"


def cell(value: object) -> str:
    """One value as one line of text that no terminal takes for a command."""
    if value is None or value == "":
        return "-"
    if isinstance(value, datetime):
        return when(value)
    text = str(value)
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )


def when(time: datetime) -> str:
    """A time in the reader's own zone with its offset, to the second: one word that every verb reads back."""
    return time.astimezone().isoformat(timespec="seconds")


def size(count: int | None) -> str:
    """Bytes with three digits and a binary unit."""
    if count is None:
        return "-"
    number, unit = float(count), 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return (
        f"{number:.0f} {_UNITS[unit]}"
        if unit == 0 or number >= 100
        else f"{number:.1f} {_UNITS[unit]}"
    )


def count(number: int, noun: str) -> str:
    """`1 mirror`, `2 mirrors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds(duration: float) -> str:
    """A short duration in the unit that shows three digits."""
    return f"{duration * 1000:.1f} ms" if duration < 1 else f"{duration:.2f} s"


def short(commit: str | None) -> str:
    return commit[:12] if commit else "-"


def _line(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    cells = (
        text.rjust(width) if right else text.ljust(width)
        for text, width, right in zip(row, widths, numeric, strict=True)
    )
    return "  ".join(cells).rstrip()


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(",", "").replace(".", "", 1).isdigit()


def _strong(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() else text
