"""The kinds of damage to a mirror, and the files that have it."""

from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple

from ..model import CommitId, FindingKind

# of one git of an audit or a heal; the largest repositories take minutes
TIMEOUT = timedelta(hours=1)

CHECKSUM_MISMATCH = "checksum mismatch"


class FileKind(StrEnum):
    """The kind of a bad file, which decides how it is healed."""

    PACK = "pack"
    INDEX = "idx"
    LOOSE = "loose object"
    DERIVED = "derived"  # git can make it again
    REF = "ref"
    PACKED_REFS = "packed-refs"
    HEAD = "HEAD"
    CONFIG = "config"
    PLANTED = "planted"
    LAYOUT = "layout"  # something other than a plain file or directory in its place


class Defect(NamedTuple):
    """A defect of a mirror; `reason` follows "<subject>: ".

    It stands in the way of `commits`, though nothing of them is missing or damaged.
    """

    kind: FindingKind
    reason: str
    commits: tuple[CommitId, ...] = ()


class BadFile(NamedTuple):
    """A file to heal, by its `path` below the mirror; `reason` follows "<path>: "."""

    path: str
    kind: FileKind
    reason: str

    @property
    def name(self) -> str:
        """The subject of its finding: the path, for packs the file name."""
        return self.path.removeprefix("objects/pack/")

    @property
    def object_id(self) -> str:
        """Of a loose object."""
        return self.path.removeprefix("objects/").replace("/", "")

    @property
    def defect(self) -> Defect:
        names = {"INDEX": "PACK", "LOOSE": "OBJECT", "PACKED_REFS": "REF"}
        return Defect(FindingKind[names.get(self.kind.name, self.kind.name)], self.reason)
