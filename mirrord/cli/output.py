"""Tables, times and sizes as text.

A pipe gets whole cells and times. On a terminal tables fit its width, and times are ages; so the
columns of a table stand in the order in which they are missed.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from ..model import utc_now
from ..protocol import Mirror
from ..quoting import legible, quote_name
from ..units import counted, readable_size, when

T = TypeVar("T")


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, bold: bool | None = None
) -> Iterator[str]:
    """Yield the lines of a table, numbers aligned right; on a terminal the header is bold, long
    cells are cut, but for those of the first column, which is what other verbs take, and last
    columns without room are left out.
    """
    is_bold = sys.stdout.isatty() if bold is None else bold
    cells = [[cell(value) for value in row] for row in rows]

    def is_number(text: str) -> bool:
        return text == "-" or text.replace(",", "").replace(".", "", 1).isdigit()

    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    if is_bold and bold is None:
        widths = _fit(widths, shutil.get_terminal_size().columns)
    columns = range(len(widths))
    numeric = [bool(cells) and all(is_number(row[n]) for row in cells) for n in columns]
    for number, row in enumerate([header, *cells]):
        texts = [cut(row[n], widths[n]) for n in columns]
        aligned = (
            texts[n].rjust(widths[n]) if numeric[n] else texts[n].ljust(widths[n]) for n in columns
        )
        line = "  ".join(aligned).rstrip()
        if number == 0 and len(widths) < len(header):
            line += "  …"
        yield styled(line, "1") if number == 0 and is_bold else line


def styled(text: str, style: str) -> str:
    """Return text with an ANSI style, on a terminal whose user wants it: NO_COLOR turns it off."""
    is_wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[{style}m{text}\x1b[0m" if is_wanted else text


_CELL_MIN = 11  # a cell is not cut below: the longest age, `in 23h 59m`, stays whole
_MORE = len("  …")  # ends the header if columns are left out


def _fit(widths: list[int], terminal: int) -> list[int]:
    """Return widths at which a row has room, of as many columns as have, the widest cut first."""
    least = [widths[0], *(min(width, _CELL_MIN) for width in widths[1:])]
    shown = len(widths)
    while shown > 1 and _row(least[:shown]) > terminal - _MORE * (shown < len(widths)):
        shown -= 1
    fitted = list(widths[:shown])
    while shown > 1 and _row(fitted) > terminal - _MORE * (shown < len(widths)):
        fitted[max(range(1, shown), key=fitted.__getitem__)] -= 1
    return fitted


def _row(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"[:width]


def listing(items: Iterable[T], columns: str, **computed: Callable[[T], object]) -> Iterator[str]:
    """Yield a table of messages.

    A word of `columns` is a column: `NAME` shows the member `name`, `OLD_ID=commit:short` has the
    header OLD ID. Values of the columns in `computed` are computed.
    """
    words = [word.partition("=") for word in columns.split()]
    readers = [
        computed.get(name) or partial(_member, path=path or name.lower()) for name, _, path in words
    ]
    header = [name.replace("_", " ") for name, _, _ in words]
    return table(header, [[read(item) for read in readers] for item in items])


def facts_of(item: object, names: str, **computed: object) -> Iterator[str]:
    """Yield facts about a message; `names` and `computed` are as the columns of `listing`."""
    words = [word.partition("=") for word in names.split()]
    return facts(
        (
            name.replace("_", " "),
            computed[name] if name in computed else _member(item, path or name),
        )
        for name, _, path in words
    )


def _member(item: object, path: str) -> object:
    """Return a member as text shows it; paths are `error.detail`, `mirrors:count`, `ref:name`."""
    names, _, form = path.partition(":")
    value: Any = item
    for name in names.split("."):
        value = None if value is None else getattr(value, name)
    if form == "name" and value is not None:
        return quote_name(value)
    if form == "short":
        return short(value)
    if form == "count":
        return len(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or None
    return size(value) if names.endswith("_bytes") else value


def facts(pairs: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Yield lines of `name  value`, without values that are None."""
    shown = [(name, cell(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        yield f"{name.ljust(width)}  {value}"


def cell(value: object) -> str:
    """Return a value as one line, with control characters escaped."""
    if value is None or value == "":
        return "-"
    return legible(moment(value) if isinstance(value, datetime) else str(value))


def moment(time: datetime) -> str:
    """Return a time as people read it: on a terminal how long ago it was, else as `when`."""
    if not sys.stdout.isatty():
        return when(time)
    passed = utc_now() - time
    return f"{ago(passed)} ago" if passed >= timedelta() else f"in {ago(-passed)}"


def size(count: int | None) -> str:
    return "-" if count is None else readable_size(count)


count = counted


def problem_of(mirror: Mirror) -> str | None:
    """Return the error code of a mirror's last sync, or how many refs were not taken."""
    if mirror.error:
        return mirror.error.code
    return f"{count(len(mirror.ref_faults), 'ref')} not taken" if mirror.ref_faults else None


# seconds of each unit, largest first
_LENGTHS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def ago(duration: timedelta) -> str:
    """Return a duration in its two largest units, such as 3h 12m."""
    left, parts = int(duration.total_seconds()), list[str]()
    for unit, length in _LENGTHS.items():
        number, left = divmod(left, length)
        if number or parts:
            parts.append(f"{number}{unit}")
    return " ".join(parts[:2]) or "0s"


def seconds(duration: float) -> str:
    """Return a duration in ms below a second, else in s."""
    return f"{duration * 1000:.1f} ms" if duration < 1 else f"{duration:.2f} s"


def short(commit: str | None) -> str:
    """Return 12 digits of a full commit id; other names, such as a branch, stay whole."""
    return (commit[:12] if len(commit) == 40 else commit) if commit else "-"
