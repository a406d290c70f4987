"""`python -m mirrord.daemon`. A package's `__main__` is not imported again by the spawned workers, which keeps them small."""

import sys

# structlog 26 imports the whole of rich where it finds it: 0.1 s of the start and 10 MB that no daemon needs.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]

from .main import main  # noqa: E402

sys.exit(main())
