"""Programs of the host that are asked or told something: systemd's, and groupadd."""

import shutil
import subprocess

from ..errors import ResourceError
from ..host.processes import search_path

_TIMEOUT_S = 20.0
_MOST_BYTES = 8 << 20


def run(program: str, *arguments: str) -> str:
    """What a program prints, at most 8 MiB; raises ResourceError where it fails or is missing."""
    path = shutil.which(program, path=search_path())
    if path is None:
        raise ResourceError(f"cannot run {program}: it is not installed")
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            env={"PATH": search_path(), "LC_ALL": "C.UTF-8"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"cannot run {program}: {error}") from error
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        fact = told[-1] if told else f"status {done.returncode}"
        raise ResourceError(f"cannot run {program}: {fact}")
    return done.stdout[-_MOST_BYTES:].decode(errors="replace")
