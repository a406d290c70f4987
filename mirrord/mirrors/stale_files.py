"""Files that killed gits leave in a mirror: locks that stop the next git, temporary files.

A file is removed only when no process holds it, and when it is old, or when no git of ours can be
running: at a start, or under the mirror's lock after its git died. Some names have the number of
the process that made them: then it counts whether that lives. The locks of linked worktrees are
their owners'.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import anyio
import structlog
from anyio import to_thread

from .quarantine import held_files

_NAMES = re.compile(
    r"tmp_(pack|idx|rev|obj|midx|graph|bitmap)_\w+|.*\.lock|gc\.pid|mirrord-transaction\.new"
    r"|packed-refs\.new"  # while there is one, git (2.39) deletes and packs no ref
    r"|(refs|packs)_\w{6}"  # of update-server-info, which repack runs
)
# a finished pack of `git repack`, which opens none of them and renames them all
_OF_PROCESS = re.compile(r"\.tmp-(\d+)-pack-.*")
_REUSED_S = 3600.0  # by then the number may be another process's

log = structlog.get_logger()


@asynccontextmanager
async def removed_on_failure(path: Path) -> AsyncIterator[None]:
    """Remove stale files where the block fails or is cancelled. The caller holds the lock."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(remove_stale_files, path, timedelta())
        raise


def remove_stale_files(path: Path, age: timedelta) -> int:
    """Remove temporary files and locks that are at least `age` old; answers how many it found."""
    found = list(_iter_stale(path, time.time(), age.total_seconds()))
    held = held_files(path) if found else set()
    for file in found:
        if file not in held:
            file.unlink(missing_ok=True)
            log.info("stale_file.removed", path=str(file.relative_to(path.parent)))
    return len(found)


def _iter_stale(path: Path, now: float, age_s: float) -> Iterator[Path]:
    for directory, below, files in os.walk(path):
        if directory == str(path) and "worktrees" in below:
            below.remove("worktrees")
        for name in files:
            file = Path(directory, name)
            maker = _OF_PROCESS.fullmatch(name)
            if maker and not _is_running_git(maker[1]):
                yield file
            elif maker or _NAMES.fullmatch(name):
                with suppress(FileNotFoundError):
                    if file.lstat().st_mtime <= now - (_REUSED_S if maker else age_s):
                        yield file


def _is_running_git(process: str) -> bool:
    try:
        name, state = Path("/proc", process, "stat").read_text().partition("(")[2].rsplit(") ", 1)
    except OSError:
        return False
    # a container without an init keeps dead processes
    return name.startswith("git") and state[0] not in "ZX"
