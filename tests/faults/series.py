"""One fault after the other on the same lab, and what is asked after each.

After a fault that a lab did not survive there is a new one. The whole judgement is made right after the fault; that the operation
then works again is proven by its own end, and once for all of them by the judgement that ends the series.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from .judge import judge, nothing_left
from .lab import Lab, laboratory
from .operation import Operation
from .plan import told
from .report import NOTHING, Row


class Strike(NamedTuple):
    """One fault to come; the first three are its row where it goes wrong."""

    fault: str
    operation: str
    step: str
    strike: Callable[[Lab], Row]


def in_series(strikes: Iterable[Strike], lab_of: Callable[[], AbstractContextManager[Lab]] = laboratory) -> Iterator[Row]:
    """Rows as they come."""
    pending = deque(strikes)
    while pending:
        with lab_of() as lab:
            last = None
            while pending and (last is None or last.lost == NOTHING):
                fault, operation, step, strike = pending.popleft()
                last = told(fault, operation, step, lambda strike=strike, lab=lab: strike(lab))  # type: ignore[misc]
                yield last
            if last and last.lost == NOTHING:
                end = told(last.fault, last.operation, "after all of them", lambda lab=lab: _judged(lab))  # type: ignore[misc]
                yield from [end] if end.lost != NOTHING else []


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
