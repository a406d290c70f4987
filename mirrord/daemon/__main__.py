"""`python -m mirrord.daemon`. A package's `__main__` is not imported again by the spawned workers, which keeps them small."""

import gc
import sys

gc.disable()  # nothing that an import makes is rubbish, and looking for it is a tenth of the start

# structlog 26 imports the whole of rich where it finds it: 0.1 s of the start and 10 MB that no daemon needs.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]

from .ground import lay_ground  # noqa: E402

lay_ground()

from .main import main  # noqa: E402

gc.freeze()  # and no collection need ever look at it again
gc.enable()

sys.exit(main())
