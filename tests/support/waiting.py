"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(
    condition: Callable[[], object], bound_s: float = 90.0, told: Callable[[], object] = str
) -> None:
    """Wait as long as a very busy machine may need; `told` explains a failure."""
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, told() or "it did not happen"
        time.sleep(0.02)
