"""mirrord: git-native mirrors and sealed checkouts, served by one daemon per machine.

Exports everything that a client names: the clients, the messages they return, the choices they
take, the errors they raise. Each is loaded when it is first named: `import mirrord` costs nothing,
and the daemon, which imports this package too, stays free of the client. `Checkout` and `Grade`
here are handles of held checkouts; their messages are those of `mirrord.protocol`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Where the names are, the lightest module first; __init__.pyi lists them for type checkers.
_MODULES = (
    *("errors", "model", "client._sync", "client._async", "protocol"),
    *("client._sync.sandbox", "client._async.sandbox"),
)


def __getattr__(name: str) -> Any:
    if name[:1].isupper():  # a class; anything else may be a submodule
        for place in _MODULES:
            found = vars(importlib.import_module(f"{__name__}.{place}")).get(name)
            if isinstance(found, type) and found.__module__.startswith(__name__):
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
