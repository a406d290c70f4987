"""The command line: the only code that prints. Answers go to stdout, everything else to stderr.

`table` lists every verb; a verb's module, and with it the client's libraries, is loaded when it is called, so that
`mirrord --help` and shell completion stay quick.
"""

from __future__ import annotations

import gc

gc.set_threshold(
    50_000
)  # nothing that an import makes is garbage: looking for it is 5 ms of a verb

from .main import main  # noqa: E402

__all__ = ["main"]
