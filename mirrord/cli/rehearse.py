"""`mirrord rehearse`: does every row of a dataset work, from its checkout to its reset?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from ..errors import AccessError, MirrordError, NoDaemonError, UsageError
from ..model import Direction, View
from ..protocol import Instance, Progress
from .output import count, seconds, size, table
from .parameters import Argument, Option
from .progress import watching
from .session import Session, print_line

if TYPE_CHECKING:
    from .. import Checkout, Client

T = TypeVar("T")

_FAILED = 8


class Step(NamedTuple):
    """One step of a rehearsal: the seconds it took, or why it failed."""

    name: str
    seconds: float
    error: MirrordError | None = None


class Row(NamedTuple):
    """One instance, as far as it got."""

    instance: str
    steps: list[Step]
    patch_bytes: int = 0

    @property
    def failure(self) -> Step | None:
        return next((step for step in self.steps if step.error), None)

    @property
    def status(self) -> int:
        """What it means for the exit status: an instance that nobody knows or may see, or a missing daemon, is no failed row."""
        failure = self.failure
        if failure is None or failure.error is None:
            return 0
        was_tried = failure.name != "instance" and not isinstance(
            failure.error, AccessError | NoDaemonError
        )
        return _FAILED if was_tried else failure.error.exit_status


def rehearse(
    session: Session,
    instances: Annotated[
        list[str] | None, Argument(metavar="[INSTANCE]...", help="Which; default: all.")
    ] = None,
    dataset: Annotated[str | None, Option(help="All instances of this dataset.")] = None,
) -> None:
    """For each instance: a checkout for a grader, the test patch and the gold patch in the dataset's direction, the diff, a
    reset, the release. One line each; status 8 when a row fails, another where it could not be tried."""
    with session.client() as client:
        wanted = list(instances or ())
        if dataset or not wanted:
            wanted += [found.id for found in client.list_instances(dataset)]
        if not wanted:
            raise UsageError(
                "cannot rehearse: there are no instances",
                hint="import a dataset first, or name instances",
            )
        rows = list(_rehearsed(session, client, wanted, dataset))
    _answer(session, rows)
    if statuses := {row.status for row in rows} - {0}:
        raise SystemExit(_FAILED if _FAILED in statuses else min(statuses))


def _rehearsed(
    session: Session, client: Client, instances: list[str], dataset: str | None
) -> Iterator[Row]:
    with watching(session, "rehearse") as watch:
        for number, instance in enumerate(instances):
            watch(Progress(done=number, total=len(instances), unit="instances", note=instance))
            yield _rehearse(client, instance, dataset)


def _rehearse(client: Client, instance: str, dataset: str | None) -> Row:
    """Each step needs those before it, so the first failure ends the row; the checkout is released all the same."""
    steps: list[Step] = []
    checkout: Checkout | None = None
    patch = b""
    with suppress(MirrordError):  # the last step holds it
        row = _timed(
            steps,
            "instance",
            partial(client.get_instance, instance, view=View.GRADER, dataset=dataset),
        )
        checkout = _timed(
            steps, "checkout", partial(client.checkout, instance, view=View.GRADER, dataset=dataset)
        )
        for name, reverse in _patches(row):
            _timed(steps, name, partial(checkout.apply, name, reverse=reverse))
        patch = _timed(steps, "diff", checkout.diff)
        _timed(steps, "reset", checkout.reset)
    return Row(instance, [*steps, *_released(checkout)], len(patch))


def _patches(row: Instance) -> list[tuple[str, bool]]:
    """The patches of a row and whether each is taken out: a patch that introduces the bug is the reverse of the gold patch."""
    found = [("@test_patch", False)] if row.test_patch else []
    return [*found, ("@patch", row.direction is Direction.REVERSE)] if row.patch else found


def _released(checkout: Checkout | None) -> list[Step]:
    if checkout is None:
        return []
    steps: list[Step] = []
    with suppress(MirrordError):  # the step holds it
        _timed(steps, "release", checkout.release)
    return steps


def _timed(steps: list[Step], name: str, work: Callable[[], T]) -> T:
    began = time.perf_counter()
    try:
        result = work()
    except MirrordError as error:
        steps.append(Step(name, time.perf_counter() - began, error))
        raise
    steps.append(Step(name, time.perf_counter() - began))
    return result


def _answer(session: Session, rows: list[Row]) -> None:
    if session.json:
        session.print_json([_plain(row) for row in rows])
        return
    for line in table(
        ("INSTANCE", "RESULT", "CHECKOUT", "RESET", "PATCH", "WHY"), [_cells(row) for row in rows]
    ):
        print_line(line)
    failed = sum(1 for row in rows if row.failure)
    print_line(f"{count(len(rows), 'instance')} rehearsed, {failed or 'none'} failed")


def _plain(row: Row) -> dict[str, Any]:
    failure = row.failure
    return {
        "instance": row.instance,
        "ok": failure is None,
        "seconds": {step.name: round(step.seconds, 6) for step in row.steps},
        "diff_bytes": row.patch_bytes,
        "failed_step": failure.name if failure else None,
        "error": failure.error.problem() if failure and failure.error else None,
    }


def _cells(row: Row) -> tuple[object, ...]:
    took = {step.name: seconds(step.seconds) for step in row.steps}
    failure = row.failure
    why = f"{failure.name}: {failure.error.message}" if failure and failure.error else None
    return (
        row.instance,
        "failed" if failure else "ok",
        took.get("checkout"),
        took.get("reset"),
        size(row.patch_bytes),
        why,
    )
