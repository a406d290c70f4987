"""Whether this host can make sandboxes, tried once for all files that ask when they are collected."""

from __future__ import annotations

import pytest

from mirrord.sandbox.box import find_obstacle

_OBSTACLE = find_obstacle()

needs_sandbox = pytest.mark.skipif(bool(_OBSTACLE), reason=f"no sandbox here: {_OBSTACLE}")
