"""The command line: the only code that prints. Answers go to stdout, everything else to stderr.

`table` lists every verb. A verb's module, and with it the client's libraries, is loaded when the
verb is called: `mirrord --help` and shell completion stay quick.
"""

import gc

# Imports make no garbage; looking for it takes 5 ms of every verb.
gc.set_threshold(50_000)

from .main import main  # noqa: E402

__all__ = ["main"]
