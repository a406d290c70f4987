"""`python -m mirrord` is the command `mirrord`."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
