"""Heals: mirrors are repaired object by object, from any donor, and nothing is destroyed first."""

from .service import Heals

__all__ = ["Heals"]
