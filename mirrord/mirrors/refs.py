"""Refs: what an upstream offers, which names are allowed, how two sets differ; and their history.

A mirror takes the refs that the configured patterns name, never `refs/mirrord/`, never
`refs/replace/`, never a name that git or a file system could misread.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal

from ..errors import CorruptObjectError, GitFailedError, InvalidRequestError, NotFoundError
from ..model import shown
from ..protocol import RefChange, RefFault, RefRecord
from .repository import HISTORY, KEPT, OURS, Refs, Repository

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
    parts = ("(.+)".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
    wanted = re.compile("|".join(parts))
    is_oid = re.compile(r"[0-9a-f]{40}").fullmatch
    refs: Refs = {}
    faults: list[RefFault] = []
    head = None
    for line in lines:
        oid, _, ref = line.partition("\t")
        if oid.startswith("ref: ") and ref == "HEAD":
            head = oid.removeprefix("ref: ")
        is_wanted = wanted.fullmatch(ref) and not ref.startswith(_NEVER) and not ref.endswith("^{}")
        if not is_wanted or not is_oid(oid):
            continue
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
        and all(len(part.encode()) <= 240 for part in ref.split("/"))
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
    for ref in sorted(old.keys() | new.keys()):
        before, after = old.get(ref), new.get(ref)
        if before != after:
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


# -- the ref history: the refs after each sync that changed one ------------------------------------
#
# `refs/mirrord/history` is a history of commits, each with a tree of one blob `refs`: sorted lines
# `<object id> <ref>` for the refs that follow upstream and the kept refs, and a line
# `@ HEAD <ref>`. It is in git in the mirror itself, so it is copied, packed and verified with it.
# Records are only added. HEAD and the refs of a mirror are what the newest record says.

BEGUN_ANEW = "begun anew by a heal"
"""The subject of a first record whose predecessors were lost and in no bundle."""
EVERY_RECORD = 1_000_000


async def write_record(
    repository: Repository,
    refs: Refs,
    head: str | None,
    changes: Sequence[RefChange],
    *,
    kept: Collection[str],
    parents: Sequence[str],
    why: str,
) -> str:
    """Store a set of refs and the ids of the kept ones; answers the commit, which no ref names yet.

    The records of the last of `parents` are listed before those of the others.
    """
    listed = refs | {f"{KEPT}{oid}": oid for oid in kept}
    lines = [f"{oid} {ref}\n" for ref, oid in sorted(listed.items())]
    content = "".join([*lines, f"@ HEAD {head}\n" if head else ""])
    blob = await repository.write_object("blob", content.encode("utf-8", "surrogateescape"))
    tree = await repository.write_object("tree", b"100644 refs\0" + bytes.fromhex(blob))
    message = f"{why}: {summarise(changes)}\n\nRefs: {len(refs)}\n"
    above = [word for parent in parents for word in ("-p", parent)]
    doing = f"record the refs of mirror {repository.name}"
    made = await repository.run("commit-tree", *above, tree, stdin=message.encode(), doing=doing)
    return made.lines[0]


async def list_records(
    repository: Repository, limit: int = 1000, start: str = HISTORY
) -> list[RefRecord]:
    """The newest records first."""
    if start == HISTORY and HISTORY not in await repository.all_refs():
        return []
    listing = await repository.run(
        "log", "-z", f"--max-count={limit}", "--topo-order",
        "--format=%H%x00%ct%x00%s%x00%(trailers:key=Refs,valueonly)", start, "--",
        doing=f"read the ref history of mirror {repository.name}",
    )  # fmt: skip
    fields = iter(listing.stdout.decode("utf-8", "replace").split("\0"))
    return [
        RefRecord(
            id=commit.strip(),
            at=datetime.fromtimestamp(int(seconds), tz=timezone.utc),
            ref_count=int(count.strip() or 0),
            summary=subject,
        )
        for commit, seconds, subject, count in zip(fields, fields, fields, fields, strict=False)
    ]


async def find_record(repository: Repository, at: str) -> RefRecord:
    """The record with an id (at least 7 digits), `latest`, or the one in force at an ISO 8601 time.

    Raises NotFoundError, InvalidRequestError.
    """
    records = await list_records(repository, limit=EVERY_RECORD)
    if at == "latest" and records:
        return records[0]
    hint = "`mirrord refs log NAME` lists them"
    failure = f"cannot find ref record {shown(at)} of mirror {repository.name}"
    if re.fullmatch(r"[0-9a-f]{7,40}", at):
        match [record for record in records if record.id.startswith(at)]:
            case [record]:
                return record
            case found:
                fact = "several match" if found else "there is none"
                raise NotFoundError(f"{failure}: {fact}", hint=hint)
    try:
        moment = datetime.fromisoformat(at)
    except ValueError as error:
        raise InvalidRequestError(
            f"cannot read ref record {shown(at)}: it is neither an id nor a time",
            hint="write a time as 2026-01-31T12:00:00Z",
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    if before := [record for record in records if record.at <= moment]:
        return max(before, key=lambda record: record.at)
    first = f"the first one is of {records[-1].at:%Y-%m-%dT%H:%M:%SZ}" if records else ""
    raise NotFoundError(f"{failure}: {first or 'there is none'}", hint=hint)


async def read_refs(repository: Repository, record: str) -> tuple[Refs, str | None]:
    """The refs of a record, and the branch that HEAD named."""
    listed, head = parse_record(await _read(repository, record))
    return {ref: oid for ref, oid in listed.items() if is_followed(ref)}, head


async def read_kept(repository: Repository, record: str | None) -> set[str]:
    """The ids of the kept refs of a record; none where it cannot be read."""
    try:
        listed, _ = parse_record(await _read(repository, record) if record else b"")
    except (CorruptObjectError, GitFailedError):
        return set()
    return {oid for ref, oid in listed.items() if ref == f"{KEPT}{oid}"}


async def _read(repository: Repository, record: str) -> bytes:
    doing = f"read ref record {record} of {repository.name}"
    return (await repository.run("cat-file", "blob", f"{record}:refs", doing=doing)).stdout


def parse_record(text: bytes) -> tuple[Refs, str | None]:
    """The refs that a record lists, the kept ones too, and the target of HEAD.

    Names that a mirror may not have are left out: a record may have come in a bundle.
    """
    is_oid = re.compile(r"[0-9a-f]{40}").fullmatch
    refs: Refs = {}
    head = None
    for line in text.decode("utf-8", "surrogateescape").split("\n"):
        oid, _, ref = line.partition(" ")
        if oid == "@":
            head = ref.removeprefix("HEAD ")
        elif is_oid(oid) and (is_followed(ref) or ref == f"{KEPT}{oid}"):
            refs[ref] = oid
    return refs, head


async def columns_of(repository: Repository, known: str | None) -> dict[str, Any]:
    """The columns of a mirror's row in the catalog that its refs decide.

    `known` is the record in the row. It stays where the history has lost it, until a heal has
    brought it back or said that nobody has it.
    """
    refs = await repository.all_refs()
    tip = refs.get(HISTORY)
    is_lost = known and known != tip and not (tip and await repository.is_ancestor(known, tip))
    return {
        "ref_count": len(theirs(refs)),
        "kept_count": sum(ref.startswith(KEPT) for ref in refs),
        "history": known if is_lost else tip,
    }


async def diff_records(repository: Repository, a: str, b: str, kept: Refs) -> list[RefChange]:
    """The differences between two records; ancestry decides how a ref moved."""
    old, _ = await read_refs(repository, a)
    new, _ = await read_refs(repository, b)
    return await classify(repository, compare(old, new), held=set(kept.values()))


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
