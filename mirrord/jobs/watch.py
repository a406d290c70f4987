"""Files that people change with plain tools: the directory of datasets, the configuration file.

A file is handled when it was quiet for a moment, looks the same on two looks, and was not handled
in that state before. A failure is not retried until the file changes. inotify is only the alarm:
its queue overflows silently and its instances run out, and `touch` on a timer finds the same.
"""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from ..errors import MirrordError
from ..telemetry import log

PARTIAL_SUFFIXES = (
    *(".tmp", ".temp", ".part", ".partial", ".crdownload", ".download"),
    *(".swp", ".swx", ".lock", ".filepart", "~"),
)


class Signature(NamedTuple):
    """A file's state by stat: a rewrite or a rename changes at least one of the times."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def changed_at(self) -> float:
        """Seconds since 1970 of the last change, a rename included."""
        return max(self.mtime_ns, self.ctime_ns) / 1e9


class Watch:
    """Calls `handle` with every file that came to rest in a state not handled before.

    `counts` tells the names in `directory` that count. `known` are files that an earlier daemon
    handled.
    """

    def __init__(
        self,
        directory: Path,
        counts: Callable[[str], bool],
        handle: Callable[[Path], Awaitable[object]],
        *,
        known: Mapping[Path, Signature] | None = None,
        quiet: timedelta = timedelta(seconds=1),
    ) -> None:
        self._directory, self._counts, self._handle = directory, counts, handle
        self._handled: dict[Path, Signature] = dict(known or {})
        self._quiet_s = quiet.total_seconds()
        self._touched = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._observer = Observer()

    async def open(self) -> None:
        """Start watching; files that exist already are found too."""
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
            self._observer.schedule(alarm, str(self._directory), recursive=False)
            self._observer.start()
        except OSError as error:  # no inotify instances left, or the directory is gone
            log.warning("watch.degraded", reason=error.strerror)

    async def _follow(self) -> None:
        while True:
            await self._touched.wait()
            self._touched.clear()
            pending = await self._unhandled()
            while pending:
                await asyncio.sleep(self._quiet_s)
                found = await self._unhandled()
                for path, signature in found.items():
                    if pending.get(path) != signature:
                        continue
                    self._handled[path] = signature
                    try:
                        await self._handle(path)
                    except MirrordError as error:
                        log.warning("watch.failed", path=str(path), detail=error.message)
                    except Exception:
                        log.exception("watch.crashed", path=str(path))
                pending = {
                    path: signature
                    for path, signature in found.items()
                    if self._handled.get(path) != signature
                }

    async def _unhandled(self) -> dict[Path, Signature]:
        """Files that count, in a state not handled before; forgets files that are gone."""
        found = await anyio.to_thread.run_sync(_signatures, self._directory, self._counts)
        self._handled = {path: each for path, each in self._handled.items() if path in found}
        return {path: each for path, each in found.items() if self._handled.get(path) != each}


class _Alarm(FileSystemEventHandler):
    """Rings for changes, and not for our own look, which opens the directory."""

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = ring

    def on_created(self, event: FileSystemEvent) -> None:
        self._ring()

    on_modified = on_moved = on_closed = on_deleted = on_created


def signature_of(path: Path) -> Signature | None:
    """None for anything but a regular file."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    is_file = stat.S_ISREG(found.st_mode)
    facts = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return Signature(*facts) if is_file else None


def is_complete_name(name: str) -> bool:
    """Whether a name is not one that programs give to files that they are still writing."""
    return not name.startswith((".", "#", "~")) and not name.lower().endswith(PARTIAL_SUFFIXES)


def _signatures(directory: Path, counts: Callable[[str], bool]) -> dict[Path, Signature]:
    found = {}
    with suppress(OSError):
        for name in filter(counts, sorted(os.listdir(directory))):
            if signature := signature_of(directory / name):
                found[directory / name] = signature
    return found
