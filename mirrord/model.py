"""Types of the program's terms: names, ids, choices. No I/O.

A value of one of these types is valid: the functions that parse them raise a `UsageError`, so other
code can trust its arguments.
"""

from __future__ import annotations

import os
import re
from base64 import b32encode
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import StrEnum
from typing import NamedTuple, NewType, Self

from .errors import InvalidCommitError, InvalidNameError

CommitId = NewType("CommitId", str)  # a full SHA-1 commit id: 40 lower-case hexadecimal digits
CheckoutId = NewType("CheckoutId", str)  # random and unguessable: 16 characters of a-z2-7
LayerId = NewType("LayerId", str)  # in the form of a CheckoutId
DatasetName = NewType("DatasetName", str)  # a valid component of a ref

FIRST_PARENTS_LIMIT = 64  # of `Resolved.line`
NAME_LIMIT_BYTES = 255  # Linux's NAME_MAX
TREE_DEPTH_LIMIT = 400  # a walk holds a stack frame or an open file for each directory
# PATH_MAX is 4,096, and where a path is used whole it includes that of the tree itself
TREE_PATH_LIMIT_BYTES = 4000
ENVIRONMENT_PATH_LIMIT_BYTES = 3072
# ten times as many as conda's largest; each costs an inode of the host
ENVIRONMENT_FILES_LIMIT = 1_000_000
# as much as an image by default; environments with CUDA have 5 to 10 GiB
ENVIRONMENT_BYTES_LIMIT = 20 * 1024**3

# the end of an instance's rule about a list of tests that could not be read: it is not empty
UNREAD_LIST = "not readable as a list of names, left empty"

# owner of the mirrors of repositories in images, and the branch at the HEAD that an image has
FROM_IMAGE, FROM_IMAGE_HEAD = "from-image", "image-head"

ENVIRONMENT_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,199}")  # a segment of a URL's path

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


class Resolved(NamedTuple):
    """A commit in a mirror.

    `line` is the commit and its next first parents, newest first; empty if one cannot be read.
    `time` is the committer's, in seconds since the epoch. `refused` are objects of its tree that
    may not be served unless the finding about them is accepted, each with the reason. `replaces` is
    the commit of a shallow upstream, whose parents nobody has, that it stands for.
    """

    commit: CommitId
    tree: str
    time: int
    line: tuple[CommitId, ...]
    refused: tuple[tuple[str, str], ...] = ()
    replaces: CommitId | None = None


class History(StrEnum):
    """How much of the past a checkout shows."""

    SEALED = "sealed"
    SQUASHED = "squashed"
    LINKED = "linked"

    def is_within(self, limit: History) -> bool:
        by_extent = (History.SQUASHED, History.SEALED, History.LINKED)
        return by_extent.index(self) <= by_extent.index(limit)


class Backend(StrEnum):
    """How a tree is made: as a mount over a template, or as a plain directory."""

    AUTO = "auto"
    OVERLAY = "overlay"
    POOL = "pool"


class ObjectSource(StrEnum):
    """Where the `.git` of a pool tree has its objects: in the sealed store, or in a copy of it."""

    AUTO = "auto"
    SHARED = "shared"
    PRIVATE = "private"


class DiffFormat(StrEnum):
    """How a diff is printed: as `git diff --binary`, with `--stat`, or with `--name-status`."""

    PATCH = "patch"
    STAT = "stat"
    NAME_STATUS = "name-status"


class Bind(StrEnum):
    """Whether a lease ends only at its deadline, or also with the process that asked for it."""

    LEASE = "lease"
    PROCESS = "process"


class Target(StrEnum):
    """The part of a checkout to attach: its tree, its environment, or the directory with both."""

    TREE = "tree"
    ENVIRONMENT = "environment"
    DIRECTORY = "directory"


class View(StrEnum):
    """What the client of a checkout may read: nothing of the answer, or all of the instance."""

    AGENT = "agent"
    GRADER = "grader"


class Place(StrEnum):
    """What a host allows: to root, to an ordinary user with user namespaces, to one without, to
    root in a container without CAP_SYS_ADMIN.
    """

    ROOT = "root"
    NAMESPACE = "namespace"
    USER = "user"
    CONTAINER = "container"


