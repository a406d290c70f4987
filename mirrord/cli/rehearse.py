"""`mirrord rehearse`: try every row of a dataset, from its checkout to its reset."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from ..errors import AccessError, MirrordError, NoDaemonError, UsageError
from ..model import View
from ..protocol import Progress
from .operations import watching
from .output import count, seconds, size, table
from .parameters import Argument, Option
from .session import Session, print_line

if TYPE_CHECKING:
    from .. import Checkout, Client

T = TypeVar("T")

_FAILED = 8


class Row(NamedTuple):
    """One instance, as far as it got: the seconds of each step, and the step that failed."""

    instance: str
    seconds: dict[str, float]
    failure: tuple[str, MirrordError] | None
    patch_bytes: int

    @property
    def status(self) -> int:
        """The row's exit status: 8 when it was tried and failed.

        An unknown instance, missing rights or no daemon is no failed row.
        """
        if self.failure is None:
            return 0
        step, error = self.failure
        was_tried = step != "instance" and not isinstance(error, AccessError | NoDaemonError)
        return _FAILED if was_tried else error.exit_status


def rehearse(
    session: Session,
    instances: Annotated[
        list[str] | None, Argument(metavar="[INSTANCE]...", help="Default: all.")
    ] = None,
    dataset: Annotated[str | None, Option(help="All instances of this dataset.")] = None,
) -> None:
    """For each instance: a grader's checkout, test patch, gold patch, diff, reset, release.

    Patches go in the dataset's direction. One line each; status 8 when a row fails, another status
    where it could not be tried.
    """
    client = session.client
    wanted = list(instances or ())
    if dataset or not wanted:
        wanted += [found.id for found in client.list_instances(dataset)]
    if not wanted:
        hint = "import a dataset first, or name instances"
        raise UsageError("cannot rehearse: there are no instances", hint=hint)
    rows = []
    with watching(session, "rehearse") as watch:
        for number, instance in enumerate(wanted):
            watch(Progress(done=number, total=len(wanted), unit="instances", note=instance))
            rows.append(_rehearse(client, instance, dataset))
    _answer(session, rows)
    if statuses := {row.status for row in rows} - {0}:
        raise SystemExit(_FAILED if _FAILED in statuses else min(statuses))


def _rehearse(client: Client, instance: str, dataset: str | None) -> Row:
    """The first failure ends the row, because each step needs those before it."""
    took: dict[str, float] = {}
    failures: list[tuple[str, MirrordError]] = []

    def timed(name: str, work: Callable[..., T], *args: Any, **options: Any) -> T:
        began = time.perf_counter()
        try:
            return work(*args, **options)
        except MirrordError as error:
            failures.append((name, error))
            raise
        finally:
            took[name] = time.perf_counter() - began

    known: dict[str, Any] = {"view": View.GRADER, "dataset": dataset}
    checkout: Checkout | None = None
    patch = b""
    with suppress(MirrordError):  # `failures` has it
        row = timed("instance", client.get_instance, instance, **known)
        checkout = timed("checkout", client.checkout, instance, **known)
        if row.test_patch:
            timed("@test_patch", checkout.apply, "@test_patch")
        if row.patch:
            timed("@patch", checkout.apply, "@patch")
        patch = timed("diff", checkout.diff)
        timed("reset", checkout.reset)
    if checkout is not None:
        with suppress(MirrordError):
            timed("release", checkout.release)
    return Row(instance, took, next(iter(failures), None), len(patch))


def _answer(session: Session, rows: list[Row]) -> None:
    answers: list[dict[str, Any]] = []
    cells = []
    for row in rows:
        step, error = row.failure or (None, None)
        took = {name: seconds(duration) for name, duration in row.seconds.items()}
        why = f"{step}: {error.message}" if error else None
        times = (took.get("checkout"), took.get("reset"), size(row.patch_bytes))
        cells.append((row.instance, "failed" if error else "ok", *times, why))
        answer: dict[str, Any] = {"instance": row.instance, "ok": error is None}
        answer["seconds"] = {name: round(duration, 6) for name, duration in row.seconds.items()}
        answer |= {"diff_bytes": row.patch_bytes, "failed_step": step}
        answers.append({**answer, "error": error.problem() if error else None})
    if session.json:
        session.print_json(answers)
        return
    for line in table(("INSTANCE", "RESULT", "CHECKOUT", "RESET", "PATCH", "WHY"), cells):
        print_line(line)
    failed = sum(row.failure is not None for row in rows)
    print_line(f"{count(len(rows), 'instance')} rehearsed, {failed or 'none'} failed")
