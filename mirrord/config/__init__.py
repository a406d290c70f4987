"""The configuration: one table of settings, read from a file with all its faults told at once, or not at all."""

from __future__ import annotations

from ..places import find_path
from .reading import load
from .settings import (
    AccessSettings,
    CheckoutSettings,
    Settings,
    UpstreamSettings,
    compare,
    merge_live,
    setting_keys,
)

__all__ = [
    "AccessSettings",
    "CheckoutSettings",
    "Settings",
    "UpstreamSettings",
    "compare",
    "find_path",
    "load",
    "merge_live",
    "setting_keys",
]
