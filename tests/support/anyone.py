"""Python and the project for processes of another user, wherever the clone is: others cannot look into a private directory."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534

# For scripts that need no more than the standard library.
BARE_PYTHON = str(Path(sys.executable).resolve())

_PROJECT = Path(__file__).parents[2]


@functools.cache
def python() -> list[str]:
    """The start of a command: a Python which any user can run, and which can import the project, its libraries and the tests."""
    if _can_import(sys.executable):
        return [
            "env",
            f"PYTHONPATH={_PROJECT}:{_PROJECT}/tests:{_PROJECT}/tests/support",
            sys.executable,
        ]
    return ["env", f"PYTHONPATH={_copy()}", BARE_PYTHON]


def _can_import(executable: str) -> bool:
    # to import them takes 1.7 s where the user cannot write bytecode
    code = "from importlib.util import find_spec as find; find('mirrord.daemon.main').loader"
    command = [executable, "-c", f"{code}; find('uvicorn').loader.get_data(find('uvicorn').origin)"]
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    done = subprocess.run([*become, *command], check=False, cwd="/", stderr=subprocess.DEVNULL)
    return done.returncode == 0


def _copy() -> Path:
    """The libraries, the project and the tests side by side, readable by all, until the tests end."""
    directory = Path(tempfile.mkdtemp(prefix="mirrord-anyone-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    libraries = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    tests = f"{_PROJECT}/tests"
    for source in (
        f"{libraries}/.",
        f"{tests}/faults",
        f"{tests}/support/.",
        f"{_PROJECT}/mirrord",
    ):
        subprocess.run(["cp", "-r", "--preserve=timestamps", source, directory], check=True)
    uv = Path(sys.executable).with_name("uv")  # which its package finds there
    (directory / "bin").mkdir(exist_ok=True)
    subprocess.run(["cp", "--reflink=auto", uv, directory / "bin"], check=True)
    subprocess.run(["chmod", "-R", "a+rX", directory], check=True)
    return directory


_ASK = """
import json, socket, sys
for method, path, body in json.loads(sys.argv[2]):
    content = b"" if body is None else json.dumps(body).encode()
    path = path if path.startswith("/") else f"/v1/{path}"
    head = f"{method} {path} HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\ncontent-length: {len(content)}\\r\\n\\r\\n"
    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(head.encode() + content)
    answer = b"".join(iter(lambda: s.recv(65536), b""))
    print(json.dumps([int(answer.split()[1]), answer.partition(b"\\r\\n\\r\\n")[2].decode()]))
"""


def ask_as(
    uid: int, path: Path, *requests: tuple[str, str, object], groups: Sequence[int] = ()
) -> list[tuple[int, str]]:
    """Send requests (method, path below /v1, JSON body) as a process of another user; answers statuses and bodies."""
    command = [BARE_PYTHON, "-c", _ASK, str(path), json.dumps(requests)]
    done = subprocess.run(
        command,
        user=uid,
        group=uid,
        extra_groups=groups,
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
