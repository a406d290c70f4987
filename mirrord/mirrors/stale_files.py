"""What gits that were killed leave in a mirror: locks and temporary files that stop the next one, or take space for ever.

Owns their names. One is removed only when nobody holds it, and when it is old or nobody can be at it: at a start, or while the
lock of the mirror is held by the one whose git died. Some names say which process is at it: then whether that lives counts, and
not how old the file is. The locks of linked worktrees are their owners'.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import anyio
import structlog

from .quarantine import held_files

_NAMES = re.compile(
    r"tmp_(pack|idx|rev|obj|midx|graph|bitmap)_\w+|.*\.lock|gc\.pid|mirrord-transaction\.new"
    r"|packed-refs\.new"  # while there is one, git (2.39) deletes and packs no ref
    r"|(refs|packs)_\w{6}"  # of update-server-info, which repack runs
)
_OF_PROCESS = re.compile(
    r"\.tmp-(\d+)-pack-.*"
)  # a finished pack of `git repack`, which opens none of them and renames them all
_REUSED = timedelta(hours=1)
"""A process with the number of the one that made a file may be another by then."""
_OWNERS = "worktrees"

log = structlog.get_logger()


@asynccontextmanager
async def removed_on_failure(path: Path) -> AsyncIterator[None]:
    """Remove what is left where the block fails or is cancelled. The caller holds the mirror's lock, so nobody else writes."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(remove_stale_files, path, timedelta())
        raise


def remove_stale_files(path: Path, age: timedelta) -> int:
    """Remove temporary files and locks of gits that were killed, at least `age` old; answers how many."""
    found = list(_iter_stale(path, time.time() - age.total_seconds()))
    held = held_files(path) if found else set()
    for file in found:
        if file not in held:
            file.unlink(missing_ok=True)
            log.info("leftover.removed", path=str(file.relative_to(path.parent)))
    return len(found)


def _iter_stale(path: Path, before: float) -> Iterator[Path]:
    for directory, below, files in os.walk(path):
        if directory == str(path) and _OWNERS in below:
            below.remove(_OWNERS)
        for name in files:
            file = Path(directory) / name
            if _is_over(file, before):
                yield file


def _is_over(file: Path, before: float) -> bool:
    if maker := _OF_PROCESS.fullmatch(file.name):
        return not _is_git(maker[1]) or _is_older(file, time.time() - _REUSED.total_seconds())
    return bool(_NAMES.fullmatch(file.name)) and _is_older(file, before)


def _is_git(process: str) -> bool:
    """Whether it lives: a container without an init keeps the dead ones."""
    try:
        name, state = Path("/proc", process, "stat").read_text().partition("(")[2].rsplit(") ", 1)
    except OSError:
        return False
    return name.startswith("git") and state[0] not in "ZX"


def _is_older(file: Path, before: float) -> bool:
    try:
        return file.lstat().st_mtime <= before
    except FileNotFoundError:
        return False