class Isolation(StrEnum):
    """What keeps a command of a sandbox from the rest of the host, the strongest first.

    NAMESPACES: it sees nothing else. LANDLOCK: the kernel lets it open files of the checkout, of
    its environment and of the system alone. UID: it is another user than who started it. NONE: it
    is the user who started it, without network and privileges.
    """

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    UID = "uid"
    NONE = "none"


class ApplyStrategy(StrEnum):
    """How a patch is applied: as by `git apply`, or as tolerantly as by the field's graders."""

    EXACT = "exact"
    TOLERANT = "tolerant"


class FoundStrategy(StrEnum):
    """The strategy by which a patch applied. A tolerant apply tries them in this order.

    EXACT is `git apply`, THREE_WAY `git apply --3way` against the base commit. COUNTS accepts wrong
    numbers in hunks, PROSE text around a patch, CRLF other line ends than the tree's, BLANKS other
    blanks at line ends, FUZZ other context, like `patch --batch --forward --fuzz=5`. Each also
    accepts what the ones before it accept.
    """

    EXACT = "exact"
    THREE_WAY = "3way"
    COUNTS = "counts"
    PROSE = "prose"
    CRLF = "crlf"
    BLANKS = "blanks"
    FUZZ = "fuzz"


class Policy(StrEnum):
    """What a grade does with a change that could steer the tests."""

    REPORT = "report"
    DROP = "drop"
    REFUSE = "refuse"


class SteeringKind(StrEnum):
    """Kinds of rules about changes that could steer the tests. Policies are set by kind."""

    RUNNER = "runner"
    INTERPRETER = "interpreter"
    SHADOW = "shadow"
    BUILD = "build"
    ENVIRONMENT = "environment"
    GIT = "git"
    COMPILED = "compiled"
    TREE = "tree"
    TESTS = "tests"
    CODE = "code"
    OWN = "own"


class AuditLevel(StrEnum):
    """How deep an audit looks: refs and pins, the closure of each commit, or its content too."""

    QUICK = "quick"
    CLOSURE = "closure"
    CONTENT = "content"


class CommitState(StrEnum):
    """The verdict of an audit on one recorded commit."""

    OK = "ok"
    MISSING = "missing"
    INCOMPLETE = "incomplete"
    CORRUPT = "corrupt"
    UNPINNED = "unpinned"
    NOT_MIRRORED = "not-mirrored"


class FindingKind(StrEnum):
    """Kinds of findings. A finding of a commit has the name of the commit's state."""

    MISSING = "missing"
    INCOMPLETE = "incomplete"
    CORRUPT = "corrupt"
    UNPINNED = "unpinned"
    NOT_MIRRORED = "not-mirrored"
    PACK = "pack-damaged"
    OBJECT = "object-damaged"
    DERIVED = "derived-damaged"
    REF = "ref-damaged"
    REF_LOST = "ref-lost"
    REF_MOVED = "ref-moved"
    REF_INCOMPLETE = "ref-incomplete"
    PIN_LOST = "pin-lost"
    PIN_UNKNOWN = "pin-unknown"
    REFUSED = "object-refused"
    HEAD = "head-changed"
    CONFIG = "config-changed"
    PLANTED = "planted"
    LAYOUT = "layout-damaged"
    STORE = "store-damaged"
    UNJUDGED = "unjudged"


class Reach(StrEnum):
    """The refs that keep a recorded commit alive, best first."""

    DEFAULT_BRANCH = "default-branch"
    BRANCH = "branch"
    TAG = "tag"
    PULL_REQUEST = "pull-request"
    KEPT = "kept"
    PIN = "pin"
    NOTHING = "nothing"


class CommitRole(StrEnum):
    """Why a dataset row records a commit."""

    BASE = "base"
    ENVIRONMENT = "environment-setup"
    GOLD = "gold"
    BUG = "bug-branch"
    SUBMODULE = "submodule"


class Readiness(StrEnum):
    """The result of a rehearsal of an instance.

    PARTLY: ready, but a recorded commit other than the base commit cannot be served.
    UNTRIED: a fault outside the instance prevented a result.
    """

    READY = "ready"
    PARTLY = "ready, but"
    FAILED = "failed"
    UNTRIED = "untried"


class ReportKind(StrEnum):
    """The subject of a report: `mirrord rehearse`, or `mirrord grade --predictions`."""

    REHEARSAL = "rehearsal"
    GRADING = "grading"


