"""swe-rex: sessions, commands and files over a checkout."""

from __future__ import annotations

import pytest
from harness_daemon import HarnessLab

pytestmark = [pytest.mark.slow, pytest.mark.root]


def test_a_rollout_in_a_session(lab: HarnessLab) -> None:
    assert lab.reward(lab.roll_out("swe_rex")["patch"])
