"""The configuration: one table of settings, read from a file with all its faults told at once, or not at all."""

from __future__ import annotations

from .reading import find_path, load
from .settings import AccessSettings, CheckoutSettings, Settings, UpstreamSettings, compare, merge_live, setting_keys

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
