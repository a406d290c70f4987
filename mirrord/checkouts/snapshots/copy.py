"""Copy what a live checkout has over its base commit into a layer. Sync; runs in workers.

A backend surveys the tree: what has to be in the layer, with the stat of each path. The copy is
whole when a survey after it finds what one before it found, so the tree was as the layer is at the
beginning of the last one. What changes meanwhile is copied again. The tree is read as its owner,
through directories that no link or mount leads to; the layer's files are the daemon's, their times
and modes the client's. (Before Linux 6.13 two changes of one file within a tick of the clock, 4 ms,
have one ctime, and look like one.)
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ...errors import CheckoutBusyError, ForkTooLargeError
from ...host.credentials import ActingAs
from ...host.files import FOR_READING, full_disk_named, open_directory, opened
from ...model import utc_now
from ..backend import Taken
from ..files.reader import TreeReader
from ..files.scan import is_control
from ..files.writer import TreeWriter
from ..patches.worktree import denials_named
from ..templates.layers import parents
from .content import is_whiteout, read_attributes

FILES_LIMIT = 200_000
BYTES_LIMIT = 4 * 1024**3
_ROUNDS = 5
_BATCH = 64
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
# HEAD and its like (names of capitals), refs, their logs, and objects: nothing that configures git,
# is run by it, or borrows objects. Packs being written and locks are nobody's yet.
_OF_GIT = re.compile(
    rb"\.git(?:/(?:[A-Z_]+|index|sharedindex\.[0-9a-f]{40}|packed-refs"
    rb"|(?:refs|logs)(?:/.*(?<!\.lock))?"
    rb"|objects(?:/[0-9a-f]{2}(?:/[0-9a-f]{38})?|/pack(?:/pack-[0-9a-f]{40}\.(?:pack|idx|rev))?)?)?)?",
    re.DOTALL,
)


class Where(Enum):
    """Where a path of a new layer comes from; HIDDEN is a whiteout."""

    CLIENT = "the checkout's tree"
    OWN = "the layer that it has"
    HIDDEN = "nowhere"


class Piece(NamedTuple):
    """One path that a layer has to have. Two are equal where nothing changed in between."""

    where: Where
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    ino: int = 0

    @classmethod
    def of(cls, where: Where, found: os.stat_result) -> Piece:
        if stat.S_ISDIR(found.st_mode):  # to open one that its owner locked changes its ctime
            return cls(where, found.st_mode, 0, found.st_mtime_ns, 0, found.st_ino)
        times = found.st_mtime_ns, found.st_ctime_ns
        return cls(where, found.st_mode, found.st_size, *times, found.st_ino)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def permissions(self) -> int:
        """Without set-id bits of files: on disk they would be of the daemon's."""
        return stat.S_IMODE(self.mode) if self.is_directory else self.mode & 0o777


HIDDEN = Piece(Where.HIDDEN)


def hidden_by(found: os.stat_result) -> Piece:
    """A path of the base that something hides which no layer has."""
    return Piece(Where.HIDDEN, 0 if is_whiteout(found) else found.st_mode)


Pieces = dict[bytes, Piece]


def copy_layer(
    directory: Path,
    survey: Callable[[], Pieces],
    client: TreeReader,
    owner: ActingAs,
    own: Path | None,
) -> Taken:
    """Copy what `survey` finds into the new `directory`, until it finds nothing else.

    Raises ForkTooLargeError, CheckoutBusyError, OwnerDeniedError, DiskFullError.
    """
    with full_disk_named("a layer"), denials_named(owner.owner):
        directory.mkdir(mode=0o755)
        with (
            opened(open_directory(directory)) as root,
            TreeWriter(root, ActingAs(None), mtime_ns=0) as writer,
        ):
            locked = _Locked(client, owner)
            try:
                return _copy(_Copy(writer, client, owner, own), lambda: locked.see(survey()))
            finally:
                locked.restore()


def _copy(copy: _Copy, survey: Callable[[], Pieces]) -> Taken:
    copied: Pieces = {}
    for _ in range(_ROUNDS):
        at = utc_now()
        wanted, left_out, has_git = select(survey())
        if wanted == copied:
            files = sum(not piece.is_directory for piece in wanted.values())
            size = sum(piece.size for piece in wanted.values() if stat.S_ISREG(piece.mode))
            return Taken(at, files, size, left_out, has_git)
        copied = copy.bring(copied, wanted)
    raise CheckoutBusyError(
        f"cannot copy the checkout: it changed during each of {_ROUNDS} looks",
        hint="stop what writes in it, or try again when it writes less",
    )


