"""Watch files that people change: the directory of datasets, the configuration file.

A file is handled once it has the same stat twice, a moment apart, and was not handled in that state
before. A failure is not retried until the file changes. inotify only wakes the watch: its queue can
overflow silently and its instances can run out, so the files are also checked every minute.
"""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from ..errors import MirrordError
from ..telemetry import log

# of Chrome (.crdownload), Firefox (.part), Safari (.download), WinSCP (.filepart), vim (.swp, .swx)
PARTIAL_SUFFIXES = (
    *(".tmp", ".temp", ".part", ".partial", ".crdownload", ".download"),
    *(".swp", ".swx", ".lock", ".filepart", "~"),
)


class Signature(NamedTuple):
    """A file's state by stat. A rewrite or a rename changes at least one of the times."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def changed_at(self) -> float:
        """The time of the last change or rename, in seconds since 1970."""
        return max(self.mtime_ns, self.ctime_ns) / 1e9


class Watch:
    """Calls `handle` with each changed file of `directory` whose name `matches`.

    `known` are files that an earlier daemon handled. A file must not change for `quiet`. `interval`
    is for checks without inotify.
    """

    def __init__(
        self,
        directory: Path,
        matches: Callable[[str], bool],
        handle: Callable[[Path], Awaitable[object]],
        *,
        known: Mapping[Path, Signature] | None = None,
        quiet: timedelta = timedelta(seconds=1),
        interval: timedelta = timedelta(minutes=1),
    ) -> None:
        self._directory, self._matches, self._handle = directory, matches, handle
        self._handled: dict[Path, Signature] = dict(known or {})
        self._quiet_s, self._interval_s = quiet.total_seconds(), interval.total_seconds()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._observer = Observer()

    async def open(self) -> None:
        """Start watching. Existing files are handled too."""
        await anyio.to_thread.run_sync(self._observe, asyncio.get_running_loop())
        self._woken.set()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        # one that could not start, for want of inotify instances, has no thread to join
        if self._observer.is_alive():
            self._observer.stop()
            await anyio.to_thread.run_sync(self._observer.join)

    def _observe(self, loop: asyncio.AbstractEventLoop) -> None:
        wake = partial(loop.call_soon_threadsafe, self._woken.set)
        handler = _ChangeHandler(wake, self._matches)
        try:
            self._observer.schedule(handler, str(self._directory), recursive=False)
            self._observer.start()
        except OSError as error:  # no inotify instances left, or the directory is gone
            log.warning("watch.degraded", reason=error.strerror)

    async def _follow(self) -> None:
        while True:
            # also without an event: watchdog swallows an overflow of inotify's queue
            with anyio.move_on_after(self._interval_s):
                await self._woken.wait()
            # before the look: what changes during it is looked at again
            self._woken.clear()
            pending = await self._unhandled()
            while pending:
                # a file that is still being written has another signature then
                await asyncio.sleep(self._quiet_s)
                signatures = await self._unhandled()
                for path, signature in signatures.items():
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
                    for path, signature in signatures.items()
                    if self._handled.get(path) != signature
                }

    async def _unhandled(self) -> dict[Path, Signature]:
        """Files that count, in a state not handled before; forgets files that are gone."""
        signatures = await anyio.to_thread.run_sync(_signatures, self._directory, self._matches)
        self._handled = {path: seen for path, seen in self._handled.items() if path in signatures}
        return {path: seen for path, seen in signatures.items() if self._handled.get(path) != seen}


class _ChangeHandler(FileSystemEventHandler):
    """Calls `wake` on changes of files that match, and not on `opened` events, which the watch
    itself causes. A log beside the configuration would wake it 20 times a second.
    """

    def __init__(self, wake: Callable[[], object], matches: Callable[[str], bool]) -> None:
        self._wake, self._matches = wake, matches

    def on_created(self, event: FileSystemEvent) -> None:
        paths = map(os.fsdecode, (event.src_path, event.dest_path))
        if any(self._matches(os.path.basename(path)) for path in paths):
            self._wake()

    on_modified = on_moved = on_closed = on_deleted = on_created


def signature_of(path: Path) -> Signature | None:
    """Return the state of a regular file, None for anything else."""
    try:
        st = path.stat(follow_symlinks=False)
    except OSError:
        return None
    is_file = stat.S_ISREG(st.st_mode)
    state = (st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
    return Signature(*state) if is_file else None


def is_complete_name(name: str) -> bool:
    """Return False for names that programs give to files which they are still writing."""
    return not name.startswith((".", "#", "~")) and not name.lower().endswith(PARTIAL_SUFFIXES)


def _signatures(directory: Path, matches: Callable[[str], bool]) -> dict[Path, Signature]:
    signatures = {}
    with suppress(OSError):
        for name in filter(matches, sorted(os.listdir(directory))):
            if signature := signature_of(directory / name):
                signatures[directory / name] = signature
    return signatures
