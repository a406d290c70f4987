"""Copy what a live checkout has over its base commit into a layer. Sync; runs in workers.

A backend surveys the tree: what has to be in the layer, with the stat of each path. The copy is
whole when a survey after it finds what one before it found, so the tree was as the layer is at the
beginning of the last one. What changes meanwhile is copied again. The tree is read as its owner,
through directories that no link or mount leads to; the layer's files are the daemon's, their times
and modes the client's. (Before Linux 6.13 two changes of one file within a tick of the clock, 4 ms,
have one ctime, and look like one.)
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ...errors import CheckoutBusyError
from ...host.credentials import ActingAs
from ...host.files import (
    CREATE,
    FOR_READING,
    copy_bytes,
    full_disk_named,
    make_whiteout,
    opened,
    write_all,
)
from ...host.trash import remove_tree
from ...model import utc_now
from ..backend import CopyRule, Taken
from ..files.manifest import clock_ns
from ..files.reader import TreeReader, parents
from ..patches.worktree import denials_named
from .content import read_attributes
from .pieces import Piece, Pieces, Where, select

_ROUNDS = 5
_BATCH = 64
_LONG_BYTES = 1 << 16  # a longer file is copied in the kernel
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)


def copy_layer(
    directory: Path,
    survey: Callable[[], Pieces],
    client: TreeReader,
    owner: ActingAs,
    what: CopyRule,
    *,
    upper: TreeReader | None = None,
    own: Path | None = None,
    earlier: Path | None = None,
) -> Taken:
    """Copy what `survey` finds into the new `directory`, as far as `what` says, until it finds
    nothing else.

    What did not change since the layer `earlier` of the same checkout was made is linked from it;
    where nothing did, no layer is made, and the answer says so.

    Raises ForkTooLargeError, CheckoutBusyError, OwnerDeniedError, DiskFullError.
    """
    with full_disk_named("a layer"), denials_named(owner.owner):
        locked = _Locked(client, owner)
        try:
            readers = {Where.CLIENT: client, Where.UPPER: upper}
            copy = _Copy(directory, readers, owner, own, earlier)
            return _copy(copy, lambda: locked.see(survey()), what)
        finally:
            locked.restore()


def _copy(copy: "_Copy", survey: Callable[[], Pieces], what: CopyRule) -> Taken:
    wanted, copied = Pieces(), Pieces()
    before: Pieces | None = None
    left_out, has_git = dict[str, int](), True
    began_ns = clock_ns()
    for _ in range(_ROUNDS):
        at, found = utc_now(), survey()
        if found == before:
            copy.record(wanted, began_ns)
            return _taken(at, wanted, left_out, has_git, is_same=False)
        wanted, left_out, has_git = select(found, what)
        if before is None and copy.is_same(wanted):
            return _taken(at, wanted, left_out, has_git, is_same=True)
        unlocked = copy.bring(copied, wanted)
        copied, before = wanted | unlocked, found | unlocked
    raise CheckoutBusyError(
        f"cannot copy the checkout: it changed during each of {_ROUNDS} looks",
        hint="stop what writes in it, or try again when it writes less",
    )


def _taken(
    at: datetime, wanted: Pieces, left_out: dict[str, int], has_git: bool, *, is_same: bool
) -> Taken:
    files = sum(not piece.is_directory for piece in wanted.values())
    size = sum(piece.size for piece in wanted.values() if stat.S_ISREG(piece.mode))
    return Taken(at, files, size, left_out, has_git, is_same)


class _Locked:
    """Directories that their owner locked: opening one takes that off, and it is put back."""

    def __init__(self, client: TreeReader, owner: ActingAs) -> None:
        self._client = client
        self._owner = owner
        self._modes: dict[bytes, int] = {}

    def see(self, found: Pieces) -> Pieces:
        """Note those of a first survey, and undo in a later one what opening changed."""
        for path, piece in found.items():
            if not piece.is_directory or not piece.is_clients:
                continue
            mode = self._modes.get(path)
            if mode is None and piece.mode & stat.S_IRWXU != stat.S_IRWXU:
                self._modes[path] = piece.mode
            elif mode is not None and piece.mode == mode | stat.S_IRWXU:
                found[path] = piece._replace(mode=mode)
        return found

    def restore(self) -> None:
        with self._owner:
            for path, mode in sorted(self._modes.items(), reverse=True):
                seen = self._client.find_stat(path)
                if seen and seen.st_mode == mode | stat.S_IRWXU:
                    directory, name = self._client.locate(path)
                    with opened(self._owner.open_directory(directory, name)) as fd:
                        os.fchmod(fd, stat.S_IMODE(mode))


def record_path(layer: bytes) -> bytes:
    """The file beside a layer that has the stats of what was copied."""
    return layer + b".stats"


def _read_record(layer: Path) -> Pieces | None:
    with suppress(OSError, ValueError), open(record_path(os.fsencode(layer)), "rb") as file:
        return {
            path.encode("latin-1"): Piece(Where[where], *numbers)
            for path, (where, *numbers) in json.load(file).items()
        }
    return None


class _Read(NamedTuple):
    """What was read of the client's at a path: content, a link's target, or a long open file."""

    data: bytes = b""
    file: int = -1
    attributes: Mapping[str, bytes] = MappingProxyType({})


class _Copy:
    """Writes pieces into a layer. Plain paths do: nobody but the daemon enters its directory."""

    def __init__(
        self,
        directory: Path,
        readers: Mapping[Where, TreeReader | None],
        owner: ActingAs,
        own: Path | None,
        earlier: Path | None,
    ) -> None:
        self._directory = os.fsencode(directory) + b"/"
        self._readers = readers
        self._owner = owner
        self._own = os.fsencode(own or directory) + b"/"
        self._earlier = os.fsencode(earlier or directory) + b"/"
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._recorded = _read_record(earlier) if earlier else None
        self._attributes: dict[bytes, Mapping[str, bytes]] = {}

    def bring(self, copied: Pieces, wanted: Pieces) -> Pieces:
        """Bring the layer from one survey to the next, both in the order of paths; answers the
        pieces that reading changed.
        """
        with suppress(FileExistsError):
            os.mkdir(self._directory, 0o755)
        for path in reversed([at for at, piece in copied.items() if wanted.get(at) != piece]):
            is_kept = path in wanted and wanted[path].is_directory and copied[path].is_directory
            if not is_kept:
                remove_tree(Path(os.fsdecode(self._directory + path)))
        new = {path: piece for path, piece in wanted.items() if copied.get(path) != piece}
        unlocked: Pieces = {}
        todo = iter(new.items())
        while batch := list(islice(todo, _BATCH)):
            self._put_all(batch, unlocked)
        touched = {above for path in new for above in parents(path)} | new.keys()
        for path in sorted(touched & wanted.keys(), reverse=True):
            if (piece := wanted[path]).is_directory:
                self._finish_directory(path, piece)
        return unlocked

    def _put_all(self, batch: Sequence[tuple[bytes, Piece]], unlocked: Pieces) -> None:
        read: dict[bytes, _Read | None] = {}
        try:
            with self._owner:
                for path, piece in batch:
                    if piece.is_clients and not self._is_recorded(path, piece):
                        read[path] = self._read(path, piece, unlocked)
            for path, piece in batch:
                if piece.where is Where.HIDDEN:
                    make_whiteout(None, self._directory + path)
                elif piece.where is Where.OWN:
                    self._link(path, piece)
                elif path in read or not self._share(path):
                    if path not in read:
                        with self._owner:
                            read[path] = self._read(path, piece, unlocked)
                    self._write(path, piece, read[path])
        finally:
            for each in filter(None, read.values()):
                if each.file >= 0:
                    os.close(each.file)

    def _is_recorded(self, path: bytes, piece: Piece) -> bool:
        """Whether the earlier layer has it as it is."""
        is_known = self._recorded is not None and self._recorded.get(path) == piece
        return is_known and not piece.is_directory

    def is_same(self, wanted: Pieces) -> bool:
        """Whether the earlier layer has just this.

        What was not changed since its copy was not changed when this survey began either.
        """
        return wanted == self._recorded

    def _share(self, path: bytes) -> bool:
        """Take a file from the earlier layer; False where that is gone, or has 65,000 names."""
        try:
            os.link(self._earlier + path, self._directory + path, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _read(self, path: bytes, piece: Piece, unlocked: Pieces) -> _Read | None:
        """Read what is the client's at a path; None where it has become something else."""
        reader = self._readers[piece.where]
        assert reader is not None
        try:
            if piece.is_directory:
                directory, _ = reader.locate(path + b"/")
                return _Read(attributes=read_attributes(directory))
            directory, name = reader.locate(path)
            if stat.S_ISLNK(piece.mode):
                return _Read(os.readlink(name, dir_fd=directory))
            file = self._owner.open_regular(directory, name, keep_atime=True)
        except PermissionError as error:
            raise PermissionError(error.errno, error.strerror, path) from error
        except OSError as error:
            if error.errno not in _CHANGED:
                raise
            return None  # the next survey finds what it is now
        try:
            if not piece.mode & stat.S_IRUSR:  # it had another mode, and so has another ctime
                unlocked[path] = piece._replace(ctime_ns=os.fstat(file).st_ctime_ns)
            attributes = read_attributes(file)
            if piece.size > _LONG_BYTES:
                kept, file = file, -1
                return _Read(file=kept, attributes=attributes)
            return _Read(os.read(file, piece.size), attributes=attributes)
        finally:
            if file >= 0:
                os.close(file)

    def _write(self, path: bytes, piece: Piece, read: _Read | None) -> None:
        target = self._directory + path
        times = (piece.mtime_ns, piece.mtime_ns)
        if piece.is_directory:
            self._attributes[path] = read.attributes if read else {}
            with suppress(FileExistsError):
                os.mkdir(target, 0o700)
        elif read is None:
            return
        elif stat.S_ISLNK(piece.mode):
            os.symlink(read.data, target)
            os.utime(target, ns=times, follow_symlinks=False)
        else:
            with opened(os.open(target, CREATE, piece.permissions)) as file:
                if read.file >= 0:
                    copy_bytes(read.file, file, piece.size)
                elif read.data:
                    write_all(file, read.data)
                for name, value in read.attributes.items():
                    os.setxattr(file, name, value)
                os.utime(file, ns=times)
                if piece.permissions & self._umask:
                    os.fchmod(file, piece.permissions)

    def record(self, pieces: Pieces, began_ns: int) -> None:
        """Keep the stats beside the layer, for the next one. Those of the present tick of the clock
        may be the same after another change.
        """
        kept = {
            path.decode("latin-1"): (piece.where.name, *piece[1:])
            for path, piece in pieces.items()
            if piece.ctime_ns < began_ns
        }
        with opened(os.open(record_path(self._directory[:-1]), CREATE, 0o600)) as file:
            write_all(file, json.dumps(kept).encode())

    def _link(self, path: bytes, piece: Piece) -> None:
        """Take a path from the layer below. Nobody changes a layer's files: two may share one."""
        source = self._own + path
        if piece.is_directory:
            with opened(os.open(source, os.O_RDONLY)) as directory:
                read = _Read(attributes=read_attributes(directory))
            self._write(path, piece, read)
            return
        try:
            os.link(source, self._directory + path, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK or not stat.S_ISREG(piece.mode):  # 65,000 on ext4
                raise
            with opened(os.open(source, FOR_READING)) as file:
                self._write(path, piece, _Read(file=file, attributes=read_attributes(file)))

    def _finish_directory(self, path: bytes, piece: Piece) -> None:
        """Give a directory, once all in it is written, its attributes, mode and time."""
        target = self._directory + path
        for name, value in self._attributes.get(path, {}).items():
            os.setxattr(target, name, value)
        os.chmod(target, piece.permissions)
        os.utime(target, ns=(piece.mtime_ns, piece.mtime_ns))
