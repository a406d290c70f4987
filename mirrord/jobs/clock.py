"""The wall clock, whose steps are noticed.

A hypervisor that paused the machine, NTP after a boot, or a person may set the clock, by hours or
by years. What was promised for a duration must neither end at once nor last for years, so those
who keep times are told of each step before they read the clock again.
"""

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from ..telemetry import log

# NTP corrects less by changing the speed of both clocks (adjtimex(2)); small steps add up
_STEP_S = 1.0
# two readings this far apart say nothing: the process was stopped between them
_APART_S = 0.1


class WallClock:
    """Call it for the present time, aware UTC. Belongs to one event loop."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._offset_s = self._measure()
        self._reactions: list[Callable[[timedelta], None]] = []

    def __call__(self) -> datetime:
        self.look()
        return datetime.fromtimestamp(self._wall(), timezone.utc)

    def on_step(self, react: Callable[[timedelta], None]) -> None:
        """Call `react` with each step; negative where the clock was set back."""
        self._reactions.append(react)

    def look(self) -> None:
        """Tell of a step since the last look."""
        offset_s = self._measure()
        step_s = offset_s - self._offset_s
        if abs(step_s) < _STEP_S:
            return
        self._offset_s = offset_s
        log.warning("clock.stepped", step_s=round(step_s, 3))
        for react in self._reactions:
            react(timedelta(seconds=step_s))

    def _measure(self) -> float:
        while True:
            before, wall = self._steady(), self._wall()
            if self._steady() - before < _APART_S:
                return wall - before
