"""The command line: the only code that prints. Answers go to stdout, everything else to stderr.

`table` lists every verb; a verb's module, and with it the client's libraries, is loaded when it is called, so that
`mirrord --help` and shell completion stay quick.
"""

from __future__ import annotations

from .main import main

__all__ = ["main"]
