"""The client: the daemon's socket as a typed Python object, in two colours.

`AsyncClient` is written by hand in `asynchronous`; `synchronous` is generated from it by `tests/unasync.py`, and a test holds the
two equal. Imports nothing of the daemon. Holds no state that a crash could lose: a lease outlives its client until its deadline.
"""

from __future__ import annotations

from .asynchronous.checkout import AsyncCheckout
from .asynchronous.client import AsyncClient
from .synchronous.checkout import Checkout
from .synchronous.client import Client
from .twins import Pending

__all__ = ["AsyncCheckout", "AsyncClient", "Checkout", "Client", "Pending"]
