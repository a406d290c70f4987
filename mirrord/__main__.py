"""`python -m mirrord` is the command `mirrord`."""

from .cli import main

if __name__ == "__main__":
    main()
