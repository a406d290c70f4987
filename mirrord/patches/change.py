"""Changes of several files in a checkout, all or nothing, as its owner.

New content is written under temporary names beside where it goes. Then what it replaces is renamed
away, and it is renamed in; only then is anything removed. Whatever fails before that is undone from
the journal, by this call or, if it was killed, by `recover`. The owner may write meanwhile: what is
there instead of what a step expects is kept, and the change is undone.
"""

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckoutBusyError
from ..git.modes import EXECUTABLE, SUBMODULE, SYMLINK
from ..host.files import mounted_on, rename_new, shown_path
from ..host.processes import ActingAs
from ..trees.reader import TreeReader, parents
from ..trees.writer import TreeWriter
from . import journal as journals
from .journal import Cleared, Journal, PathStep

Contents = Callable[[bytes], bytes]
Expected = Mapping[bytes, os.stat_result | None]

_GONE = (errno.ENOENT, errno.ENOTDIR)
# POSIX allows either for a directory that is not empty
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)


class JournaledChange:
    """A change below `root`, a directory descriptor, with its journal in `private`.

    `reader` reads the tree; `owner` owns it.
    """

    def __init__(self, root: int, owner: ActingAs, reader: TreeReader, private: Path) -> None:
        self._root, self._owner, self._reader, self._private = root, owner, reader, private

    def make(
        self,
        removed: Collection[bytes],
        written: Mapping[bytes, int],
        contents: Contents,
        expected: Expected,
    ) -> None:
        """Remove the `removed` paths, and write the `written` ones, given with their modes.

        `contents` returns the bytes of a file, or a link's target. `expected` has the stats of
        paths as the change was computed for. Raises CheckoutBusyError where the owner changed one
        since, PermissionError with its path where the owner may not, OSError on a full disk; then
        the tree is as before, or the journal stays.
        """
        with self._owner:
            journal = self._plan(removed, written)
        journals.begin(self._private, journal)
        with TreeWriter(self._root, self._owner, mtime_ns=journal.mtime_ns) as writer:
            try:
                self._stage(journal, writer, written, contents)
                with self._owner:
                    self._swap(journal, writer, expected)
                journals.complete(self._private)
            except BaseException:
                with suppress(OSError, CheckoutBusyError):  # else `recover` is called
                    self._undo(journal, writer)
                    journals.end(self._private)
                raise
            # all is in place: what could not be removed is left to the next call (`recover`)
            with suppress(OSError, CheckoutBusyError):
                self._finish(journal, writer)
                journals.end(self._private)

    def recover(self) -> None:
        """Undo or finish a change that was not completed; the journal stays where that fails."""
        journal = journals.read(self._private)
        if journal is not None:
            with TreeWriter(self._root, self._owner, mtime_ns=journal.mtime_ns) as writer:
                (self._finish if journal.is_done else self._undo)(journal, writer)
        journals.end(self._private)

    # -- the plan ----------------------------------------------------------------------------------

    def _plan(self, removed: Collection[bytes], written: Mapping[bytes, int]) -> Journal:
        old, made, cleared = dict[bytes, None](), dict[bytes, None](), dict[bytes, int]()

        def move_away(path: bytes) -> None:
            for below, seen in self._reader.iter_stats_below(path):
                if stat.S_ISDIR(seen.st_mode):
                    cleared[below] = stat.S_IMODE(seen.st_mode)
                else:
                    old[below] = None

        def is_there(path: bytes) -> bool:
            """Whether a directory is there and stays."""
            seen = None if path in cleared or path in old else self._reader.find_stat(path)
            if seen is not None and not stat.S_ISDIR(seen.st_mode):
                raise _busy(path)
            return seen is not None

        for path in removed:
            move_away(path)
        for path, mode in written.items():
            seen = self._reader.find_stat(path)
            if seen and (mode != SUBMODULE or not stat.S_ISDIR(seen.st_mode)):
                move_away(path)
        staying = {b""}
        for path, mode in written.items():
            above = (*parents(path), path) if mode == SUBMODULE else parents(path)
            for directory in above:
                if directory not in staying and directory not in made:
                    if is_there(directory):
                        staying.add(directory)
                    else:
                        made[directory] = None
        new = [path for path, mode in written.items() if mode != SUBMODULE]

        def beside(path: bytes) -> bytes:
            above = reversed((b"", *parents(path)))
            return next(
                directory
                for directory in above
                if directory not in made and directory not in cleared
            )

        return Journal(
            secrets.token_hex(8),
            time.time_ns(),
            tuple(
                PathStep(path, beside(path), path in old, path in written)
                for path in dict.fromkeys((*old, *new))
            ),
            tuple(made),
            tuple(Cleared(path, beside(path), mode) for path, mode in cleared.items()),
        )

    # -- its steps ---------------------------------------------------------------------------------

    def _stage(
        self,
        journal: Journal,
        writer: TreeWriter,
        written: Mapping[bytes, int],
        contents: Contents,
    ) -> None:
        for name, step in journal.iter_new():
            data, mode = contents(step.path), written[step.path]
            with _named(step.path):
                if mode == SYMLINK:
                    writer.write_symlink(name, data)
                else:
                    writer.write_file(name, data, executable=mode == EXECUTABLE)

    def _swap(self, journal: Journal, writer: TreeWriter, expected: Expected) -> None:
        # files first, then the directories that are empty by then; what is new comes last
        for name, step in journal.iter_old():
            with _named(step.path):
                self._move(step.path, name)
                self._must_be_as(expected, step.path, name)
        for name, cleared in journal.iter_cleared():
            with _named(cleared.path):
                self._clear(cleared.path, name)
        for path in journal.made:
            with _named(path):
                writer.make_directories(path)
        for name, step in journal.iter_new():
            with _named(step.path):
                self._move(step.path, name, back=True)

    def _clear(self, path: bytes, name: bytes) -> None:
        """Move an emptied directory away: to make it again would need disk space."""
        try:
            self._reader.leave(path)
            self._move(path, name)
            if self._reader.names_in(name):  # the owner just made something in it
                raise _busy(path)
        except OSError as error:
            if error.errno != errno.EXDEV:  # of overlayfs, for a directory of the layers below
                raise
            self._remove_directory(path)

    def _must_be_as(self, expected: Expected, path: bytes, name: bytes) -> None:
        """Raise CheckoutBusyError if what was moved away is not what the change is made for."""
        before, seen = expected.get(path), self._reader.find_stat(name)
        if path in expected and (before is None or seen is None or _key(before) != _key(seen)):
            raise _busy(path)

    def _finish(self, journal: Journal, writer: TreeWriter) -> None:
        """Remove all that can be of what was moved away, then raise the first failure."""
        failures: list[Exception] = []
        with self._owner:
            for name, _ in journal.iter_old():
                with _collected(failures):
                    self._unlink(name)
            for name, _ in journal.iter_cleared():
                with _collected(failures, *_GONE):
                    self._remove_directory(name)
            for _, step in journal.iter_old():
                if not step.has_new:
                    self._reader.leave(step.beside)
                    writer.remove_empty_above(step.path)
        if failures:
            raise failures[0]

    def _undo(self, journal: Journal, writer: TreeWriter) -> None:
        """Put back all that can be, then raise the first failure; may be called again."""
        failures: list[Exception] = []
        with self._owner:
            for name, step in journal.iter_new():
                with _collected(failures):
                    self._unlink(name)
                    seen = self._reader.find_stat(step.path)
                    if seen and _is_ours(seen, journal):
                        self._unlink(step.path)
            for path in reversed(journal.made):
                with _collected(failures, *_TAKEN, *_GONE):
                    self._remove_directory(path)
            for name, cleared in reversed([*journal.iter_cleared()]):
                with _collected(failures):
                    self._restore_directory(name, cleared, writer)
            for name, step in journal.iter_old():
                with _collected(failures):
                    self._move_back(name, step.path, writer)
        if failures:
            raise failures[0]

    def _restore_directory(self, name: bytes, to: Cleared, writer: TreeWriter) -> None:
        if self._reader.find_stat(name):
            self._reader.leave(name)
            try:
                self._move(to.path, name, back=True)
            except FileExistsError:  # the owner made something there meanwhile
                self._remove_directory(name)
        elif self._reader.find_stat(to.path) is None:
            writer.make_directories(to.path)
            directory, last = self._reader.locate(to.path)
            os.chmod(last, to.mode, dir_fd=directory)

    def _move_back(self, name: bytes, path: bytes, writer: TreeWriter) -> None:
        """Move a file back, unless its owner put something else there meanwhile: that is newer."""
        if self._reader.find_stat(name) is None:
            return
        above = path.rpartition(b"/")[0]
        if self._reader.find_stat(above) is None:
            writer.make_directories(above)
        try:
            self._move(path, name, back=True)
        except (FileExistsError, FileNotFoundError) as error:
            seen = self._reader.find_stat(above)
            if isinstance(error, FileNotFoundError) and seen and stat.S_ISDIR(seen.st_mode):
                raise
            self._unlink(name)

    def _move(self, path: bytes, temporary: bytes, *, back: bool = False) -> None:
        """Rename a path to a temporary name, or `back`; FileExistsError where the name is taken."""
        # The reader keeps both open: a temporary name is in a directory above the path.
        here = self._reader.locate(path)
        there = self._reader.locate(temporary)
        rename_new(*((*there, *here) if back else (*here, *there)))

    def _remove_directory(self, path: bytes) -> None:
        self._reader.leave(path)
        directory, name = self._reader.locate(path)
        os.rmdir(name, dir_fd=directory)

    def _unlink(self, path: bytes) -> None:
        with suppress(FileNotFoundError):
            directory, name = self._reader.locate(path)
            os.unlink(name, dir_fd=directory)


