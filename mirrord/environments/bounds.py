"""What a build may take while it runs: disk, and processes that outlive their commands.

Its result is bounded again when it is adopted. Time is bounded by `builder.TIMEOUT`.
"""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ..model import ENVIRONMENT_BYTES_LIMIT, ENVIRONMENT_FILES_LIMIT, TREE_DEPTH_LIMIT
from ..sandbox.box import Started

# between two looks at the processes; what starts and ends in between costs nothing to miss
_LOOK_S = 2.0
_MEASURE_S = 30.0  # a walk over an environment of 100,000 files takes half a second
# For a process whose parent has ended. It may hold the output that uv reads to its end, and no
# command of a build needs a process of an earlier one: each has a sandbox of its own.
_ORPHAN_S = 20.0


class BuildBounds:
    """Watches a step of a build in a thread. `reason` is set if the step was ended."""

    def __init__(self, child: Started, paths: Iterable[str], say: Callable[[str], None]) -> None:
        self.reason: str | None = None
        self._child, self._paths, self._say = child, [*paths], say
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "BuildBounds":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        since: dict[int, float] = {}
        measured_at = time.monotonic()
        while not self._stopped.wait(_LOOK_S):
            since = self._end_orphans(since)
            if time.monotonic() - measured_at < _MEASURE_S:
                continue
            measured_at = time.monotonic()
            if reason := find_excess(self._paths):
                self.reason = reason
                self._child.end()
                return

    def _end_orphans(self, since: dict[int, float]) -> dict[int, float]:
        """End processes that were without a parent for long; return since when the others are."""
        now = time.monotonic()
        waiting = {pid: since.get(pid, now) for pid in self._child.find_orphans()}
        for pid in [pid for pid, began in waiting.items() if now - began >= _ORPHAN_S]:
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
                os.kill(pid, signal.SIGKILL)
                self._say(f"ended {name}, which outlived its command by {_ORPHAN_S:.0f} s\n")
            del waiting[pid]
        return waiting


def find_excess(paths: Iterable[str]) -> str | None:
    """Return which limit is exceeded by what is on disk below all of `paths`, or None."""
    files = size = 0
    waiting = [(path, 0) for path in paths]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    files += 1
                    # st_blocks counts 512 bytes whatever the file system's block is, and no holes:
                    # the length of a sparse file counts when the result is adopted
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
        except OSError as error:  # gone meanwhile, or locked
            # a path above PATH_MAX (4,096 bytes) cannot be opened
            if error.errno == errno.ENAMETOOLONG:
                depth = TREE_DEPTH_LIMIT + 1
        if depth > TREE_DEPTH_LIMIT:
            return f"it has more than {TREE_DEPTH_LIMIT} nested directories"
        if files > ENVIRONMENT_FILES_LIMIT:
            return f"it has more than {ENVIRONMENT_FILES_LIMIT} files"
        if size > ENVIRONMENT_BYTES_LIMIT:
            return f"it has more than {ENVIRONMENT_BYTES_LIMIT >> 20} MiB"
    return None
