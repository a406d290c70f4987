"""The client for asyncio, written by hand."""

from .checkout import AsyncCheckout, AsyncGrade
from .client import AsyncClient
from .rehearsal import AsyncRehearsal

__all__ = ["AsyncCheckout", "AsyncClient", "AsyncGrade", "AsyncRehearsal"]
