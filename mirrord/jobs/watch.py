"""Two places that people change with plain file tools: the directory of datasets, and the configuration file.

Owns noticing and waiting: a file counts when it was quiet for a moment, looks the same on two looks, and has not been handled in
that state before. What fails is not tried again until the file changes. inotify is only the alarm clock, because its queue can
overflow unseen (field notes) and its instances can run out: `look` on a timer finds the same things. Never watches checkouts.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
import structlog
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from ..errors import MirrordError

log = structlog.get_logger()

QUIET = timedelta(seconds=1)
PARTIAL_SUFFIXES = (
    ".tmp",
    ".temp",
    ".part",
    ".partial",
    ".crdownload",
    ".download",
    ".swp",
    ".swx",
    ".lock",
    ".filepart",
    "~",
)


class Signature(NamedTuple):
    """A file's state, as far as stat tells: a rewrite or a rename changes at least a time."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def changed_at(self) -> float:
        """Seconds since 1970 of the last change, a rename included."""
        return max(self.mtime_ns, self.ctime_ns) / 1e9


class Watch:
    """Calls `handle` with every file that came to rest in a state it has not seen.

    `places` are the directories, each with the test that says which names in it count. `known` are files that were handled
    before this daemon started.
    """

    def __init__(
        self,
        places: Mapping[Path, Callable[[str], bool]],
        handle: Callable[[Path], Awaitable[None]],
        *,
        known: Mapping[Path, Signature] | None = None,
        quiet: timedelta = QUIET,
    ) -> None:
        self._places = places
        self._handle = handle
        self._handled: dict[Path, Signature] = dict(known or {})
        self._quiet_s = quiet.total_seconds()
        self._touched = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._observer = Observer()

    async def open(self) -> None:
        """Watch from now on; what is there already is found too."""
        await anyio.to_thread.run_sync(self._observe, asyncio.get_running_loop())
        self._touched.set()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._observer.is_alive():
            self._observer.stop()
            await anyio.to_thread.run_sync(self._observer.join)

    def touch(self) -> None:
        """Look again soon."""
        self._touched.set()

    def _observe(self, loop: asyncio.AbstractEventLoop) -> None:
        alarm = _Alarm(lambda: loop.call_soon_threadsafe(self._touched.set))
        try:
            for directory in self._places:
                self._observer.schedule(alarm, str(directory), recursive=False)
            self._observer.start()
        except OSError as error:  # inotify has no instances left, or the directory is gone: the timer goes on looking
            log.warning("watch.degraded", reason=error.strerror)

    async def _follow(self) -> None:
        while True:
            await self._touched.wait()
            self._touched.clear()
            pending = await self._look()
            while pending:
                await asyncio.sleep(self._quiet_s)
                pending = await self._handle_settled(pending)

    async def _handle_settled(self, pending: dict[Path, Signature]) -> dict[Path, Signature]:
        """Handle what did not change since the last look; answers what is left."""
        found = await self._look()
        for path, signature in found.items():
            if pending.get(path) == signature:
                self._handled[path] = signature
                await self._handle_one(path)
        return {
            path: signature
            for path, signature in found.items()
            if self._handled.get(path) != signature
        }

    async def _handle_one(self, path: Path) -> None:
        try:
            await self._handle(path)
        except MirrordError as error:
            log.warning("watch.failed", path=str(path), detail=error.message)
        except Exception:
            log.exception("watch.crashed", path=str(path))

    async def _look(self) -> dict[Path, Signature]:
        """Every file that counts and is not in a state that was handled; forgets files that are gone."""
        found = await anyio.to_thread.run_sync(_signatures, self._places)
        self._handled = {
            path: signature for path, signature in self._handled.items() if path in found
        }
        return {
            path: signature
            for path, signature in found.items()
            if self._handled.get(path) != signature
        }


class _Alarm(FileSystemEventHandler):
    """Rings for changes only: our own looking opens the directory, and must not ring."""

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = ring

    def on_created(self, event: FileSystemEvent) -> None:
        self._ring()

    on_modified = on_moved = on_closed = on_deleted = on_created


def signature_of(path: Path) -> Signature | None:
    """None for what is not a regular file, or is gone."""
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return Signature(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_complete_name(name: str) -> bool:
    """Whether a name is not one that editors, browsers and copy tools give to files they are still writing."""
    return not name.startswith((".", "#", "~")) and not name.lower().endswith(PARTIAL_SUFFIXES)


def _signatures(places: Mapping[Path, Callable[[str], bool]]) -> dict[Path, Signature]:
    return dict(_iter_signatures(places))


def _iter_signatures(
    places: Mapping[Path, Callable[[str], bool]],
) -> Iterator[tuple[Path, Signature]]:
    for directory, counts in places.items():
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in filter(counts, names):
            if signature := signature_of(directory / name):
                yield directory / name, signature
