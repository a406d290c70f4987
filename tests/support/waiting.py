"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], bound_s: float = 30.0) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
