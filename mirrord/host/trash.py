"""Removing files and trees: now, in the background, and again after a failure.

To free its name at once, a tree is first renamed to `.trash-<id>` beside it: atomic, and after a
crash the next start finds it by the prefix. A tree that a client wrote to may have any modes,
flags, links and depth, may have mounts in it, and may be written to meanwhile: it is removed by
descriptors, and no device or pipe is opened.
"""

import asyncio
import errno
import os
import secrets
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from ..errors import MirrordError
from ..presence import matching
from ..telemetry import log
from .files import entries_in, mounted_on, open_child, open_directory, opened, unlock

TRASH_PREFIX = ".trash-"

T = TypeVar("T")
TakeDown = Callable[[], Awaitable[bool]]
RemoveTrees = Callable[[list[Path]], Awaitable[dict[Path, str]]]


def new_trash(directory: Path) -> Path:
    """Choose a free name in `directory` for something to be removed."""
    return directory / f"{TRASH_PREFIX}{secrets.token_hex(8)}"


def find_trash(directory: Path) -> list[Path]:
    """Find what a killed daemon left to be removed in `directory`."""
    return matching(directory, f"{TRASH_PREFIX}*")


async def _remove_in_thread(paths: list[Path]) -> dict[Path, str]:
    return await anyio.to_thread.run_sync(remove_trees, paths)


# trees of one user that wait for removal; then that user's next release waits too
_BACKLOG = 128
# paths that one call removes
_BATCH = 64


