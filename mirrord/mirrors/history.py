"""The ref history of a mirror: what its refs were after each sync that changed one.

Owns `refs/mirrord/history`: a line of commits, each with a tree of one blob `refs` (sorted
`<object id> <ref>` lines of the refs that follow upstream and of the kept refs, and a line
`@ HEAD <ref>`). It lives in git in the mirror itself, so it is copied, packed and verified with
it. Records are only added. HEAD and the refs of a mirror are what the newest record says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from ..errors import CorruptObjectError, GitFailedError, InvalidRequestError, NotFoundError
from ..model import shown
from ..protocol import RefChange, RefRecord
from .refs import compare, is_followed, summarise, theirs
from .repository import HISTORY, KEPT, Refs, Repository

_OID = re.compile(r"[0-9a-f]{40}")
_ID = re.compile(r"[0-9a-f]{7,40}")
WAS = "Was"
"""The trailer with an id that a record had before it was written again on the records of a bundle."""

BEGUN_ANEW = "begun anew by a heal"
"""Why the first record was made, where those before it were lost and no bundle had them."""

_PARENTS = re.compile(rb"^parent [0-9a-f]{40}\n", re.MULTILINE)
_FORMAT = "--format=%H%x00%ct%x00%s" + "".join(
    f"%x00%(trailers:key={key},valueonly,separator=%x2C)" for key in ("Refs", WAS)
)
_MAX_RECORDS = 1000
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
    """Store a set of refs and the ids of the kept ones; answers the record's commit. Nothing
    points at it yet. The history goes on from the first of `parents`."""
    listed = refs | {f"{KEPT}{oid}": oid for oid in kept}
    lines = [f"{oid} {ref}\n" for ref, oid in sorted(listed.items())]
    content = "".join([*lines, f"@ HEAD {head}\n" if head else ""])
    blob = await repository.write_object("blob", content.encode("utf-8", "surrogateescape"))
    tree = await repository.write_object("tree", b"100644 refs\0" + bytes.fromhex(blob))
    message = f"{why}: {summarise(changes)}\n\nRefs: {len(refs)}\n"
    above = [word for parent in parents for word in ("-p", parent)]
    made = await repository.git.run(
        "commit-tree", *above, tree, git_dir=repository.path, stdin=message.encode(),
        doing=f"record the refs of mirror {repository.name}",
    )  # fmt: skip
    return made.lines[0]


async def write_again(
    repository: Repository, records: Sequence[RefRecord], *, parent: str | None
) -> str:
    """Store records, the newest first, on another one or on none; answers the newest one's new id. Each keeps its old one too."""
    for record in reversed(records):
        shown = await repository.git.run(
            "cat-file",
            "commit",
            record.id,
            git_dir=repository.path,
            doing=f"read a ref record of mirror {repository.name}",
        )
        header, _, message = _PARENTS.sub(b"", shown.stdout).partition(b"\n\n")
        tree, _, rest = header.partition(b"\n")
        lines = [tree, *([f"parent {parent}".encode()] if parent else []), rest]
        body = (
            b"\n".join(lines) + b"\n\n" + message.rstrip(b"\n") + f"\n{WAS}: {record.id}\n".encode()
        )
        parent = await repository.write_object("commit", body)
    return str(parent)


async def list_records(
    repository: Repository, limit: int = _MAX_RECORDS, start: str = HISTORY
) -> list[RefRecord]:
    """The newest records first."""
    if start == HISTORY and HISTORY not in await repository.all_refs():
        return []
    listing = await repository.git.run(
        "log", "-z", f"--max-count={limit}", "--first-parent", _FORMAT, start, "--",
        git_dir=repository.path,
        doing=f"read the ref history of mirror {repository.name}",
    )  # fmt: skip
    fields = listing.stdout.decode("utf-8", "replace").split("\0")
    return [_record(*fields[at : at + 5]) for at in range(0, len(fields) - 4, 5)]


def _record(commit: str, seconds: str, subject: str, count: str, was: str) -> RefRecord:
    at = datetime.fromtimestamp(int(seconds), tz=timezone.utc)
    former = [oid.strip() for oid in was.split(",") if oid.strip()]
    return RefRecord(
        id=commit.strip(), at=at, ref_count=int(count.strip() or 0), summary=subject, was=former
    )


