"""What a rehearsal writes down of one instance. Pure: no I/O."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from .. import errors, protocol
from ..model import History, Readiness

FATAL = (errors.NoDaemonError, errors.StoppingError, errors.AccessError)
# what says nothing about an instance
_HINDRANCES = (errors.ResourceError, errors.InternalError, errors.CheckoutBusyError)


class Candidate(NamedTuple):
    """An instance to rehearse, without its patches: `patches` has the names of those it has.

    `state` changes with its row, its mirror and the daemon's version. An instance that cannot be
    read has an `error`, and nothing else.
    """

    instance: str
    dataset: str | None
    mirror: str = ""
    repo: str | None = None
    base_commit: str | None = None
    commits: tuple[protocol.RecordedCommit, ...] = ()
    patches: tuple[str, ...] = ()
    history: History | None = None
    created_at: str = ""
    state: str = ""
    error: errors.MirrordError | None = None


PATCHES = ("@test_patch", "@patch")
"""In the order in which a grader applies them."""


class Record:
    """The steps of one instance, and the first error."""

    def __init__(self) -> None:
        self.steps: list[protocol.RehearsalStep] = []
        self.error: errors.MirrordError | None = None
        self.is_known = True

    @contextmanager
    def step(self, name: str, *, needed: bool = False) -> Iterator[None]:
        """Time a step. Its failure is recorded, and ends the instance where it is `needed`."""
        began = time.perf_counter()
        try:
            yield
        except FATAL:
            raise
        except errors.MirrordError as error:
            self.error = self.error or error
            self.add(name, "failed", error.message, began)
            if needed:
                raise
        else:
            self.add(name, "ok", "", began)

    def add(
        self,
        name: str,
        outcome: Literal["ok", "nothing", "failed", "but"],
        detail: str,
        began: float | None = None,
    ) -> None:
        took = round(time.perf_counter() - began, 6) if began else 0.0
        step = protocol.RehearsalStep(name=name, outcome=outcome, detail=detail, duration_s=took)
        self.steps.append(step)

    @property
    def problem(self) -> protocol.Problem | None:
        return protocol.Problem.from_json(self.error.problem()) if self.error else None

    @property
    def status(self) -> Readiness:
        if self.error:
            is_about_us = isinstance(self.error, _HINDRANCES) or not self.is_known
            return Readiness.UNTRIED if is_about_us else Readiness.FAILED
        return Readiness.BUT if any(at.outcome == "but" for at in self.steps) else Readiness.READY

    @property
    def reason(self) -> str:
        """What is wrong with each step that is not as it should be."""
        bad = [step for step in self.steps if step.outcome in ("failed", "but")]
        if not bad:
            return self.error.message if self.error else ""
        return "; ".join(f"{step.name}: {step.detail}" for step in bad)


def must_equal(what: str, found: str, expected: str | None) -> None:
    """Raises ProofFailedError."""
    if found != expected:
        raise errors.ProofFailedError(f"cannot prove {what}: it is {found}, not {expected}")
