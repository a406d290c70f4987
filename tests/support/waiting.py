"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable

BOUND_S = 90.0  # of a wait that ends with an event: what a very busy machine may need


def until(
    condition: Callable[[], object], bound_s: float = BOUND_S, told: Callable[[], object] = str
) -> None:
    """Wait until it is so; `told` explains a failure."""
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, told() or "it did not happen"
        time.sleep(0.02)
