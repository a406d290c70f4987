"""The result of a check, and helpers of checks."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import ResourceError
from ..host.processes import search_path
from ..presence import exists, is_dir

Verdict = Literal["ok", "warn", "fail"]
# a verdict, the fact behind it, and a remedy unless it is ok
Result = tuple[Verdict, str, str]


class HostStep(NamedTuple):
    """A change of the host; `what` is imperative, such as `remove …`."""

    what: str
    act: Callable[[], object]


def judge(is_ok: bool, fact: str, remedy: str, *, otherwise: Verdict = "fail") -> Result:
    return ("ok", fact, "") if is_ok else (otherwise, fact, remedy)


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(candidate for candidate in (path, *path.parents) if exists(candidate))


def entries(path: Path) -> Iterator[os.DirEntry[str]]:
    if is_dir(path):
        with os.scandir(path) as listed:
            yield from listed


# a doctor that hangs helps nobody; a check that cannot run is a warning
_TIMEOUT_S = 20.0
# the end of a long journal, in memory
_OUTPUT_MAX_BYTES = 8 << 20


def run(program: str, *arguments: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Return what a program prints, the last 8 MiB; raises ResourceError if it fails."""
    path = shutil.which(program, path=search_path())
    if path is None:
        raise ResourceError(f"cannot run {program}: it is not installed")
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env={"PATH": search_path(), "LC_ALL": "C.UTF-8"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"cannot run {program}: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        fact = lines[-1] if lines else f"status {done.returncode}"
        hint = f"run `{' '.join((program, *arguments))}` by hand"
        raise ResourceError(f"cannot run {program}: {fact}", hint=hint)
    return done.stdout[-_OUTPUT_MAX_BYTES:].decode(errors="replace")
