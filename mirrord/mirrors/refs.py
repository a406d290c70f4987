"""Refs: what an upstream offers, which names are allowed, how two sets differ.

A mirror takes the refs that the configured patterns name, never `refs/mirrord/`, never
`refs/replace/`, never a name that git or a file system could misread.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..protocol import RefChange, RefFault
from .repository import OURS, Refs, Repository

_NEVER = (OURS, "refs/replace/", "refs/bisect/", "refs/worktree/", "refs/rewritten/", "refs/stash")


@dataclass(frozen=True, slots=True)
class Offer:
    """The refs of an upstream at one moment.

    `head` is the branch that its HEAD names; `redirected_to` is the URL that answered instead.
    """

    refs: Refs
    head: str | None = None
    faults: list[RefFault] = field(default_factory=list)
    redirected_to: str | None = None


def read_offer(lines: Iterable[str], patterns: Sequence[str]) -> Offer:
    """Read `git ls-remote --symref`; a hostile name becomes a fault."""
    parts = (".+".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
    find = re.compile(rf"([0-9a-f]{{40}})\t({'|'.join(parts)})").fullmatch
    refs: Refs = {}
    faults: list[RefFault] = []
    head = None
    for line in lines:
        if line.startswith("ref: ") and line.endswith("\tHEAD"):
            head = line[5:-5]
        found = find(line)
        if not found or found[2].startswith(_NEVER) or found[2].endswith("^{}"):
            continue
        oid, ref = found.groups()
        if is_safe_ref(ref):
            refs[ref] = oid
        else:
            reason = "git does not allow the name of this ref"
            faults.append(RefFault(ref=ascii(ref)[1:-1], commit=oid, reason=reason))
    faults += drop_shadowed(refs)
    return Offer(refs, head if head in refs else None, faults)


def is_followed(ref: str) -> bool:
    """Whether a ref may follow upstream: a safe name, not ours, with no effect on other objects."""
    return is_safe_ref(ref) and not ref.startswith(_NEVER)


_BAD_NAME = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|\.$|/$|\.\./")


def is_safe_ref(ref: str) -> bool:
    """The rules of git check-ref-format, and a length that every file system can hold."""
    return (
        ref.startswith("refs/")
        and not _BAD_NAME.search(ref)
        and (len(ref) <= 60 or all(len(part.encode()) <= 240 for part in ref.split("/")))
    )


def directories_of(ref: str, shortest: int = 3) -> list[str]:
    """The directories that a loose ref is in, of at least `shortest` parts: none may be a ref."""
    parts = ref.split("/")
    return ["/".join(parts[:n]) for n in range(shortest, len(parts))]


def drop_shadowed(refs: Refs) -> list[RefFault]:
    """Drop `a/b` where `a` is a ref too: git cannot hold both, but an upstream may offer them."""
    faults = []
    for ref in sorted(refs, key=len, reverse=True):
        if not refs.keys().isdisjoint(directories_of(ref)):
            reason = "another ref is its directory"
            faults.append(RefFault(ref=ref, commit=refs.pop(ref), reason=reason))
    return faults


def theirs(refs: Refs) -> Refs:
    """The refs that follow upstream: all but ours."""
    return {ref: oid for ref, oid in refs.items() if not ref.startswith(OURS)}


def compare(old: Refs, new: Refs) -> list[RefChange]:
    """The differences, by name. A move counts as `forced` until its commits were compared."""
    changes = []
    for ref in sorted({ref for ref, _ in old.items() ^ new.items()}):
        before, after = old.get(ref), new.get(ref)
        kind: Literal["created", "deleted", "forced"] = (
            "created" if before is None else "deleted" if after is None else "forced"
        )
        changes.append(RefChange(ref=ref, kind=kind, old=before, new=after))
    return changes


def summarise(changes: Iterable[RefChange]) -> str:
    """`2 created, 1 forced`: many changes in one line."""
    counts = Counter[str](change.kind for change in changes)
    kinds = ("created", "forwarded", "forced", "deleted")
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if kind in counts) or "no change"


async def classify(
    repository: Repository, changes: Sequence[RefChange], held: set[str] | None = None
) -> list[RefChange]:
    """Mark fast-forwards as `forwarded`, other moves as `kept`, if their old tip is in `held`."""
    classified = []
    for change in changes:
        if change.old and change.kind != "created":
            is_branch = change.new and not change.ref.startswith("refs/tags/")
            if is_branch and await repository.is_ancestor(change.old, str(change.new)):
                change = replace(change, kind="forwarded")
            else:
                change = replace(change, kept=held is None or change.old in held)
        classified.append(change)
    return classified
