"""What was to be removed and the disk did not let go, tried again: one that fails for a moment leaves no rubbish until a start.

Owns the list, in memory; whoever owns a directory finds the same by name at a start. Only for names that nobody uses again: what
has a name of its own is renamed first. Any thread may call.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

import structlog

from .files import clear_flags, mounted_on, names_in, open_child, open_directory, opened, unlock

PREFIX = ".trash-"
"""How the names begin of what is to be removed; a start removes what has one."""
_LOCKED = (errno.EPERM, errno.EACCES)

log = structlog.get_logger()


class Remains:
    """Of one directory of the state."""

    def __init__(self) -> None:
        self._stuck: set[Path] = set()

    def remove(self, path: Path) -> None:
        """Remove a file or a tree now, or else whenever the disk lets it go; one that is not there is fine."""
        if not try_to_remove(path) and path not in self._stuck:
            log.warning("removal.failed", path=path.name)
            self._stuck.add(path)

    def retry(self) -> bool:
        """Try what is left; answers whether nothing is."""
        self._stuck -= {path for path in list(self._stuck) if try_to_remove(path)}
        return not self._stuck


def try_to_remove(path: Path) -> bool:
    """Remove a file or a tree, as far as the disk lets; answers whether it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return not os.path.lexists(path)


def new_trash(directory: Path) -> Path:
    """A name in a checkout's directory for what shall go; nothing is there yet."""
    return directory / f"{PREFIX}{secrets.token_hex(8)}"


def find_trash(directory: Path) -> list[Path]:
    """What a crash left in a checkout's directory of things that had to go; a removal that it ended is one of them."""
    return list(directory.glob(f"{PREFIX}*"))


class TrashDirectory:
    """Takes names out of directories that belong to somebody else. To be closed."""

    def __init__(self, path: Path, *, has_room: bool = True) -> None:
        """Without room nothing is kept: what shall go is deleted at once."""
        self._path = path
        self._has_room = has_room
        self._fd: int | None = None
        self._count = 0

    def bury(self, directory: int, name: bytes) -> None:
        """Take away whatever `name` is; nothing there is fine."""
        if not self._has_room:
            remove(directory, name)
            return
        try:
            grave = self._opened()
            os.rename(name, b"%d" % self._count, src_dir_fd=directory, dst_dir_fd=grave)
        except FileNotFoundError:
            return
        except OSError:  # a flag or mode that keeps it, something mounted, a full disk
            remove(directory, name)
        self._count += 1

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _opened(self) -> int:
        if self._fd is None:
            with suppress(FileExistsError):  # an attempt before this one
                os.mkdir(self._path, 0o700)
            self._fd = open_directory(self._path)
            self._count = len(os.listdir(self._fd))
        return self._fd


def remove(directory: int, name: bytes) -> None:
    """Remove whatever `name` is, a whole directory included; nothing there is fine.

    A directory that is not empty is moved up beside `name` before it is emptied, so that no depth exhausts descriptors; a crash
    leaves such a `.gone-…` in `directory`. Where something resists, they are put back: whoever tries again knows only `name`.
    """
    graves = [name]
    try:
        while graves:
            if not _remove_one(directory, graves[-1]):
                _empty(directory, graves[-1], graves)
            else:
                graves.pop()
    except BaseException:
        _put_back(directory, graves[1:], name)
        raise


def _put_back(directory: int, graves: list[bytes], name: bytes) -> None:
    with suppress(OSError), opened(open_child(directory, name)) as fd:
        for grave in graves:
            with suppress(OSError):
                os.rename(grave, grave, src_dir_fd=directory, dst_dir_fd=fd)


def _remove_one(directory: int, name: bytes) -> bool:
    """Remove a file or an empty directory; False for a directory that is not empty."""
    try:
        return _unlink(directory, name)
    except OSError as error:
        if error.errno not in _LOCKED:
            raise
    unlock(directory, name)
    return _unlink(directory, name)


def _unlink(directory: int, name: bytes) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except IsADirectoryError:
        return _rmdir(directory, name)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise mounted_on(name) from error
        raise
    return True


def _rmdir(directory: int, name: bytes) -> bool:
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        if error.errno == errno.EBUSY:
            raise mounted_on(name) from error
        raise
    return True


def _empty(directory: int, name: bytes, graves: list[bytes]) -> None:
    """Remove what is in the directory `name`; adds to `graves` the names, now in `directory`, of what must be emptied first."""
    try:
        fd = open_child(directory, name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise mounted_on(name) from error
        raise
    with opened(fd):
        clear_flags(fd)
        for child in names_in(fd):
            if _remove_one(fd, child):
                continue
            grave = os.fsencode(PREFIX) + secrets.token_hex(8).encode()
            unlock(fd, child)
            os.rename(child, grave, src_dir_fd=fd, dst_dir_fd=directory)
            graves.append(grave)
