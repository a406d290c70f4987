"""The heal: object by object, from whoever has them, and nothing is destroyed first."""

from .service import Heals

__all__ = ["Heals"]