def select(found: Pieces) -> tuple[Pieces, dict[str, int], bool]:
    """What a layer takes of a survey; what it leaves out, by kind; and whether it has the client's
    `.git`, whose HEAD and files must be plain files.
    """
    left_out: Counter[str] = Counter()
    wanted: Pieces = {}
    git: Pieces = {}
    for path, piece in found.items():
        kind = stat.S_IFMT(piece.mode)
        if is_control(path):
            if _OF_GIT.fullmatch(path):
                git[path] = piece
            elif not piece.is_directory and piece != HIDDEN:
                left_out["git_files"] += 1
            continue
        if kind not in (0, stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            left_out[_SPECIAL.get(kind, "devices")] += 1
        if piece.where is Where.HIDDEN:
            wanted[path] = HIDDEN
        elif kind in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            wanted[path] = piece
    has_git = _is_plain(git)
    if has_git:
        wanted |= {path: piece for path, piece in git.items() if not _is_lost_object(path, piece)}
    else:
        left_out["git_files"] += sum(p != HIDDEN and not p.is_directory for p in git.values())
    _must_fit(wanted)
    return dict(sorted(wanted.items())), {kind: n for kind, n in left_out.items() if n}, has_git


_SPECIAL = {stat.S_IFIFO: "pipes", stat.S_IFSOCK: "sockets"}
_DIRECTORIES = {b".git", b".git/refs", b".git/logs", b".git/objects", b".git/objects/pack"}


def _is_plain(git: Pieces) -> bool:
    """Whether a `.git` is still a directory of plain files, and a repository's."""

    def is_plain(path: bytes, piece: Piece) -> bool:
        if piece == HIDDEN:
            return path not in _DIRECTORIES and path != b".git/HEAD"
        if path in _DIRECTORIES or piece.is_directory:
            return piece.is_directory and (path in _DIRECTORIES or _may_nest(path))
        return stat.S_ISREG(piece.mode)

    return all(is_plain(path, piece) for path, piece in git.items())


def _may_nest(path: bytes) -> bool:
    return path.startswith((b".git/refs/", b".git/logs/")) or len(path) == len(b".git/objects/00")


def _is_lost_object(path: bytes, piece: Piece) -> bool:
    """An object or pack that the client removed: the fork keeps it, as every store has it whole."""
    return piece == HIDDEN and path.startswith(b".git/objects/")


def _must_fit(pieces: Mapping[bytes, Piece]) -> None:
    size = sum(piece.size for piece in pieces.values() if piece.where is Where.CLIENT)
    if len(pieces) > FILES_LIMIT or size > BYTES_LIMIT:
        raise ForkTooLargeError(
            f"cannot copy the checkout: it has {len(pieces)} changed paths with {size >> 20} MiB;"
            f" {FILES_LIMIT} and {BYTES_LIMIT >> 20} MiB are the most",
            hint="remove what can be made again",
        )


class _Opened(NamedTuple):
    """What was read of the client's: an open file, or a link's target."""

    file: int = -1
    target: bytes = b""
    attributes: Mapping[str, bytes] = MappingProxyType({})


class _Locked:
    """Directories that their owner locked: opening one takes that off, and it is put back."""

    def __init__(self, client: TreeReader, owner: ActingAs) -> None:
        self._client = client
        self._owner = owner
        self._modes: dict[bytes, int] = {}

    def see(self, found: Pieces) -> Pieces:
        """Note those of a first survey, and undo in a later one what opening changed."""
        for path, piece in found.items():
            mode = self._modes.get(path)
            if piece.where is not Where.CLIENT or not piece.is_directory:
                continue
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


class _Copy:
    """Writes pieces into a layer."""

    def __init__(
        self, writer: TreeWriter, client: TreeReader, owner: ActingAs, own: Path | None
    ) -> None:
        self._writer = writer
        self._client = client
        self._owner = owner
        self._own = own

    def bring(self, copied: Pieces, wanted: Pieces) -> Pieces:
        """Bring the layer from one survey to the next, both in the order of paths; answers that
        with what reading changed.
        """
        stale = [path for path, piece in copied.items() if wanted.get(path) != piece]
        for path in reversed(stale):
            is_kept = path in wanted and wanted[path].is_directory and copied[path].is_directory
            if not is_kept:
                self._writer.remove(path)
        new = {path: piece for path, piece in wanted.items() if copied.get(path) != piece}
        todo = iter(new.items())
        attributes: dict[bytes, Mapping[str, bytes]] = {}
        unlocked: Pieces = {}
        while batch := list(islice(todo, _BATCH)):
            self._put_all(batch, attributes, unlocked)
        touched = {above for path in new for above in parents(path)} | new.keys()
        for path in sorted(touched & wanted.keys(), reverse=True):
            if (piece := wanted[path]).is_directory:
                found = attributes.get(path, {})
                self._writer.finish_directory(path, piece.permissions, piece.mtime_ns, found)
        return wanted | unlocked

    def _put_all(
        self,
        batch: Iterable[tuple[bytes, Piece]],
        attributes: dict[bytes, Mapping[str, bytes]],
        unlocked: Pieces,
    ) -> None:
        read: list[tuple[bytes, Piece, _Opened | None]] = []
        try:
            with self._owner:
                for path, piece in batch:
                    is_client = piece.where is Where.CLIENT
                    read.append((path, piece, self._open(path, piece) if is_client else None))
            for path, piece in batch:
                if piece.where is Where.OWN and piece.is_directory:
                    with opened(open_directory(self._in_own(path))) as fd:
                        attributes[path] = read_attributes(fd)
            for path, piece, each in read:
                if each is not None and piece.is_directory:
                    attributes[path] = each.attributes
                elif each is not None and each.file >= 0 and not piece.mode & stat.S_IRUSR:
                    # it had another mode for a moment, and so it has another ctime
                    ctime_ns = os.fstat(each.file).st_ctime_ns
                    unlocked[path] = piece._replace(ctime_ns=ctime_ns)
                self._put(path, piece, each)
        finally:
            for _, _, each in read:
                if each is not None and each.file >= 0:
                    os.close(each.file)

    def _open(self, path: bytes, piece: Piece) -> _Opened | None:
        """Read what is the client's at a path; None where it has become something else."""
        try:
            directory, name = self._client.locate(path)
            if stat.S_ISLNK(piece.mode):
                return _Opened(target=os.readlink(name, dir_fd=directory))
            if piece.is_directory:
                with opened(self._owner.open_directory(directory, name)) as fd:
                    return _Opened(attributes=read_attributes(fd))
            file = self._owner.open_regular(directory, name, keep_atime=True)
            try:
                return _Opened(file, attributes=read_attributes(file))
            except BaseException:
                os.close(file)
                raise
        except PermissionError as error:
            raise PermissionError(error.errno, error.strerror, path) from error
        except OSError as error:
            if error.errno not in _CHANGED:
                raise
            return None  # the next survey finds what it is now

    def _put(self, path: bytes, piece: Piece, read: _Opened | None) -> None:
        if piece.where is Where.HIDDEN:
            self._writer.write_whiteout(path)
        elif piece.is_directory:
            self._writer.make_directory(path)
        elif piece.where is Where.OWN:
            self._link(path, piece)
        elif read is None:
            return
        elif stat.S_ISLNK(piece.mode):
            self._writer.write_symlink(path, read.target, mtime_ns=piece.mtime_ns)
        else:
            self._writer.copy_file(
                path,
                read.file,
                permissions=piece.permissions,
                mtime_ns=piece.mtime_ns,
                attributes=read.attributes,
            )

    def _link(self, path: bytes, piece: Piece) -> None:
        """Nobody changes a layer's files, so two may share one; it has 65,000 names at most."""
        source = self._in_own(path)
        try:
            self._writer.link_file(path, source)
        except OSError as error:
            if error.errno != errno.EMLINK or not stat.S_ISREG(piece.mode):
                raise
            with opened(os.open(source, FOR_READING)) as file:
                self._writer.copy_file(
                    path,
                    file,
                    permissions=piece.permissions,
                    mtime_ns=piece.mtime_ns,
                    attributes=read_attributes(file),
                )

    def _in_own(self, path: bytes) -> Path:
        assert self._own is not None
        return self._own / os.fsdecode(path)
