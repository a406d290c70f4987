"""git's fsck: what it may find in an upstream's history, and what that means for a checkout.

A mirror takes a history as it is, because nobody can rewrite it. What is served is checked: the
names and modes of a checkout's own tree when it is written (`git/objects/trees.py`), its
`.gitmodules` when its commit is resolved (`git/modules.py`). docs/security-inside.md says what
each rule could do to whom.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """What follows from a rule of fsck: nothing; a finding, and no checkout of a tree with it.

    A REFUSED tree has no right form on a disk. An ACCEPTABLE one is served once the finding is
    accepted. An UNPROVABLE one has another id than what is on the disk; it does no harm, so it is
    a finding only where a recorded commit's own tree has it.
    """

    IGNORED = "ignored"
    UNPROVABLE = "unprovable"
    ACCEPTABLE = "acceptable"
    REFUSED = "refused"


# By fsck's name (2.39). Others mean that git cannot read the object: it is no part of a mirror.
RULES = {
    **dict.fromkeys(
        (
            "badDate", "badDateOverflow", "badEmail", "badFilemode", "badName", "badTagName",
            "badTimezone", "gitattributesBlob", "gitattributesLarge", "gitattributesLineLength",
            "gitattributesSymlink", "gitignoreSymlink", "gitmodulesParse", "mailmapSymlink",
            "missingAuthor", "missingCommitter", "missingEmail", "missingNameBeforeEmail",
            "missingSpaceBeforeDate", "missingSpaceBeforeEmail", "missingTaggerEntry",
            "multipleAuthors", "nulInCommit", "zeroPaddedDate",
        ),
        Severity.IGNORED,
    ),
    "zeroPaddedFilemode": Severity.UNPROVABLE,
    **dict.fromkeys(
        (
            "gitmodulesBlob", "gitmodulesLarge", "gitmodulesName", "gitmodulesPath",
            "gitmodulesUpdate", "gitmodulesUrl",
        ),
        Severity.ACCEPTABLE,
    ),
    **dict.fromkeys(
        (
            "duplicateEntries", "emptyName", "fullPathname", "gitmodulesSymlink", "hasDot",
            "hasDotdot", "hasDotgit", "nullSha1", "treeNotSorted",
        ),
        Severity.REFUSED,
    ),
}  # fmt: skip

FETCH = tuple((f"fetch.fsck.{name}", "ignore") for name in RULES)
# for `git index-pack`, which does not read `fetch.fsck.*`
STRICT = "--strict=" + ",".join(f"{name}=ignore" for name in RULES)


class Blemish(NamedTuple):
    """An object that fsck refuses, with the name of the rule and git's words."""

    oid: str
    rule: str
    words: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.words}"


_LINE = re.compile(
    r"(?:error|warning) in (?:commit|tree|tag|blob) ([0-9a-f]{40}): ([a-z][A-Za-z0-9]+): (.*)"
)


def read_complaint(line: str) -> Blemish | None:
    """Read a line of `git fsck` that names a rule; those about broken links name none."""
    match = _LINE.fullmatch(line)
    return Blemish(*match.groups()) if match else None
