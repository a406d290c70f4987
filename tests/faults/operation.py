"""What mirrord does that writes, as something that can be begun, looked at after a fault, and done again.

`run` is done in full by a healthy daemon. `outcome` looks at what a fault left and says which state that is: the one before, or
the one after; anything in between is an AssertionError. `settle` does it again, to the end, and proves the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from .lab import Lab

BEFORE, AFTER = "the state before", "the state after"
HALF = "to be reset again, and nothing else till then"
UNPINNED = "the dataset says which commits have no pin, and why"


class Operation(ABC):
    """One piece of work on one lab. A new one for every fault: the constructor makes something to do."""

    name: str
    after_kill = frozenset({BEFORE, AFTER})  # the states in which a start may find it
    may_end_daemon = False  # where it is a start

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @abstractmethod
    def run(self) -> None: ...

    def look(self) -> None:  # noqa: B027
        """Look at what a fault left before the daemon is started again."""

    @abstractmethod
    def outcome(self) -> str: ...

    def is_sound(self, outcome: str) -> bool:
        """Whether an audit has nothing to say before the operation is done again."""
        return outcome != UNPINNED

    def settle(self) -> None:
        if self.outcome() != AFTER:
            self.run()
        assert self.outcome() == AFTER, f"{self.name} does not work afterwards"

    def clean(self) -> None:  # noqa: B027
        """Take away what the next operation does not need."""
