"""Wait for operations of the daemon, with a bar for each where stderr is a terminal."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ..errors import MirrordError, OperationNotFoundError
from .session import Session

if TYPE_CHECKING:
    from .. import Client
    from ..protocol import Operation, Progress


@contextmanager
def watching(session: Session, title: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, nothing elsewhere; yields the function that takes progress."""
    if session.json or not sys.stderr.isatty():
        yield lambda progress: None
        return
    rich = importlib.import_module("rich.progress")  # 60 ms that only a terminal pays
    console = importlib.import_module("rich.console").Console(stderr=True)
    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.TextColumn("{task.fields[units]}", markup=False),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as display:
        task = display.add_task(title, total=None, units="")
        yield lambda progress: display.update(
            task, completed=progress.done, total=progress.total or None, units=amount(progress)
        )


def amount(progress: Progress) -> str:
    """`120/3,000 objects note`, as far as it is known."""
    total = f"/{progress.total:,}" if progress.total else ""
    done = f"{progress.done:,}{total} {progress.unit}" if progress.unit else ""
    return f"{done} {progress.note}".strip()


def finish(session: Session, client: Client, operation: Operation) -> Operation:
    """Wait for an operation; raises its error."""
    with _interruptible([operation]):
        return _finish(session, client, operation)


def finish_all(
    session: Session, client: Client, operations: list[Operation]
) -> tuple[list[Operation], int]:
    """Wait for all; returns all as they ended, and the exit status of the first failure."""
    ended, status = [], 0
    left = list(operations)
    with _interruptible(left):
        while left:
            try:
                ended.append(_finish(session, client, left[0]))
            except MirrordError as error:
                session.fail(error)
                status = status or error.exit_status
                with suppress(OperationNotFoundError):  # the daemon was restarted
                    ended.append(client.get_operation(left[0].id))
            del left[0]
    return ended, status


def _finish(session: Session, client: Client, operation: Operation) -> Operation:
    with watching(session, f"{operation.kind} {operation.subject}") as watch:
        return client.wait(operation, progress=lambda found: watch(found.progress))


@contextmanager
def _interruptible(operations: list[Operation]) -> Iterator[None]:
    """Ctrl-C ends the waiting, not the work: print how to come back to it."""
    try:
        yield
    except KeyboardInterrupt:
        for id_ in (operation.id for operation in operations):
            again = f"`mirrord operations wait {id_}` waits for it"
            end = f"`mirrord operations cancel {id_}` ends it"
            print(f"operation {id_} continues: {again}, {end}", file=sys.stderr)
        raise