def _key(seen: os.stat_result) -> tuple[int, int, int]:
    # not the inode, which changes where overlayfs copies a file up from another file system
    return seen.st_mode, seen.st_size, seen.st_mtime_ns


def _is_ours(seen: os.stat_result, journal: Journal) -> bool:
    """Whether the change wrote this file, and its owner did not write to it since."""
    whole_s = journal.mtime_ns - journal.mtime_ns % 10**9  # ext4 with inodes of 128 bytes
    return seen.st_mtime_ns in (journal.mtime_ns, whole_s) and not stat.S_ISDIR(seen.st_mode)


@contextmanager
def _unless(*numbers: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


@contextmanager
def _collected(failures: list[Exception], *ignored: int) -> Iterator[None]:
    """Go on after an error of one step; errors with the `ignored` numbers are none."""
    try:
        with _unless(*ignored):
            yield
    except (CheckoutBusyError, OSError) as error:
        failures.append(error)


@contextmanager
def _named(path: bytes) -> Iterator[None]:
    """Name the path in errors; those of a race with the owner become CheckoutBusyError."""
    try:
        yield
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, path) from error
    except OSError as error:
        # EXDEV: across a mount point; EBUSY: a mount point itself, for rename and rmdir
        if error.errno in (errno.EXDEV, errno.EBUSY):
            raise mounted_on(path) from error
        if error.errno in (*_GONE, *_TAKEN, errno.EISDIR):
            raise _busy(path) from error
        raise


def _busy(path: bytes) -> CheckoutBusyError:
    return CheckoutBusyError(
        f"cannot change {shown_path(path)}: another process changes it at the same time",
        hint="stop the processes in the checkout, then try again; nothing was changed",
    )
