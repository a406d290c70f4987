"""The ref history: the refs after each sync that changed one.

The commits of `refs/mirrord/history` are records, which are only added. The tree of a record has
two blobs of sorted lines `<object id> <ref>`, for the refs that follow upstream and the kept refs.
`refs` lists them as of some earlier record. `moved` lists the changes since, with zeros for a
deleted ref, and `@ HEAD <ref>`. Records share `refs` until the changes are many, so that the cost
of a record depends on what moved. HEAD and the refs of a mirror are what the newest record says.
The history is in git, so it is copied, packed and verified with the mirror.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from anyio import to_thread

from ..errors import (
    CorruptObjectError,
    GitFailedError,
    InvalidRequestError,
    NotFoundError,
    full_disk_named,
)
from ..git.batch import BatchObject, object_info
from ..git.packwriter import write_loose
from ..model import shown
from ..protocol import RefChange, RefRecord
from ..quoting import decode_name, encode_name
from .refs import classify, compare, followed_refs, is_followed, summarise
from .repository import HISTORY, KEPT, Refs, Repository

# the subject of a first record whose predecessors were lost and in no bundle
RESTARTED = "begun anew by a heal"
# a record a minute for two years
EVERY_RECORD = 1_000_000
# as in git's reflogs and hooks, for a ref that was deleted
_GONE = "0" * 40


class RecordedRefs(NamedTuple):
    """The content of a record: the refs that follow upstream, the kept refs, and HEAD.

    `base` is its blob `refs`, which the next record may share; `base_lists` its content.
    """

    listed: Refs
    head: str | None
    base: str = ""
    base_lists: Mapping[str, str] = MappingProxyType({})

    @property
    def followed(self) -> Refs:
        return followed_refs(self.listed)

    @property
    def kept(self) -> set[str]:
        return {oid for ref, oid in self.listed.items() if ref.startswith(KEPT)}


NOTHING_RECORDED = RecordedRefs({}, None)


def blobs_of(record: str) -> tuple[str, str]:
    """Return the revisions of a record's blobs `refs` and `moved`."""
    return f"{record}:refs", f"{record}:moved"


def parse_record(refs: BatchObject, moved: BatchObject) -> RecordedRefs:
    base, _ = parse_lines(refs.data)
    return RecordedRefs(*parse_lines(moved.data, base), refs.oid, base)


def parse_lines(
    text: bytes, base: Mapping[str, str] = MappingProxyType({})
) -> tuple[Refs, str | None]:
    """Apply the lines of a record to `base`; return the refs and the target of HEAD.

    Skips names that a mirror may not have: a record may have come in a bundle.
    """
    is_oid = re.compile(r"[0-9a-f]{40}").fullmatch
    listed, head = dict(base), None
    for line in decode_name(text).split("\n"):
        oid, _, ref = line.partition(" ")
        if oid == "@":
            head = ref.removeprefix("HEAD ")
        elif oid == _GONE:
            listed.pop(ref, None)
        elif is_oid(oid) and (is_followed(ref) or ref == f"{KEPT}{oid}"):
            listed[ref] = oid
    return listed, head


async def read_record(repository: Repository, record: str) -> RecordedRefs:
    """Read a record; raises CorruptObjectError, GitFailedError."""
    doing = f"read ref record {record} of {repository.name}"
    names, git_dir = blobs_of(record), repository.path
    objects = await object_info(repository.git, git_dir, names, contents=True, doing=doing)
    if any(blob.kind != "blob" for blob in objects):
        raise CorruptObjectError(f"cannot {doing}: a part of it is missing")
    refs, moved = objects
    return await to_thread.run_sync(parse_record, refs, moved)


async def read_last(repository: Repository, record: str | None) -> RecordedRefs:
    """Read a record; an empty one where it is missing or unreadable."""
    with suppress(CorruptObjectError, GitFailedError):
        return await read_record(repository, record) if record else NOTHING_RECORDED
    return NOTHING_RECORDED


async def write_record(
    repository: Repository,
    refs: Refs,
    head: str | None,
    changes: Sequence[RefChange],
    *,
    kept: Collection[str],
    parents: Sequence[str],
    why: str,
    last: RecordedRefs = NOTHING_RECORDED,
) -> str:
    """Write a record of `refs` and of the ids in `kept`; return its commit, which no ref names yet.

    `list_records` lists the records of the last of `parents` before those of the others. `last` is
    a record whose blob `refs` this one may share.
    """
    write = partial(write_loose, repository.objects)
    compose = partial(_write_record, write, refs, head, changes, kept, parents, why, last)
    with full_disk_named(f"mirror {repository.name}"):
        return await to_thread.run_sync(compose)


