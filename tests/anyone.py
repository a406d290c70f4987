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
    """The start of a command: a Python which any user can run, and which can import the project, its libraries and the tests."""
    if _can_import(sys.executable):
        return ["env", f"PYTHONPATH={_PROJECT}:{_PROJECT}/tests", sys.executable]
    return ["env", f"PYTHONPATH={_copy()}", BARE_PYTHON]


def _can_import(executable: str) -> bool:
    command = [executable, "-c", "import mirrord.daemon.main, uvicorn"]
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    done = subprocess.run([*become, *command], check=False, cwd="/", stderr=subprocess.DEVNULL)
    return done.returncode == 0


def _copy() -> Path:
    """The libraries, the project and the tests side by side, readable by all, until the tests end."""
    directory = Path(tempfile.mkdtemp(prefix="mirrord-anyone-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    libraries = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    for source in (f"{libraries}/.", f"{_PROJECT}/tests/.", f"{_PROJECT}/mirrord"):
        subprocess.run(["cp", "-r", source, directory], check=True)
    subprocess.run(["chmod", "-R", "a+rX", directory], check=True)
    return directory
