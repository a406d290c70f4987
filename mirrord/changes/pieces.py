"""What a layer needs of a checkout: its paths as a survey saw them, and those that are selected."""

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple

from ..errors import TooLargeError
from ..trees.layer import is_whiteout
from ..trees.scan import is_control


class CopyLimits(NamedTuple):
    """The bounds of one copy: changed paths, their bytes, and time."""

    files: int
    size_bytes: int
    timeout: timedelta


class CopyRule(NamedTuple):
    """What to copy of a checkout.

    With `git`, the refs, logs, index and objects of the tree's own `.git`, and nested repositories
    whole; without, nothing of any `.git`.
    """

    limits: CopyLimits
    of_environment: bool = False
    git: bool = True


class Taken(NamedTuple):
    """A copy of a checkout as it was at `taken_at`.

    `left_out` counts by kind what is not in the copy: pipes, sockets, devices, and files of `.git`.
    Without `git` the copy has the base's own `.git`. With `is_same` an earlier copy is equal, and
    no new one was made.
    """

    taken_at: datetime
    files: int
    size_bytes: int
    left_out: dict[str, int]
    git: bool
    is_same: bool

    def plus(self, other: "Taken") -> "Taken":
        """Add the counts of another copy."""
        files, size = self.files + other.files, self.size_bytes + other.size_bytes
        left_out = dict(Counter(self.left_out) + Counter(other.left_out))
        return self._replace(files=files, size_bytes=size, left_out=left_out)


class Where(Enum):
    """The source of a path of a new layer."""

    CLIENT = "the checkout's tree"
    UPPER = "the upper layer of an overlay, which its client writes to"
    OWN = "the checkout's own layer"
    HIDDEN = "none: a whiteout"


class Piece(NamedTuple):
    """One path that a layer needs. Two of one path are equal if it did not change in between."""

    where: Where
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    ino: int = 0

    @classmethod
    def of(cls, where: Where, st: os.stat_result) -> "Piece":
        # opening a directory that its owner locked changes its ctime, and linking a file changes it
        is_directory = stat.S_ISDIR(st.st_mode)
        size = 0 if is_directory else st.st_size
        ctime_ns = 0 if is_directory or where is Where.OWN else st.st_ctime_ns
        return cls(where, st.st_mode, size, st.st_mtime_ns, ctime_ns, st.st_ino)

    @property
    def is_clients(self) -> bool:
        return self.where in (Where.CLIENT, Where.UPPER)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def permissions(self) -> int:
        """The mode, for files without set-id bits, which would act for the daemon's user."""
        return stat.S_IMODE(self.mode) if self.is_directory else self.mode & 0o777


HIDDEN = Piece(Where.HIDDEN)


def hidden_by(st: os.stat_result) -> Piece:
    """Return the whiteout for a path where the checkout has something that no layer keeps."""
    return Piece(Where.HIDDEN, 0 if is_whiteout(st) else st.st_mode)


Pieces = dict[bytes, Piece]


# HEAD and similar files (in capitals), refs, logs and objects: nothing that configures git, that it
# runs, or that borrows objects; no locks and no unfinished packs
_OF_GIT = re.compile(
    rb"\.git(?:/(?:[A-Z_]+|index|sharedindex\.[0-9a-f]{40}|packed-refs"
    rb"|(?:refs|logs)(?:/.*(?<!\.lock))?"
    rb"|objects(?:/[0-9a-f]{2}(?:/[0-9a-f]{38})?"
    rb"|/pack(?:/pack-[0-9a-f]{40}\.(?:pack|idx|rev))?)?)?)?",
    re.DOTALL,
)
# of any repository in the tree, in any spelling: git accepts `.GIT` on some systems
_IN_GIT = re.compile(rb"(?:^|/)\.git(?:/|\Z)", re.IGNORECASE)


def select(pieces: Pieces, what: CopyRule) -> tuple[Pieces, dict[str, int], bool]:
    """Select from a survey what `what` says and a layer can have.

    Returns the pieces, the number of others by kind, and whether the client's `.git` is included:
    it must be a directory of plain files.
    """
    left_out: Counter[str] = Counter()
    wanted: Pieces = {}
    git: Pieces = {}
    for path, piece in pieces.items():
        kind = stat.S_IFMT(piece.mode)
        if not what.git and _IN_GIT.search(path):
            left_out["git_files"] += piece != HIDDEN and not piece.is_directory
            continue
        if is_control(path) and not what.of_environment:
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
    has_git = what.git and _is_plain(git)
    if has_git:
        # no object is removed: the base's store has all of its own
        objects = b".git/objects/"
        wanted |= {
            p: piece for p, piece in git.items() if piece != HIDDEN or not p.startswith(objects)
        }
    else:
        left_out["git_files"] += sum(p != HIDDEN and not p.is_directory for p in git.values())
    _must_fit(wanted, what.limits)
    # sorted, so that a directory comes before what is in it
    return dict(sorted(wanted.items())), {kind: n for kind, n in left_out.items() if n}, has_git


_SPECIAL = {stat.S_IFIFO: "pipes", stat.S_IFSOCK: "sockets"}
_DIRECTORIES = {b".git", b".git/refs", b".git/logs", b".git/objects", b".git/objects/pack"}


def _is_plain(git: Pieces) -> bool:
    """Return whether a `.git` is a repository's directory of plain files."""

    def is_plain(path: bytes, piece: Piece) -> bool:
        if piece == HIDDEN:
            return path not in _DIRECTORIES and path != b".git/HEAD"
        if path in _DIRECTORIES or piece.is_directory:
            # branches with slashes nest at any depth; below objects/ there are only 256 directories
            may_nest = path.startswith((b".git/refs/", b".git/logs/"))
            is_known = path in _DIRECTORIES or len(path) == len(b".git/objects/00")
            return piece.is_directory and (may_nest or is_known)
        return stat.S_ISREG(piece.mode)

    return all(is_plain(path, piece) for path, piece in git.items())


def _must_fit(pieces: Mapping[bytes, Piece], limits: CopyLimits) -> None:
    size = sum(piece.size for piece in pieces.values() if piece.is_clients)
    if len(pieces) > limits.files or size > limits.size_bytes:
        raise TooLargeError(
            f"cannot copy the checkout: it has {len(pieces)} changed paths with {size >> 20} MiB;"
            f" the limit is {limits.files} with {limits.size_bytes >> 20} MiB",
            hint="remove files that can be generated again, or raise checkouts.copy_files or"
            " checkouts.copy_bytes; files that many checkouts need belong in a prepared layer,"
            " which they share",
            files=len(pieces),
            size_bytes=size,
        )
