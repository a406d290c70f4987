"""Functions for worker processes, and waiting for what they do."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import anyio
import structlog
from pygit2.enums import ObjectType

from mirrord.errors import CommitNotFoundError, CorruptObjectError
from mirrord.git.objects.repository import open_objects

LONG = timedelta(seconds=30)


def add(a: int, b: int) -> int:
    return a + b


def own_pid() -> int:
    return os.getpid()


def nice_and_pid() -> tuple[int, int]:
    return os.nice(0), os.getpid()


def loaded_and_parent(module: str) -> tuple[bool, int]:
    return module in sys.modules, os.getppid()


def refuse() -> None:
    raise CommitNotFoundError("cannot find commit x: it is not there", hint="sync", commit="x")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(pid_file: str) -> None:
    Path(f"{pid_file}.parent").write_text(str(os.getppid()), encoding="ascii")
    Path(pid_file).write_text(str(os.getpid()), encoding="ascii")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    while True:
        time.sleep(1)


def seen_context() -> dict[str, object]:
    return dict(structlog.contextvars.get_contextvars())


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(90):
        while not condition():
            await anyio.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
            == "Z"
        )
    except (FileNotFoundError, ProcessLookupError):  # it may end between open and read
        return True


def unreadable(git_dir: Path, oids: dict[str, str]) -> set[str]:
    """Read objects, each of a kind, as checkouts do: through the repositories that a worker keeps open."""
    bad = set()
    for oid, kind in oids.items():
        with open_objects(git_dir) as objects:
            try:
                objects.read(oid, ObjectType[kind.upper()])
            except CorruptObjectError:
                bad.add(oid)
    return bad
