"""Wait for operations, with a line of progress on a terminal; and exit as their verbs do."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

from ..errors import IntegrityError, MirrordError, NotFoundError, ResourceError, from_problem
from ..protocol import (
    RESULTS,
    Answer,
    Audit,
    BuildReport,
    DatasetImported,
    Operation,
    Prewarmed,
    Progress,
    Restored,
)
from ..quoting import legible
from .output import ago, cut, listing
from .session import Session

A = TypeVar("A", bound=Answer)


_DRAWN_EVERY_S = 0.1  # nobody sees more, and a terminal over ssh is slow
_TITLE_MIN = 20


@contextmanager
def watching(session: Session, title: str) -> Iterator[Callable[[Progress], None]]:
    """Show a line of progress if stderr is a terminal; yields the function that updates it."""
    if session.json or session.quiet or not sys.stderr.isatty():
        yield lambda progress: None
        return
    began, drawn = time.monotonic(), 0.0

    def draw(progress: Progress) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn >= _DRAWN_EVERY_S:
            drawn = now
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = progress_line(title, progress, now - began, width - 1)
            print(f"{session.erase}{line}", end="", file=sys.stderr, flush=True)

    # the cursor to the first column, and what is behind it erased (ECMA-48)
    session.erase = "\r\x1b[K"
    draw(Progress())
    try:
        yield draw
    finally:
        print(session.erase, end="", file=sys.stderr, flush=True)
        session.erase = ""


def progress_line(title: str, progress: Progress, passed_s: float, width: int) -> str:
    """Return name, bar, amount, rate, and the time passed and left; name and note are cut first."""
    bar = rate = left = ""
    if progress.total:
        size = width // 5
        full = size * min(progress.done, progress.total) // progress.total
        bar = f"{'━' * full}{'─' * (size - full)}"
    if progress.done and passed_s:
        speed = progress.done / passed_s
        rate = f"{speed:,.1f}/s"
        if progress.total:
            rest_s = max(progress.total - progress.done, 0) / speed
            left = f"{ago(timedelta(seconds=rest_s))} left"
    ends = [part for part in (rate, ago(timedelta(seconds=passed_s)), left) if part]
    room = width - sum(len(part) + 2 for part in [bar, *ends] if part)
    name = cut(legible(title), max(room // 2, _TITLE_MIN))
    done = cut(legible(amount(progress)), max(room - len(name) - 2, 0))
    return cut("  ".join(part for part in (name, bar, done, *ends) if part), width)


def amount(progress: Progress) -> str:
    """Return progress as text, such as `120/3,000 objects NOTE`."""
    total = f"/{progress.total:,}" if progress.total else ""
    done = f"{progress.done:,}{total} {progress.unit}" if progress.unit else ""
    return f"{done} {progress.note}".strip()


def finish(session: Session, operation: Operation) -> Operation:
    """Wait for an operation; raises its error. Ctrl-C ends the wait, not the operation."""
    try:
        with watching(session, f"{operation.kind} {operation.subject}") as watch:
            return session.client.wait(operation, progress=lambda current: watch(current.progress))
    except KeyboardInterrupt:
        _print_running(operation)
        raise


def finish_all(session: Session, operations: list[Operation]) -> tuple[list[Operation], int]:
    """Wait for operations; returns them as they ended, and the exit status of the first failure."""
    ended, status = [], 0
    for number, operation in enumerate(operations, 1):
        try:
            ended.append(finish(session, operation))
        except MirrordError as error:
            session.fail(error)
            status = status or error.exit_status
            with suppress(NotFoundError):  # the daemon was restarted
                ended.append(session.client.get_operation(operation.id))
        except KeyboardInterrupt:
            for other in operations[number:]:
                _print_running(other)
            raise
    return ended, status


def _print_running(operation: Operation) -> None:
    wait, cancel = (f"`mirrord operation {verb} {operation.id}`" for verb in ("wait", "cancel"))
    fact = f"operation {operation.id} is still running: {wait} waits for it, {cancel} cancels it"
    print(fact, file=sys.stderr)


def conclude(
    session: Session,
    operation: Operation,
    no_wait: bool,
    kind: type[A],
    lines_of: Callable[[A], Iterable[str]],
) -> A | None:
    """Answer with an operation, as text with its result; returns the result, None with no_wait."""
    ended = operation if no_wait else finish(session, operation)
    result = None if ended.result is None else kind.from_json(ended.result)
    session.answer(ended, started(ended) if result is None else lines_of(result))
    return result


def started(operation: Operation) -> list[str]:
    return [f"operation {operation.id} {operation.state}"]


def exit_as(result: Answer | None) -> None:
    """Exit as the verb does whose operation ended with this result; go on if all is well."""
    if status := _status_of(result):
        raise SystemExit(status)


def _status_of(result: Answer | None) -> int:
    match result:
        case Restored(failed=[first, *_]):
            return from_problem(first.error.to_json()).exit_status
        case Restored(audit=audit):
            return _status_of(audit)
        case Audit(open_count=number) if number:
            return IntegrityError.exit_status
        case DatasetImported(dataset=dataset) if dataset.unpinned:
            return IntegrityError.exit_status
        case BuildReport(failed=[_, *_]):
            return IntegrityError.exit_status
        case Prewarmed(failed=number) if number:
            return IntegrityError.exit_status
        case Prewarmed(left=number) if number:
            return ResourceError.exit_status
    return 0


def exit_as_verb(ended: Operation) -> None:
    """Exit as the verb does that started an operation."""
    kind = RESULTS.get(ended.kind)
    exit_as(kind.from_json(ended.result) if kind and ended.result is not None else None)


def operation_table(operations: Iterable[Operation]) -> Iterator[str]:
    columns = "OPERATION=id STATE KIND SUBJECT PROGRESS STARTED=started_at"
    return listing(operations, columns, PROGRESS=lambda operation: amount(operation.progress))
