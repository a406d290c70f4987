"""Python and the project for processes of another user, wherever the clone is: others cannot look into a private directory."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NOBODY = 65534

# For scripts that need no more than the standard library.
BARE_PYTHON = str(Path(sys.executable).resolve())

_PROJECT = Path(__file__).parent.parent


@functools.cache
def python() -> list[str]:
    """A command line that starts a Python which any user can run, and which can import the project and its libraries."""
    return [sys.executable] if _can_import(sys.executable) else ["env", f"PYTHONPATH={_copy()}", BARE_PYTHON]


def _can_import(executable: str) -> bool:
    command = [executable, "-c", "import mirrord.daemon.main, uvicorn"]
    with tempfile.TemporaryFile() as nothing:
        done = subprocess.run(
            ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command],
            check=False, cwd="/", stderr=nothing,
        )  # fmt: skip
    return done.returncode == 0


def _copy() -> Path:
    """The libraries and the project side by side, readable by all, until the tests end."""
    directory = Path(tempfile.mkdtemp(prefix="mirrord-anyone-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    libraries = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    subprocess.run(["cp", "-r", "--no-target-directory", libraries, directory], check=True)
    subprocess.run(["cp", "-r", _PROJECT / "mirrord", directory], check=True)
    subprocess.run(["chmod", "-R", "a+rX", directory], check=True)
    return directory
