"""The command line. Answers go to stdout, everything else to stderr.

`table` lists every verb. The module of a verb, and with it the client, is loaded when the verb is
called, so `mirrord --help` and shell completion stay fast.
"""

import gc

# Imports create no garbage; collecting it takes 5 ms of every verb.
gc.set_threshold(50_000)

from .main import main  # noqa: E402

__all__ = ["main"]
