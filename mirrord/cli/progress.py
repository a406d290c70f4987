"""Waiting for operations of the daemon, with a bar for each where stderr is a terminal."""

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


Watch = Callable[["Progress"], None]


def _ignore(progress: Progress) -> None:
    """Nobody watches."""


@contextmanager
def watching(session: Session, title: str) -> Iterator[Watch]:
    """A bar on a terminal, nothing elsewhere."""
    if session.json or not sys.stderr.isatty():
        yield _ignore
        return
    bars = importlib.import_module(".bars", __package__)  # rich is a terminal's price
    with bars.bar(title) as watch:
        yield watch


def amount(progress: Progress) -> str:
    """`120/3,000 objects note`, as far as it is known."""
    total = f"/{progress.total:,}" if progress.total else ""
    done = f"{progress.done:,}{total} {progress.unit}" if progress.unit else ""
    return f"{done} {progress.note}".strip()


def finish(session: Session, client: Client, operation: Operation) -> Operation:
    """Wait for an operation; raises its error."""
    with _interruptible([operation]):
        return _finish(session, client, operation)


def _finish(session: Session, client: Client, operation: Operation) -> Operation:
    with watching(session, f"{operation.kind} {operation.subject}") as watch:
        return client.wait(operation, progress=lambda found: watch(found.progress))


@contextmanager
def _interruptible(operations: list[Operation]) -> Iterator[None]:
    """Ctrl-C ends the waiting, not the work: say how to come back to it."""
    try:
        yield
    except KeyboardInterrupt:
        for operation in operations:
            waited, cancelled = (
                f"`mirrord operations {verb} {operation.id}`" for verb in ("wait", "cancel")
            )
            print(
                f"operation {operation.id} runs on: {waited} waits for it, {cancelled} ends it",
                file=sys.stderr,
            )
        raise


def finish_all(
    session: Session, client: Client, operations: list[Operation]
) -> tuple[list[Operation], int]:
    """Wait for all, telling each failure; answers all as they ended, and the exit status of the first failure."""
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
