"""The end of an agent's turn in one request: diff, grade, snapshot, reset and release."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import errors, model, protocol
from .. import http

if TYPE_CHECKING:
    from .checkout import AsyncCheckout, AsyncGrade


class AsyncEnding(NamedTuple):
    """The end of a turn, to be sent by `Client.turn`; made by `Checkout.ending`."""

    checkout: AsyncCheckout
    request: protocol.Turn


@dataclass(frozen=True, slots=True)
class AsyncFinished:
    """What was done at the end of a turn, and the error of the step that failed.

    `diff_by` and `notes` say what printed the diff, and what no patch records.
    """

    diff: bytes | None
    diff_by: str | None
    notes: list[str]
    grade: AsyncGrade | None
    snapshot: protocol.Snapshot | None
    proof: protocol.Proof | None
    released: bool
    error: errors.MirrordError | None

    @staticmethod
    def of(answer: protocol.TurnAnswer, grade: AsyncGrade | None) -> AsyncFinished:
        return AsyncFinished(
            diff=None if answer.diff is None else b64decode(answer.diff),
            diff_by=answer.diff_by,
            notes=answer.notes,
            grade=grade,
            snapshot=answer.snapshot,
            proof=answer.reset.proof if answer.reset else None,
            released=answer.released,
            error=error_of(answer.problem),
        )


class AsyncBatch(NamedTuple):
    """The answer of `Client.turn`: of each turn what was done, of each checkout it or its error."""

    turns: list[AsyncFinished]
    checkouts: list[AsyncCheckout | errors.MirrordError]


def turn_of(
    checkout: str,
    *,
    diff: bool | model.DiffFormat,
    grade: bool | Mapping[str, Any],
    snapshot: bool | str,
    reset: bool | str | Mapping[str, Any],
    release: bool,
) -> protocol.Turn:
    """Return the request for steps as methods name them; raises InvalidRequestError."""
    members: dict[str, Any] = {"checkout": checkout, "release": release}
    if diff:
        members["diff"] = model.DiffFormat.PATCH if diff is True else diff
    if grade is not False:
        asked = {} if grade is True else dict(grade)
        given: dict[str, Any] = {"policy": http.policy_text(asked.pop("policy", None))}
        given["ttl"] = http.seconds_of(asked.pop("ttl", None))
        members["grade"] = given | asked
    if snapshot:
        members["snapshot"] = {"name": snapshot} if isinstance(snapshot, str) else {}
    if reset is not False:
        to = {"instance": reset} if isinstance(reset, str) else reset
        members["reset"] = {} if to is True else dict(to)
    return http.message(protocol.Turn, **members)


def start_of(wanted: str | protocol.StartCheckout, label: str | None) -> protocol.StartCheckout:
    """Return the request for a checkout that is given as one, or by its instance alone."""
    if isinstance(wanted, str):
        return http.message(protocol.StartCheckout, instance=wanted, label=label)
    return wanted


def error_of(problem: protocol.Problem | None) -> errors.MirrordError | None:
    return errors.from_problem(problem.to_json()) if problem else None