class Trash:
    """The queue of all removals. Belongs to one event loop.

    `remove_in_worker` removes trees and returns those that failed, with reasons: in a thread it
    would hold the interpreter lock against requests. A take-down of a few system calls runs in a
    thread, because on ext4 with `discard` and no journal each `rmdir` waits for the disk. A failed
    removal waits for `retry` and blocks no other. `whose` returns the user of the present task;
    each has a backlog.
    """

    def __init__(
        self,
        remove_in_worker: RemoveTrees = _remove_in_thread,
        whose: Callable[[], Hashable] = lambda: None,
    ) -> None:
        self._remove_in_worker = remove_in_worker
        self._whose = whose
        self._backlogs: Counter[Hashable] = Counter()
        # they wait for the disk more than for a processor; two were no faster (docs/limits.md)
        self._threads = ThreadPoolExecutor(8, "trash")
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[tuple[Path, ...], asyncio.Future[bool]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._has_room = asyncio.Event()
        self._failed: dict[tuple[Path, ...], TakeDown | None] = {}

    def add(self, *paths: Path, take_down: TakeDown | None = None) -> None:
        """Remove trees in the background; a missing one is fine.

        `take_down`, such as an unmount, runs before each try. It returns True if nothing is left to
        remove.
        """
        task = asyncio.get_running_loop().create_task(self._remove(paths, take_down))
        self._tasks.add(task)
        user = self._whose()
        self._backlogs[user] += 1
        task.add_done_callback(partial(self._end, user))

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run a few system calls that wait for the kernel or the disk, as a `take_down` does."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def keep_up(self) -> None:
        """Wait while the user's backlog is long: no user fills the disk faster than it is freed."""
        user = self._whose()
        while self._backlogs[user] > _BACKLOG:
            self._has_room.clear()
            await self._has_room.wait()

    async def settle(self) -> None:
        """Wait for the removals added so far, and retry failed ones."""
        if self._tasks:
            await asyncio.wait(self._tasks.copy())
        await self.retry()

    @property
    def count(self) -> int:
        """Count the removals that are running or failed."""
        return len(self._tasks) + len(self._failed)

    def remove(self, path: Path) -> None:
        """Remove a file or tree of ours now, or by `retry` if that fails. Any thread."""
        if not try_to_remove(path):
            log.warning("removal.failed", path=str(path))
            self._failed[(path,)] = None

    def discard(self, path: Path) -> None:
        """Free the name of a file or tree of ours, then remove it; fine if missing. Any thread."""
        with suppress(FileNotFoundError):
            self.remove(path.rename(new_trash(path.parent)))

    async def retry(self) -> bool:
        """Retry the failed removals; True if nothing is left."""
        # `remove` may add to it in another thread: each entry is taken, the dictionary stays
        failed = [(paths, self._failed.pop(paths)) for paths in list(self._failed)]
        await asyncio.gather(*(self._try(*entry) for entry in failed))
        return not self._failed

    async def close(self) -> None:
        """Finish what ends within seconds; the next start finds what is left."""
        running = [*self._tasks, *([self._sweeper] if self._sweeper else [])]
        if running:
            # of the 20 s that the whole engine has to close
            await asyncio.wait(running, timeout=5)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _end(self, user: Hashable, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._backlogs[user] -= 1
        if self._backlogs[user] == _BACKLOG:  # `keep_up` would wait again with more
            self._has_room.set()
        elif not self._backlogs[user]:
            del self._backlogs[user]

    async def _remove(self, paths: tuple[Path, ...], take_down: TakeDown | None) -> None:
        await asyncio.sleep(0.05)  # after the response: a thread would take the interpreter lock
        await self._try(paths, take_down)

    async def _try(self, paths: tuple[Path, ...], take_down: TakeDown | None) -> None:
        try:
            if take_down is not None and await take_down():
                return
            loop = asyncio.get_running_loop()
            is_gone = self._waiting.setdefault(paths, loop.create_future())
            if self._sweeper is None or self._sweeper.done():
                self._sweeper = loop.create_task(self._sweep())
            if await is_gone:
                return
        except (MirrordError, OSError) as error:
            log.warning("removal.failed", path=str(paths[0]), problem=str(error))
        self._failed[paths] = take_down

    async def _sweep(self) -> None:
        while batch := [*self._waiting][:_BATCH]:
            paths = [path for entry in batch for path in entry]
            try:
                problems = await self._remove_in_worker(paths)
            except MirrordError as error:
                problems = dict.fromkeys(paths, error.message)
            for path, problem in problems.items():
                log.warning("removal.failed", path=str(path), problem=problem)
            for entry in batch:
                waiting = self._waiting.pop(entry)
                if not waiting.done():
                    waiting.set_result(problems.keys().isdisjoint(entry))


class TrashDirectory:
    """A private directory that names are moved to out of a client's directories.

    A rename costs the same for a file and for a directory of thousands, while a removal waits for
    the disk. The directory is made when first needed; the owner of this object closes it and
    removes the directory. With `has_room=False`, on a full disk, everything is removed at once.
    """

    def __init__(self, path: Path, *, has_room: bool = True) -> None:
        self._path = path
        self._has_room = has_room
        self._fd: int | None = None
        self._count = 0

    def discard(self, directory: int, name: bytes) -> None:
        """Move a file or directory away; a missing one is fine."""
        if not self._has_room:
            remove(directory, name)
            return
        try:
            if self._fd is None:
                with suppress(FileExistsError):  # made by an earlier attempt
                    os.mkdir(self._path, 0o700)
                self._fd = open_directory(self._path)
                self._count = len(os.listdir(self._fd))
            os.rename(name, b"%d" % self._count, src_dir_fd=directory, dst_dir_fd=self._fd)
        except FileNotFoundError:
            return
        except OSError:  # a flag or mode, a mount, a full disk
            remove(directory, name)
        self._count += 1

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def try_to_remove(path: Path) -> bool:
    """Remove a file or tree; return whether it is gone."""
    return not remove_trees([path])


def remove_trees(paths: Iterable[Path]) -> dict[Path, str]:
    """Remove each tree; return the reason for each that failed. Runs in workers."""
    problems: dict[Path, str] = {}
    for path in paths:
        try:
            remove_tree(path)
        except (MirrordError, OSError) as error:
            problems[path] = str(error)
    return problems


def remove_tree(path: Path) -> None:
    """Remove a file or tree of any modes and flags; a missing one is fine."""
    with suppress(FileNotFoundError), opened(open_directory(path.parent)) as above:
        remove(above, os.fsencode(path.name))


def remove(directory: int, name: bytes) -> None:
    """Remove `name`, a file or a directory with its content; a missing one is fine.

    A directory 32 levels down is moved up beside `name` before it is emptied, so that no depth
    exhausts descriptors; a crash leaves such a `.trash-…` in `directory`. After an error they are
    moved back, because the next try knows only `name`.
    """
    moved = [name]
    try:
        while moved:
            if _remove_one(directory, moved[-1]):
                moved.pop()
            else:
                _empty(directory, moved[-1], directory, moved)
    except BaseException:
        with suppress(OSError), opened(open_child(directory, name)) as fd:
            for aside in moved[1:]:
                with suppress(OSError):
                    os.rename(aside, aside, src_dir_fd=directory, dst_dir_fd=fd)
        raise


def _remove_one(directory: int, name: bytes, *, is_directory: bool = False) -> bool:
    """Remove a file or an empty directory; False if a directory is not empty.

    `is_directory` is a guess, which saves a system call.
    """
    for attempt in (1, 2):
        try:
            try:
                (os.rmdir if is_directory else os.unlink)(name, dir_fd=directory)
            except (IsADirectoryError, NotADirectoryError):
                (os.unlink if is_directory else os.rmdir)(name, dir_fd=directory)
        except FileNotFoundError:
            return True
        except OSError as error:
            # POSIX allows rmdir EEXIST for ENOTEMPTY; ENOTDIR: its kind changed between two calls
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return False
            # a mount point in this namespace; where it is one in others only, the kernel detaches
            # that mount
            if error.errno == errno.EBUSY:
                raise mounted_on(name) from error
            # EPERM: an immutable or append-only flag; EACCES: the directory lost its w or x bit
            if attempt == 2 or error.errno not in (errno.EPERM, errno.EACCES):
                raise
            unlock(directory, name)
        else:
            return True
    return False


# of open directories; what is deeper is moved aside and removed on its own
_DEPTH = 32


def _empty(directory: int, name: bytes, top: int, moved: list[bytes], level: int = 1) -> None:
    """Empty a directory. Ones too deep are moved up to `top`, their new names added to `moved`."""
    try:
        fd = open_child(directory, name)
    except (FileNotFoundError, NotADirectoryError):
        # removed or replaced meanwhile: the caller tries once more to remove what has the name
        return
    except OSError as error:
        # to go on would delete the files of another file system
        if error.errno == errno.EXDEV:
            raise mounted_on(name) from error
        raise
    with opened(fd):
        for child, kind in entries_in(fd):
            is_directory = kind == stat.S_IFDIR
            is_gone = not is_directory and _remove_one(fd, child)
            while not is_gone:
                if level == _DEPTH:
                    aside = os.fsencode(new_trash(Path()))
                    # a directory must be writable itself to get another parent (rename(2))
                    unlock(fd, child)
                    os.rename(child, aside, src_dir_fd=fd, dst_dir_fd=top)
                    moved.append(aside)
                    break
                _empty(fd, child, top, moved, level + 1)
                is_gone = _remove_one(fd, child, is_directory=is_directory)
