"""What upstream offers, and what has to change for a mirror to follow it. Values only; no I/O.

Owns which refs may be taken: those that the configured patterns name, never `refs/mirrord/`, never `refs/replace/`, never a name
that git or a file system could misread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..protocol import RefChange, RefFault
from .repository import OURS, Refs

_NEVER = (OURS, "refs/replace/", "refs/bisect/", "refs/worktree/", "refs/rewritten/", "refs/stash")
_OID = re.compile(r"[0-9a-f]{40}")
_BAD_NAME = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|\.$|/$|\.\./")


@dataclass(frozen=True, slots=True)
class Offer:
    """The refs of an upstream at one moment. `head` is the branch that its HEAD names; `redirected_to` is where it was found."""

    refs: Refs
    head: str | None = None
    faults: list[RefFault] = field(default_factory=list)
    redirected_to: str | None = None


def read_offer(lines: Iterable[str], patterns: Sequence[str]) -> Offer:
    """Read `git ls-remote --symref`; a hostile name becomes a fault."""
    wanted = re.compile(
        "|".join(
            "(.+)".join(re.escape(part) for part in pattern.split("*")) for pattern in patterns
        )
    )
    refs: Refs = {}
    faults: list[RefFault] = []
    head = None
    for line in lines:
        oid, _, ref = line.partition("\t")
        if oid.startswith("ref: ") and ref == "HEAD":
            head = oid.removeprefix("ref: ")
        elif (
            wanted.fullmatch(ref)
            and not ref.startswith(_NEVER)
            and not ref.endswith("^{}")
            and _OID.fullmatch(oid)
        ):
            if is_safe_ref(ref):
                refs[ref] = oid
            else:
                faults.append(
                    RefFault(
                        ref=ascii(ref)[1:-1],
                        commit=oid,
                        reason="the name of the ref is not one that git allows",
                    )
                )
    faults += drop_shadowed(refs)
    return Offer(refs, head if head in refs else None, faults)


def is_followed(ref: str) -> bool:
    """Whether a ref may be one that follows upstream: a safe name, none of ours, none that changes what others mean."""
    return is_safe_ref(ref) and not ref.startswith(_NEVER)


def is_safe_ref(ref: str) -> bool:
    """The rules of git check-ref-format, and a length that every file system can hold."""
    return (
        ref.startswith("refs/")
        and not _BAD_NAME.search(ref)
        and all(len(part.encode()) <= 240 for part in ref.split("/"))
    )


def drop_shadowed(refs: Refs) -> list[RefFault]:
    """`a` and `a/b` cannot both exist; git does not make that, an upstream could. The shorter name stays."""
    faults = []
    for ref in sorted(refs, key=len, reverse=True):
        parts = ref.split("/")
        if any("/".join(parts[:n]) in refs for n in range(3, len(parts))):
            faults.append(
                RefFault(ref=ref, commit=refs.pop(ref), reason="another ref is its directory")
            )
    return faults


def theirs(refs: Refs) -> Refs:
    """The refs that follow upstream: all but ours."""
    return {ref: oid for ref, oid in refs.items() if not ref.startswith(OURS)}


def compare(old: Refs, new: Refs) -> list[RefChange]:
    """What differs, by name. Every move counts as `forced` until somebody looked at the commits."""
    changes = []
    for ref in sorted(old.keys() | new.keys()):
        before, after = old.get(ref), new.get(ref)
        if before != after:
            kind: Literal["created", "deleted", "forced"] = (
                "created" if before is None else "deleted" if after is None else "forced"
            )
            changes.append(RefChange(ref=ref, kind=kind, old=before, new=after))
    return changes


def summarise(changes: Iterable[RefChange]) -> str:
    """`2 created, 1 forced`: one line about many changes."""
    counts: dict[str, int] = {}
    for change in changes:
        counts[change.kind] = counts.get(change.kind, 0) + 1
    kinds = ("created", "forwarded", "forced", "deleted")
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if kind in counts) or "no change"
