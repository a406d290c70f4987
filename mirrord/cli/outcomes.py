"""What became of each prediction of a file."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..errors import MirrordError
from ..protocol import Grade


class State(StrEnum):
    """What became of a prediction. The first two have a grade."""

    PREPARED = "prepared"
    EMPTY = "empty"
    CONFLICT = "conflict"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    FAILED = "failed"
    INVALID = "invalid"
    DUPLICATE = "duplicate"


MEANINGS = {
    State.PREPARED: "the patch applies; the grade has it and the tests",
    State.EMPTY: "the patch changes nothing",
    State.CONFLICT: "the patch does not apply",
    State.REFUSED: "the policy refuses what could steer the tests",
    State.UNKNOWN: "no dataset has the instance, or several differ in it",
    State.FAILED: "it could not be graded",
    State.INVALID: "the row is no prediction",
    State.DUPLICATE: "a later row of the same instance and model counts",
}


@dataclass(frozen=True, slots=True)
class GradedPrediction:
    """One row of a file of predictions. `counts` is the line of the duplicate that counts."""

    line: int
    state: State
    instance: str | None = None
    model: str | None = None
    grade: Grade | None = None
    error: MirrordError | None = None
    counts: int | None = None
    seconds: float | None = None
    is_kept: bool = False

    @property
    def touched_tests(self) -> list[str]:
        """Paths of the change that are tests, by the rules or by the instance's test patch."""
        found = self.grade.steering if self.grade else []
        return sorted({s.path for s in found if s.kind == "tests" or s.action == "restored"})

    @property
    def why(self) -> str:
        """Why there is no grade."""
        if self.counts:
            return f"line {self.counts} counts"
        return self.error.message if self.error else ""

    def to_json(self) -> dict[str, Any]:
        grade = self.grade
        return {
            "line": self.line,
            "instance": self.instance,
            "model": self.model,
            "state": self.state,
            "strategy": grade.strategy if grade else None,
            "changed": grade.changed if grade else None,
            "touched_tests": self.touched_tests,
            "steering": grade.steering if grade else [],
            "dropped": grade.dropped if grade else [],
            "checkout": grade.id if grade and self.is_kept else None,
            "path": grade.path if grade and self.is_kept else None,
            "seconds": None if self.seconds is None else round(self.seconds, 6),
            "counts": self.counts,
            "error": self.error.problem() if self.error else None,
        }
