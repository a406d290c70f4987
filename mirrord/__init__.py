"""mirrord: git-native mirrors and sealed checkouts, served by one daemon per machine.

The clients and the root of their errors are loaded when they are first named, so that `import mirrord` costs nothing and every
part of the daemon, which imports this package too, stays free of the client's libraries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import AsyncCheckout as AsyncCheckout
    from .client import AsyncClient as AsyncClient
    from .client import Checkout as Checkout
    from .client import Client as Client
    from .errors import MirrordError as MirrordError

__version__ = "0.1.0"
__all__ = ["AsyncCheckout", "AsyncClient", "Checkout", "Client", "MirrordError", "__version__"]

_PLACES = {"AsyncCheckout": "client", "AsyncClient": "client", "Checkout": "client", "Client": "client", "MirrordError": "errors"}


def __getattr__(name: str) -> Any:
    if place := _PLACES.get(name):
        return getattr(importlib.import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *globals()]
