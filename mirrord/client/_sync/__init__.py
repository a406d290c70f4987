# @generated from ../_async/__init__.py by tests/support/unasync.py: edit that file, then run it.
"""The client for threads, generated from the one for asyncio by tests/support/unasync.py."""

from .checkout import Checkout, Grade
from .client import Client

__all__ = ["Checkout", "Client", "Grade"]
