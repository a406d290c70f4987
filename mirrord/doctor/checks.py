"""What a check answers, and what most checks need."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import ResourceError
from ..host.processes import search_path

Verdict = Literal["ok", "warn", "fail"]
Result = tuple[Verdict, str, str]
"""A verdict, the fact behind it, and a remedy unless it is ok."""


class Step(NamedTuple):
    """A change of the host, as a sentence without a subject: `remove …`, `set …`."""

    what: str
    act: Callable[[], object]


def judge(well: bool, fact: str, remedy: str, *, otherwise: Verdict = "fail") -> Result:
    return ("ok", fact, "") if well else (otherwise, fact, remedy)


def existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def entries(path: Path) -> Iterator[os.DirEntry[str]]:
    if path.is_dir():
        with os.scandir(path) as found:
            yield from found


_TIMEOUT_S = 20.0
_MOST_BYTES = 8 << 20


def run(program: str, *arguments: str, timeout_s: float = _TIMEOUT_S) -> str:
    """What a program prints, at most 8 MiB; raises ResourceError where it fails or is missing."""
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
        told = done.stderr.decode(errors="replace").strip().splitlines()
        fact = told[-1] if told else f"status {done.returncode}"
        hint = f"`{' '.join((program, *arguments))}` by hand may say more"
        raise ResourceError(f"cannot run {program}: {fact}", hint=hint)
    return done.stdout[-_MOST_BYTES:].decode(errors="replace")