class Direction(StrEnum):
    """The direction of a row's patch: `forward` fixes the bug, `reverse` introduces it."""

    FORWARD = "forward"
    REVERSE = "reverse"


_GROUPS = re.compile(rf"{_OWNER.pattern}(?:\+[A-Za-z0-9_][A-Za-z0-9._-]{{0,99}})*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)


@dataclass(frozen=True, slots=True)
class MirrorName:
    """A mirror's name, `owner__name`, split at the first `__`. Look-ups ignore letter case.

    A `+` in the owner stands for a `/`: `group+sub__project` is `group/sub/project`. No forge has
    one in a name, so both directions have one answer.
    """

    owner: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `owner/name`, `group/sub/project` or `owner__name`; raises InvalidNameError."""
        if "/" in text:
            owner, mark, name = text.rpartition("/")
            owner = owner.replace("/", "+")
        else:
            owner, mark, name = text.partition("__")
        name = name.removesuffix(".git")
        # "__" in the owner or "_" at its end would split elsewhere; ".." is unsafe in paths
        is_owner = _GROUPS.fullmatch(owner) and "__" not in owner
        is_owner = is_owner and not owner.endswith(("_", ".")) and "_+" not in owner
        is_name = _NAME.fullmatch(name) and name != "."
        is_short = len(owner) + len(name) <= NAME_LIMIT_BYTES - 20  # git adds to names of files
        if not (mark and is_owner and is_name and is_short) or ".." in owner or ".." in name:
            rule = "a repository is owner/name of letters, digits, '.', '_' and '-', 100 each"
            raise InvalidNameError(
                f"cannot name a mirror {shown(text)}: {rule}",
                hint="write it as owner/name or owner__name, for example psf/requests; of one"
                " without owner write host/name, and its --url",
            )
        return cls(owner, name)

    @property
    def key(self) -> str:
        """The name in lower case, for look-ups."""
        return str(self).lower()

    @property
    def path(self) -> str:
        """The owner as in a URL, with its sub-groups."""
        return self.owner.replace("+", "/")

    @property
    def repo(self) -> str:
        return f"{self.path}/{self.name}"

    def __str__(self) -> str:
        return f"{self.owner}__{self.name}"


class EnvironmentName(NamedTuple):
    """The environment of a checkout."""

    key: str
    digest: str

    def __str__(self) -> str:
        return f"{self.key}@{self.digest[:12]}"


_COMMIT = re.compile(r"[0-9a-f]{40}")


def parse_commit(text: str) -> CommitId:
    """Read a full commit id in either letter case; raises InvalidCommitError."""
    commit = text.strip().lower()
    # git writes zeros for no object at all
    if not _COMMIT.fullmatch(commit) or commit == "0" * 40:
        raise InvalidCommitError(
            f"cannot read commit {shown(text)}: a commit id is 40 hexadecimal digits, not all zero",
            hint="give the whole id; a short one can become ambiguous",
        )
    return CommitId(commit)


def parse_dataset_name(text: str) -> DatasetName:
    """Read a dataset's name; raises InvalidNameError."""
    # git takes none of these endings, nor `..`, in a ref
    if not _OWNER.fullmatch(text) or ".." in text or text.endswith((".lock", ".")):
        rule = "a name is letters, digits, '.', '_' and '-', at most 100"
        fact = f"cannot name a dataset {shown(text)}: {rule}"
        raise InvalidNameError(fact, hint="choose another with --name")
    return DatasetName(text)


def new_checkout_id() -> CheckoutId:
    """Return 80 random bits, in base 32."""
    return CheckoutId(b32encode(os.urandom(10)).decode().lower())


def new_layer_id() -> LayerId:
    return LayerId(new_checkout_id())


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


def shown(text: str, limit: int = 80) -> str:
    """Quote untrusted text for a message: escaped and bounded."""
    quoted = ascii(text if len(text) <= limit else text[:limit] + "…")
    return _BYTE.sub(_octal, quoted).replace("\\u2026", "…")


_BYTE = re.compile(r"(?<!\\)((?:\\\\)*)\\udc([89a-f][0-9a-f])")  # a name's byte that is not UTF-8


def _octal(escape: re.Match[str]) -> str:
    return f"{escape[1]}\\{int(escape[2], 16):03o}"
