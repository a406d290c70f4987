"""verifiers: an agent in a runtime of ours, with a reward."""

from __future__ import annotations

import pytest
from harness_daemon import HarnessLab

pytestmark = [pytest.mark.slow, pytest.mark.root]


def test_two_rollouts_side_by_side_and_their_rewards(lab: HarnessLab) -> None:
    found = lab.roll_out("verifiers")
    assert found["rewards"] == [1.0, 0.0]
    assert lab.reward(found["patch"])
