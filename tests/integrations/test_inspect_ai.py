"""inspect-ai: what it asks of every sandbox, and an evaluation."""

from __future__ import annotations

import pytest
from harness_daemon import HarnessLab

pytestmark = [pytest.mark.slow, pytest.mark.root]


def test_its_conformance_suite_and_an_evaluation(lab: HarnessLab) -> None:
    found = lab.roll_out("inspect_ai")
    assert found["grades"] == {"gold": "C", "nothing": "I"}
    assert lab.reward(found["patch"])
