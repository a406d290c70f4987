"""mirrord: git mirrors and sealed checkouts, served by one daemon per machine.

Exports the names that clients need: client classes, messages, enums and errors. Each is loaded on
first use, so `import mirrord` costs nothing and the daemon never loads the client. `Checkout` and
`Grade` are handles of held checkouts; the messages of these names are in `mirrord.protocol`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Modules with exported names, the lightest first; __init__.pyi lists the names for type checkers.
_MODULES = (
    *("errors", "model", "client._sync", "client._async", "protocol"),
    *("client._sync.sandbox", "client._async.sandbox"),
    *("client._sync.rehearsal", "client._async.rehearsal"),
)


def __dir__() -> list[str]:
    with open(f"{__file__}i", encoding="utf-8") as stub:
        names = [words[3] for words in map(str.split, stub) if words[2:3] == ["import"]]
    return [*names, "__version__"]


def __getattr__(name: str) -> Any:
    if name[:1].isupper():  # a class; anything else may be a submodule
        for module in _MODULES:
            found = vars(importlib.import_module(f"{__name__}.{module}")).get(name)
            if isinstance(found, type) and found.__module__.startswith(__name__):
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
