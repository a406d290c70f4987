"""Copy what a live checkout has over its base into a layer. Runs in workers.

A backend surveys the tree: which paths the layer needs, with the stat of each. The copy is complete
when the survey after it equals the one before it: the tree was then as the layer is. The tree is
read as its owner; the layer's files belong to the daemon and keep their times and modes.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..errors import CheckoutBusyError, full_disk_named
from ..host.files import CREATE, FOR_READING, copy_bytes, make_whiteout, opened, write_all
from ..host.processes import ActingAs
from ..host.trash import remove_tree
from ..model import utc_now
from ..patches.worktree import denials_named
from ..quoting import decode_name, encode_name
from ..trees.layer import read_attributes
from ..trees.manifest import clock_ns
from ..trees.reader import TreeReader, parents
from ..trees.relocation import Relocation
from .pieces import CopyRule, Piece, Pieces, Taken, Where, select

# of a path that has become something else; ESTALE is overlayfs's, of what was renamed under it
_CHANGED = (
    # EINVAL: no link any more, for readlink; ENXIO: a socket, for open
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO),
    errno.ESTALE,
)


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
    relocation: Relocation | None = None,
) -> Taken:
    """Copy what `survey` finds and `what` selects into the new `directory`, until both are equal.

    Files that are unchanged since the copy `earlier` of the same checkout are linked from there; if
    all are, no layer is made (`Taken.is_same`).

    Raises TooLargeError, CheckoutBusyError, OwnerDeniedError, DiskFullError.
    """
    with full_disk_named("a layer"), denials_named(owner.owner):
        locked = _Locked(client, owner)
        readers = {Where.CLIENT: client, Where.UPPER: upper}
        copy = _Copy(directory, readers, owner, own, earlier, relocation)
        try:
            return _copy(copy, lambda: locked.see(survey()), what)
        finally:
            locked.restore()


# a tree at rest takes two: one to copy by, one that finds it unchanged
_ROUNDS = 5


def _copy(copy: "_Copy", survey: Callable[[], Pieces], what: CopyRule) -> Taken:
    wanted, copied = Pieces(), Pieces()
    before: Pieces | None = None
    left_out, has_git = dict[str, int](), True
    began_ns = clock_ns()
    for _ in range(_ROUNDS):
        taken_at, surveyed = utc_now(), _survey_once(survey)
        if surveyed is None:
            before = None
            continue
        # before Linux 6.13 two changes of a file within a tick of 4 ms have one ctime, and look
        # like one
        if not (is_complete := surveyed == before):
            wanted, left_out, has_git = select(surveyed, what)
        # equal to what the last copy saw: nothing changed since then, and one survey is enough
        is_same = before is None and wanted == copy.recorded
        if is_complete or is_same:
            if is_complete:
                copy.record(wanted, began_ns)
            files = sum(not piece.is_directory for piece in wanted.values())
            size = sum(piece.size for piece in wanted.values() if stat.S_ISREG(piece.mode))
            return Taken(taken_at, files, size, left_out, has_git, is_same)
        unlocked = copy.bring(copied, wanted)
        # reading a file that its owner locked changed its ctime: no change of the client's
        copied, before = wanted | unlocked, surveyed | unlocked
    raise CheckoutBusyError(
        f"cannot copy the checkout: it changed during each of {_ROUNDS} attempts",
        hint="stop the processes that write in it, then try again",
    )


def _survey_once(survey: Callable[[], Pieces]) -> Pieces | None:
    """Survey the tree; None if it changed meanwhile so that what was seen is no one tree."""
    try:
        pieces = survey()
    except OSError as error:
        if error.errno not in _CHANGED:
            raise
        return None
    # a directory renamed during the survey leaves paths without the one above them
    above = {path.rpartition(b"/")[0] for path in pieces} - {b""}
    is_tree = all(path in pieces and pieces[path].is_directory for path in above)
    return pieces if is_tree else None


@dataclass(eq=False, repr=False)
class _Locked:
    """Directories that their owner locked: opening one changes its mode, which is restored."""

    client: TreeReader
    owner: ActingAs

    def __post_init__(self) -> None:
        self._modes: dict[bytes, int] = {}

    def see(self, pieces: Pieces) -> Pieces:
        """Note the modes of a first survey; in later ones, replace modes that opening changed."""
        for path, piece in pieces.items():
            if not piece.is_directory or not piece.is_clients:
                continue
            mode = self._modes.get(path)
            if mode is None and piece.mode & stat.S_IRWXU != stat.S_IRWXU:
                self._modes[path] = piece.mode
            elif mode is not None and piece.mode == mode | stat.S_IRWXU:
                pieces[path] = piece._replace(mode=mode)
        return pieces

    def restore(self) -> None:
        with self.owner:
            for path, mode in sorted(self._modes.items(), reverse=True):
                seen = self.client.find_stat(path)
                # only while it is as opening left it: its owner may have set another mode since
                if seen and seen.st_mode == mode | stat.S_IRWXU:
                    directory, name = self.client.locate(path)
                    with opened(self.owner.open_directory(directory, name)) as fd:
                        os.fchmod(fd, stat.S_IMODE(mode))


def _read_record(layer: Path) -> Pieces | None:
    # without a record all is copied, and nothing linked
    with suppress(OSError, ValueError), open(f"{layer}.stats", "rb") as file:
        return {
            encode_name(path): Piece(Where[where], *numbers)
            for path, (where, *numbers) in json.load(file).items()
        }
    return None


class _Read(NamedTuple):
    """What was read at a path: content, a link's target, or the descriptor of a long file."""

    data: bytes = b""
    file: int = -1
    attributes: Mapping[str, bytes] = MappingProxyType({})


