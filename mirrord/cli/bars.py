"""A progress bar on stderr, drawn by rich. Loaded only where there is a terminal to draw on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Display

from .progress import amount

if TYPE_CHECKING:
    from ..protocol import Progress

_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    TextColumn("{task.fields[units]}", markup=False),
    TimeElapsedColumn(),
)


@contextmanager
def bar(title: str) -> Iterator[Callable[[Progress], None]]:
    """One bar that is gone when the work is done; it swings while the total is unknown."""
    with Display(*_COLUMNS, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(escape(title), total=None, units="")

        def show(progress: Progress) -> None:
            display.update(
                task, completed=progress.done, total=progress.total or None, units=amount(progress)
            )

        yield show
