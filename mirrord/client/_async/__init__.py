"""The client for asyncio, written by hand."""

from .checkout import AsyncCheckout, AsyncGrade
from .client import AsyncClient

__all__ = ["AsyncCheckout", "AsyncClient", "AsyncGrade"]