def _write_record(
    write: Callable[[str, bytes], str],
    refs: Refs,
    head: str | None,
    changes: Sequence[RefChange],
    kept: Collection[str],
    parents: Sequence[str],
    why: str,
    last: RecordedRefs,
) -> str:
    listed = refs | {f"{KEPT}{oid}": oid for oid in kept}
    moved = dict(listed.items() - last.base_lists.items())
    moved |= dict.fromkeys(last.base_lists.keys() - listed, _GONE)
    base = last.base
    # k records, each with the changes of those before it, take as much as all n refs if k² = 2n
    if not base or len(moved) ** 2 > 2 * len(listed):
        base, moved = write("blob", _lines(listed)), {}
    head_line = encode_name(f"@ HEAD {head}\n") if head else b""
    own = write("blob", _lines(moved) + head_line)
    entries = (("moved", own), ("refs", base))
    content = (f"100644 {name}\0".encode() + bytes.fromhex(oid) for name, oid in entries)
    tree = write("tree", b"".join(content))
    who = f"mirrord <mirrord@localhost> {int(time.time())} +0000"
    lines = [f"tree {tree}", *(f"parent {parent}" for parent in parents)]
    lines += [f"author {who}", f"committer {who}", ""]
    lines += [f"{why}: {summarise(changes)}", "", f"Refs: {len(refs)}", ""]
    return write("commit", encode_name("\n".join(lines)))


def _lines(refs: Refs) -> bytes:
    lines = (f"{refs[ref]} {ref}\n" for ref in sorted(refs, key=encode_name))
    return encode_name("".join(lines))


async def list_records(
    repository: Repository, limit: int = 1000, start: str = HISTORY
) -> list[RefRecord]:
    """List records, the newest first."""
    if start == HISTORY and HISTORY not in await repository.all_refs():
        return []
    listing = await repository.run(
        "log", "-z", f"--max-count={limit}", "--topo-order",
        "--format=%H%x00%ct%x00%s%x00%(trailers:key=Refs,valueonly)", start, "--",
        doing=f"read the ref history of mirror {repository.name}",
    )  # fmt: skip
    fields = iter(decode_name(listing.stdout).split("\0"))
    return [
        RefRecord(
            id=commit.strip(),
            at=datetime.fromtimestamp(int(seconds), tz=timezone.utc),
            ref_count=int(count.strip() or 0),
            summary=subject,
        )
        for commit, seconds, subject, count in zip(fields, fields, fields, fields, strict=False)
    ]


async def get_record(repository: Repository, wanted: str) -> RefRecord:
    """Find a record by id (at least 7 digits), `latest`, or the ISO 8601 time it was in force.

    Raises NotFoundError, InvalidRequestError.
    """
    records = await list_records(repository, limit=EVERY_RECORD)
    if wanted == "latest" and records:
        return records[0]
    hint = "`mirrord ref log NAME` lists them"
    failure = f"cannot find ref record {shown(wanted)} of mirror {repository.name}"
    if re.fullmatch(r"[0-9a-f]{7,40}", wanted):
        match [record for record in records if record.id.startswith(wanted)]:
            case [record]:
                return record
            case several:
                fact = "several match" if several else "none matches"
                raise NotFoundError(f"{failure}: {fact}", hint=hint)
    try:
        moment = datetime.fromisoformat(wanted)
    except ValueError as error:
        raise InvalidRequestError(
            f"cannot read ref record {shown(wanted)}: it is neither an id nor a time",
            hint="write a time as 2026-01-31T12:00:00Z",
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    if before := [record for record in records if record.at <= moment]:
        return max(before, key=lambda record: record.at)
    first = f"the first one is of {records[-1].at:%Y-%m-%dT%H:%M:%SZ}" if records else ""
    raise NotFoundError(f"{failure}: {first or 'none matches'}", hint=hint)


async def columns_of(repository: Repository, record: str | None) -> dict[str, Any]:
    """Return the columns of a mirror's row that depend on its refs.

    `record` is the record in the row. It stays there while the history lacks it, until a heal has
    restored it or found that no donor has it.
    """
    refs = await repository.all_refs()
    tip = refs.get(HISTORY)
    is_lost = record and record != tip and not (tip and await repository.is_ancestor(record, tip))
    return {
        "ref_count": len(followed_refs(refs)),
        "kept_count": sum(ref.startswith(KEPT) for ref in refs),
        "history": record if is_lost else tip,
    }


async def diff_records(repository: Repository, a: str, b: str, kept: Refs) -> list[RefChange]:
    """List the differences between two records, classified by ancestry."""
    old, new = [(await read_record(repository, record)).followed for record in (a, b)]
    return await classify(repository, compare(old, new), held=set(kept.values()))
