"""Rehearsals of instances."""

from typing import Literal

from .. import model
from .codec import Answer, Problem


class RehearsalStep(Answer):
    """One check. `nothing`: the row has no such patch, so there was nothing to apply."""

    name: str
    outcome: Literal["ok", "nothing", "failed", "but"]
    detail: str = ""
    duration_s: float = 0.0


class UnexpectedTest(Answer):
    """A test that came out otherwise than its row says; `outcome` None: it is not in the log.

    `lines` are the last that the log of this `step` says of it.
    """

    step: str
    test: str
    expected: Literal["fail", "pass"]
    outcome: Literal["passed", "failed", "skipped", "error"] | None = None
    lines: list[str] = []

    @property
    def told(self) -> str:
        outcome = self.outcome or "not in the log"
        return f"{self.step}: {self.test}: {outcome}, expected to {self.expected}"


class Rehearsed(Answer):
    """What a rehearsal found of one instance, step by step as far as it came.

    `reason` says what keeps it from being ready; `error` is the problem behind that. `state` tells
    the row, the mirror and the daemon that it holds for. Where its tests were run there are the
    `environment`, the first of the `unexpected` tests, and the files with the `logs`.
    """

    instance: str
    dataset: str | None = None
    repo: str | None = None
    commit: str | None = None
    status: model.Readiness
    reason: str = ""
    steps: list[RehearsalStep] = []
    error: Problem | None = None
    state: str = ""
    duration_s: float = 0.0
    environment: str | None = None
    unexpected: list[UnexpectedTest] = []
    logs: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether it can be checked out and graded."""
        return self.status in (model.Readiness.READY, model.Readiness.BUT)
