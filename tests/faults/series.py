"""One fault after the other on the same lab, and what is asked after each.

After a fault that a lab did not survive there is a new one. The whole judgement is made right after the fault; that the operation
then works again is proven by its own end, and once for all of them by the judgement that ends the series.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from .judge import audit_is_clean, judge, leftovers, nothing_left, nothing_lost
from .lab import Lab, laboratory
from .operation import Operation
from .plan import told
from .report import NOTHING, Row

_MENDS_S = 30.0


class Strike(NamedTuple):
    """One fault to come; the first three are its row where it goes wrong."""

    fault: str
    operation: str
    step: str
    strike: Callable[[Lab], Row]


def in_series(
    strikes: Iterable[Strike], lab_of: Callable[[], AbstractContextManager[Lab]] = laboratory
) -> Iterator[Row]:
    """Rows as they come."""
    pending = deque(strikes)
    while pending:
        with lab_of() as lab:
            last = None
            while pending and (last is None or last.lost == NOTHING):
                fault, operation, step, strike = pending.popleft()
                last = told(fault, operation, step, partial(strike, lab))
                yield last
            if last and last.lost == NOTHING:
                end = told(last.fault, last.operation, "after all of them", partial(_judged, lab))
                yield from [end] if end.lost != NOTHING else []


def must_mend_itself(lab: Lab, operation: Operation) -> None:
    """Judge what a fault left while the daemon lives on: what it owes, it tries again every few seconds."""
    deadline = time.monotonic() + _MENDS_S
    while lab.is_up:
        try:
            _judge_alive(lab, operation)
        except (AssertionError, FileNotFoundError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
        else:
            return


def _judge_alive(lab: Lab, operation: Operation) -> None:
    left = leftovers(lab.state)
    assert not left, f"left behind, and the daemon lives: {left[:5]}"
    if operation.is_sound(operation.outcome()):
        nothing_lost(lab)
        audit_is_clean(lab, "closure")


def end_of(lab: Lab, operation: Operation) -> str:
    """Judge what a fault left, do the operation again, and answer which state it was."""
    outcome = operation.outcome()
    is_sound = operation.is_sound(outcome)
    nothing_left(lab)
    if is_sound:
        judge(lab)
    operation.settle()
    nothing_left(lab)
    if not is_sound:
        judge(lab)
    operation.clean()
    return outcome


def _judged(lab: Lab) -> Row:
    judge(lab)
    return Row("", "", "", "")