async def find_record(repository: Repository, at: str) -> RefRecord:
    """The record named by its id (at least 7 digits), by `latest`, or the one that stood at a time in ISO 8601."""
    records = await list_records(repository, limit=EVERY_RECORD)
    if at == "latest" and records:
        return records[0]
    if _ID.fullmatch(at):
        found = [
            record
            for record in records
            if any(oid.startswith(at) for oid in (record.id, *record.was))
        ]
    else:
        moment = _moment(at)
        found = [record for record in records if record.at <= moment][:1]
    if not found and records and not _ID.fullmatch(at):
        raise NotFoundError(
            f"cannot find ref record {shown(at)} of mirror {repository.name}: "
            f"the first one is of {records[-1].at:%Y-%m-%dT%H:%M:%SZ}",
            hint="`mirrord refs log NAME` lists them",
        )
    if len(found) != 1:
        raise NotFoundError(
            f"cannot find ref record {shown(at)} of mirror {repository.name}: {'several match' if found else 'there is none'}",
            hint="`mirrord refs log NAME` lists them",
        )
    return found[0]


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"cannot read ref record {shown(text)}: it is neither an id nor a time",
            hint="write a time as 2026-01-31T12:00:00Z",
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


async def read_refs(repository: Repository, record: str) -> tuple[Refs, str | None]:
    """The refs of a record, and the branch that HEAD named."""
    listed, head = parse_record(await _read_lines(repository, record))
    return {ref: oid for ref, oid in listed.items() if is_followed(ref)}, head


async def read_kept(repository: Repository, record: str | None) -> set[str]:
    """The ids of the kept refs of a record; none where it cannot be read."""
    try:
        listed, _ = parse_record(await _read_lines(repository, record) if record else b"")
    except (CorruptObjectError, GitFailedError):
        return set()
    return {oid for ref, oid in listed.items() if ref == f"{KEPT}{oid}"}


async def _read_lines(repository: Repository, record: str) -> bytes:
    doing = f"read ref record {record} of {repository.name}"
    shown = await repository.git.run(
        "cat-file", "blob", f"{record}:refs", git_dir=repository.path, doing=doing
    )
    return shown.stdout


def parse_record(text: bytes) -> tuple[Refs, str | None]:
    """The refs that a record lists, the kept ones too, and what HEAD named.

    A record may have come in a bundle: names that a mirror may not have are left out.
    """
    refs: Refs = {}
    head = None
    for line in text.decode("utf-8", "surrogateescape").split("\n"):
        oid, _, ref = line.partition(" ")
        if oid == "@":
            head = ref.removeprefix("HEAD ")
        elif _OID.fullmatch(oid) and (is_followed(ref) or ref == f"{KEPT}{oid}"):
            refs[ref] = oid
    return refs, head


async def columns_of(repository: Repository, known: str | None) -> dict[str, Any]:
    """What the refs of a mirror decide, as columns of its row in the catalog.

    `known` is the record that the row has. It stays where the history has lost it, until a heal
    has brought it back or said that nobody has it.
    """
    refs = await repository.all_refs()
    tip = refs.get(HISTORY)
    is_lost = known is not None and (tip is None or not await is_known(repository, known, tip))
    kept_count = sum(ref.startswith(KEPT) for ref in refs)
    return {
        "ref_count": len(theirs(refs)),
        "kept_count": kept_count,
        "history": known if is_lost else tip,
    }


async def is_known(repository: Repository, record: str, tip: str) -> bool:
    """Whether a record, by any id that it ever had, is in the history that ends at `tip`."""
    if record == tip or await repository.is_ancestor(record, tip):
        return True
    return any(record in past.was for past in await list_records(repository, EVERY_RECORD, tip))


async def diff_records(repository: Repository, a: str, b: str, kept: Refs) -> list[RefChange]:
    """What changed between two records; moves are told apart by ancestry."""
    old, _ = await read_refs(repository, a)
    new, _ = await read_refs(repository, b)
    return await classify(repository, compare(old, new), held=set(kept.values()))


async def classify(
    repository: Repository, changes: Sequence[RefChange], held: set[str] | None = None
) -> list[RefChange]:
    """Say which moves were only forward. `kept` becomes true for what is not, or, with `held`, where the old tip is in it."""
    return [await _classified(repository, change, held) for change in changes]


async def _classified(
    repository: Repository, change: RefChange, held: set[str] | None
) -> RefChange:
    if change.kind == "created":
        return change
    is_branch = change.old and change.new and not change.ref.startswith("refs/tags/")
    if is_branch and await repository.is_ancestor(str(change.old), str(change.new)):
        return replace(change, kind="forwarded")
    return replace(change, kept=held is None or change.old in held)
