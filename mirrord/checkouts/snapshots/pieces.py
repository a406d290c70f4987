"""What a layer takes of a checkout: the paths that a survey finds, and the rules for `.git`.

Of `.git` only what records work is taken: nothing that configures git or is run by it. Pure.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from ...errors import ForkTooLargeError
from ..backend import CopyRule
from ..files.scan import is_control
from .content import is_whiteout

FILES_LIMIT = 200_000
BYTES_LIMIT = 4 * 1024**3
# HEAD and its like (names of capitals), refs, their logs, and objects: nothing that configures git,
# is run by it, or borrows objects. Packs being written and locks are nobody's yet.
_OF_GIT = re.compile(
    rb"\.git(?:/(?:[A-Z_]+|index|sharedindex\.[0-9a-f]{40}|packed-refs"
    rb"|(?:refs|logs)(?:/.*(?<!\.lock))?"
    rb"|objects(?:/[0-9a-f]{2}(?:/[0-9a-f]{38})?|/pack(?:/pack-[0-9a-f]{40}\.(?:pack|idx|rev))?)?)?)?",
    re.DOTALL,
)
# any repository, of whatever depth and spelling (git takes `.GIT` for its own on some systems)
_IN_GIT = re.compile(rb"(?:^|/)\.git(?:/|\Z)", re.IGNORECASE)


class Where(Enum):
    """Where a path of a new layer comes from; HIDDEN is a whiteout."""

    CLIENT = "the checkout's tree"
    UPPER = "the layer of an overlay that its client writes to"
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
    def of(cls, where: Where, found: os.stat_result) -> "Piece":
        # to open a directory that its owner locked changes its ctime, and so does a link of a file
        if stat.S_ISDIR(found.st_mode):
            return cls(where, found.st_mode, 0, found.st_mtime_ns, 0, found.st_ino)
        if where is Where.OWN:
            return cls(where, found.st_mode, found.st_size, found.st_mtime_ns, 0, found.st_ino)
        times = found.st_mtime_ns, found.st_ctime_ns
        return cls(where, found.st_mode, found.st_size, *times, found.st_ino)

    @property
    def is_clients(self) -> bool:
        return self.where in (Where.CLIENT, Where.UPPER)

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


def select(found: Pieces, what: CopyRule) -> tuple[Pieces, dict[str, int], bool]:
    """What a layer takes of a survey; what it leaves out, by kind; and whether it has the client's
    `.git`, whose HEAD and files must be plain files.
    """
    left_out: Counter[str] = Counter()
    wanted: Pieces = {}
    git: Pieces = {}
    for path, piece in found.items():
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
    size = sum(piece.size for piece in pieces.values() if piece.is_clients)
    if len(pieces) > FILES_LIMIT or size > BYTES_LIMIT:
        raise ForkTooLargeError(
            f"cannot copy the checkout: it has {len(pieces)} changed paths with {size >> 20} MiB;"
            f" {FILES_LIMIT} and {BYTES_LIMIT >> 20} MiB are the most",
            hint="remove what can be made again",
        )