# read at a time with the rights of the owner, who may not enter the layer; long ones stay open
_BATCH = 64
_LONG_BYTES = 1 << 16  # a longer file is copied in the kernel


class _Copy:
    """Writes pieces into a layer, by plain paths: only the daemon enters its directory."""

    def __init__(
        self,
        directory: Path,
        readers: Mapping[Where, TreeReader | None],
        owner: ActingAs,
        own: Path | None,
        earlier: Path | None,
        relocation: Relocation | None,
    ) -> None:
        self._relocation = relocation
        self._directory = os.fsencode(directory) + b"/"
        self._readers = readers
        self._owner = owner
        self._own = os.fsencode(own or directory) + b"/"
        self._earlier = os.fsencode(earlier or directory) + b"/"
        # umask(2) tells the mask only while it sets one
        # umask(2) can be read only by setting it
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self.recorded = _read_record(earlier) if earlier else None
        self._attributes: dict[bytes, Mapping[str, bytes]] = {}

    def bring(self, copied: Pieces, wanted: Pieces) -> Pieces:
        """Bring the layer from one survey to the next, both sorted by path; return the pieces whose
        stat changed by reading them.
        """
        # of an earlier round
        with suppress(FileExistsError):
            os.mkdir(self._directory, 0o755)
        stale = [path for path, piece in copied.items() if wanted.get(path) != piece]
        # what is in a directory goes before it
        for path in reversed(stale):
            is_kept = path in wanted and wanted[path].is_directory and copied[path].is_directory
            if not is_kept:
                remove_tree(Path(os.fsdecode(self._directory + path)))
        new = {path: piece for path, piece in wanted.items() if copied.get(path) != piece}
        unlocked: Pieces = {}
        todo = iter(new.items())
        while batch := list(islice(todo, _BATCH)):
            self._put_all(batch, unlocked)
        touched = {above for path in new for above in parents(path)} | new.keys()
        # children first: a directory without its x bit locks a daemon that is not root out of them
        for path in sorted(touched & wanted.keys(), reverse=True):
            if (piece := wanted[path]).is_directory:
                target = self._directory + path
                # before the mode: setting a `user.` attribute needs the right to write
                for name, value in self._attributes.get(path, {}).items():
                    os.setxattr(target, name, value)
                os.chmod(target, piece.permissions)
                os.utime(target, ns=(piece.mtime_ns, piece.mtime_ns))
        return unlocked

    def _put_all(self, batch: Sequence[tuple[bytes, Piece]], unlocked: Pieces) -> None:
        read: dict[bytes, _Read | None] = {}
        recorded = self.recorded or {}
        try:
            with self._owner:
                for path, piece in batch:
                    is_shared = recorded.get(path) == piece and not piece.is_directory
                    if piece.is_clients and not is_shared:
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
            for content in filter(None, read.values()):
                if content.file >= 0:
                    os.close(content.file)

    def _share(self, path: bytes) -> bool:
        """Link a file from the earlier layer. Return False if that is gone, or has 65,000 links."""
        try:
            os.link(self._earlier + path, self._directory + path, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _read(self, path: bytes, piece: Piece, unlocked: Pieces) -> _Read | None:
        """Read a path of the client; None if it has become something else."""
        reader = self._readers[piece.where]
        assert reader is not None
        try:
            if piece.is_directory:
                directory, _ = reader.locate(path + b"/")
                return _Read(attributes=read_attributes(directory))
            directory, name = reader.locate(path)
            if stat.S_ISLNK(piece.mode):
                target = os.readlink(name, dir_fd=directory)
                return _Read(self._relocation.text(target) if self._relocation else target)
            file = self._owner.open_regular(directory, name, keep_atime=True)
        except PermissionError as error:
            seen = reader.find_stat(path)
            # a whiteout that took its place is a device, which no mount of ours opens: EACCES
            if seen is None or stat.S_IFMT(seen.st_mode) != stat.S_IFMT(piece.mode):
                return None
            raise PermissionError(error.errno, error.strerror, path) from error
        except OSError as error:
            if error.errno not in _CHANGED:
                raise
            return None  # the next survey finds its new state
        try:
            if not piece.mode & stat.S_IRUSR:  # opening it changed the mode, and so the ctime
                unlocked[path] = piece._replace(ctime_ns=os.fstat(file).st_ctime_ns)
            attributes = read_attributes(file)
            if self._relocation and (moved := self._relocation.file(path, file)) != file:
                file = moved
                return _Read(os.read(file, os.fstat(file).st_size), attributes=attributes)
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
                # its own mode, which may forbid writing, comes last (`bring`)
                os.mkdir(target, 0o700)
        elif read is None:
            return
        elif stat.S_ISLNK(piece.mode):
            os.symlink(read.data, target)
            os.utime(target, ns=times, follow_symlinks=False)
        else:
            # a `user.` attribute needs the right to write, also through an open descriptor
            mode = piece.permissions | (stat.S_IWUSR if read.attributes else 0)
            with opened(os.open(target, CREATE, mode)) as file:
                if read.file >= 0:
                    copy_bytes(read.file, file, piece.size)
                elif read.data:
                    write_all(file, read.data)
                for name, value in read.attributes.items():
                    os.setxattr(file, name, value)
                os.utime(file, ns=times)
                # open(2) took the umask off
                if mode != piece.permissions or mode & self._umask:
                    os.fchmod(file, piece.permissions)

    def record(self, pieces: Pieces, began_ns: int) -> None:
        """Write the stats beside the layer, for the next copy, but for those of the present tick of
        the clock, which another change may not alter.
        """
        kept = {
            decode_name(path): (piece.where.name, *piece[1:])
            for path, piece in pieces.items()
            if piece.ctime_ns < began_ns
        }
        with opened(os.open(self._directory[:-1] + b".stats", CREATE, 0o600)) as file:
            write_all(file, json.dumps(kept).encode())

    def _link(self, path: bytes, piece: Piece) -> None:
        """Link a path from the checkout's own layer, whose files never change."""
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
