"""Steps of the wall clock are told, each once; what is no step is not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from mirrord.jobs.clock import WallClock


class Clocks:
    """Both clocks of a machine, and the steps that were told."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_800_000_000.0, 100.0
        self.pauses: list[float] = []
        self.steps: list[float] = []
        self.clock = WallClock(lambda: self.wall, self._read_steady)
        self.clock.on_step(lambda step: self.steps.append(round(step / timedelta(seconds=1), 3)))

    def _read_steady(self) -> float:
        self._pass(self.pauses.pop() if self.pauses else 0.0)
        return self.steady

    def _pass(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.mark.parametrize("step", [3 * 3600.0, -3 * 3600.0, 56 * 365 * 86400.0, -86400.0, 1.5])
def test_a_step_is_told_once_before_the_time_is_read(step: float) -> None:
    clocks = Clocks()
    clocks.wall += step
    assert clocks.clock().timestamp() == clocks.wall
    assert clocks.steps == [step]
    clocks.clock()
    clocks.wall -= step
    clocks.clock()
    assert clocks.steps == [step, -step]


def test_time_that_passes_is_no_step() -> None:
    """Nor is a pause of the process between the readings of the two clocks."""
    clocks = Clocks()
    clocks._pass(86400)
    clocks.clock()
    clocks.pauses = [0.0, 0.0, 7200.0, 0.0]
    clocks.clock()
    assert not clocks.pauses
    assert clocks.steps == []


def test_small_corrections_add_up() -> None:
    clocks = Clocks()
    for _ in range(5):
        clocks.wall += 0.4
        clocks.clock()
    assert clocks.steps == [1.2]
