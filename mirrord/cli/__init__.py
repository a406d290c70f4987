"""The command line. Answers go to stdout, everything else to stderr.

`table` lists every verb. The module of a verb, and with it the client, is loaded when the verb is
called, so `mirrord --help` and shell completion stay fast.
"""

import gc
import signal
from contextlib import suppress

# Imports create no garbage; collecting it takes 5 ms of every verb.
gc.set_threshold(50_000)

# While modules load, Ctrl-C ends the process without a traceback.
_handler = signal.getsignal(signal.SIGINT)
with suppress(ValueError):  # not in the main thread
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .main import main  # noqa: E402

with suppress(ValueError):
    signal.signal(signal.SIGINT, _handler)

__all__ = ["main"]
