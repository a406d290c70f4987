"""NeMo Gym's sandboxes over checkouts: its real package, without the rest of what it requires."""

from __future__ import annotations

import pytest
from harness_daemon import HarnessLab

pytestmark = [pytest.mark.slow, pytest.mark.root]


def test_a_rollout_by_its_sandbox_api(lab: HarnessLab) -> None:
    assert lab.reward(lab.roll_out("nemo_gym")["patch"])
