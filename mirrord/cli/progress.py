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


def finish(session: Session, client: Client, operation: Operation) -> Operation:
    """Wait for an operation; raises its error. Interrupted, it says that the daemon goes on."""
    title = f"{operation.kind} {operation.subject}"
    try:
        with watching(session, title) as watch:
            return client.wait(operation, progress=lambda found: watch(found.progress))
    except KeyboardInterrupt:
        session.note(f"the daemon goes on with operation {operation.id}")
        raise


def finish_all(session: Session, client: Client, operations: list[Operation]) -> tuple[list[Operation], int]:
    """Wait for all, telling each failure; answers all as they ended, and the exit status of the first failure."""
    ended, status = [], 0
    for operation in operations:
        try:
            ended.append(finish(session, client, operation))
        except MirrordError as error:
            session.fail(error)
            status = status or error.exit_status
            with suppress(OperationNotFoundError):  # the daemon was restarted
                ended.append(client.get_operation(operation.id))
    return ended, status
