"""What the refs and HEAD of a mirror should be, where they are lost, broken or moved: from their
names, the ref history and the catalog.

A pin and a kept ref carry the object in their name; HEAD and the others are in the newest record of
the ref history, which the catalog knows. Whatever any record had, or a ref named that is put right,
and nothing reaches any more is kept. Reads only; runs in a worker.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ..audit.connectivity import kinds_of, read_graph
from ..audit.object_files import TIMEOUT
from ..audit.ref_files import Names, named_in
from ..audit.ref_history import Record, is_record, past_ids, read_record, read_records, unkept
from ..errors import MirrordError
from ..git.batch import lines_of
from ..git.command import run_git_sync
from ..mirrors.bundles.merge import must_be_history
from ..mirrors.history import WAS, list_records
from ..mirrors.repository import HISTORY, KEPT, OURS, Refs, Repository
from ..model import MirrorName
from .donors import BundleFile

_OURS = re.compile(rb"committer mirrord <mirrord@localhost> (\d+) ")
_TRAILER = b"\n\nRefs: "
_FORMER = f"\n{WAS}: ".encode()
_USUAL = ("refs/heads/main", "refs/heads/master")


@dataclass(slots=True)
class RefPlan:
    """`restore` are refs to make, `drop` those to remove; `head` is what HEAD should name. `lines`
    are the tips of two lines of records that the history is to go on from, where it has two.
    """

    restore: dict[str, str] = field(default_factory=dict)
    drop: set[str] = field(default_factory=set)
    head: str | None = None
    lines: tuple[str, ...] = ()

    def refs(self, names: Names) -> dict[str, str]:
        """All refs as they should be."""
        staying = {ref: oid for ref, oid in names.refs.items() if ref not in self.drop}
        return {**staying, **self.restore}


def plan_refs(view: Path, names: Names, default_branch: str | None, known: str | None) -> RefPlan:
    """Say what is to be put right. `view` has the refs that could be read, and every object that
    could be had so far; `known` is a record that the history must have.
    """
    plan = RefPlan()
    wrong = {bad.path for bad in names.faults if bad.path.startswith("refs/")}
    plan.restore = {ref: oid for ref in wrong if (oid := named_in(ref))}
    plan.drop = wrong - plan.restore.keys()
    history, plan.lines = _history(view, names, known)
    if history and names.refs.get(HISTORY) != history:
        plan.restore[HISTORY] = history
    records = [
        record for line in plan.lines or [history] if line for record in read_records(view, line)
    ]
    recorded, head = read_record(view, history) if history else ({}, None)
    plan.restore |= {ref: oid for ref, oid in recorded.items() if names.refs.get(ref) != oid}
    plan.drop |= _in_the_way(names, plan.restore) - recorded.keys()
    plan.drop -= plan.restore.keys()
    astray = dict(names.astray)
    astray |= {ref: oid for ref, oid in names.refs.items() if plan.refs(names).get(ref) != oid}
    plan.restore |= _kept(view, astray, records, plan.refs(names))
    plan.head = _head(names, head, default_branch, plan.refs(names))
    return plan


def _in_the_way(names: Names, restore: Mapping[str, str]) -> set[str]:
    """Refs that are a directory of one to restore, or lie below it."""
    above = {
        "/".join(parts[:n])
        for parts in (ref.split("/") for ref in restore)
        for n in range(2, len(parts))
    }
    return {
        ref
        for ref in names.refs
        if ref in above or any(ref.startswith(f"{new}/") for new in restore)
    }


def _kept(
    view: Path, astray: Mapping[str, str], records: list[Record], refs: Mapping[str, str]
) -> dict[str, str]:
    """Kept refs for what refs named that are put right, and for what records had."""
    pasts = [
        *records,
        ({f"refs/heads/{number}": oid for number, oid in enumerate(astray.values())}, None),
    ]
    kinds = kinds_of(view, set(astray.values()) - set(refs.values()))
    tags = {f"{KEPT}{oid}": oid for oid, kind in kinds.items() if kind == "tag"}
    return tags | unkept(view, pasts, {**refs, **tags})


def _history(view: Path, names: Names, known: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Where the ref history should be; and both tips, where it lost `known` and went on since."""
    tip = names.refs.get(HISTORY)
    tip = tip if tip and is_record(view, tip) else None
    if known is None or not is_record(view, known):
        return tip or _find_history(view, names.refs), ()
    past, since = past_ids(view, known), past_ids(view, tip) if tip else set()
    if tip is None or past is None or since is None or tip in past:
        return known, ()
    return tip, () if known in since else (known, tip)


def _commits_among(view: Path, oids: Collection[str]) -> set[str]:
    asked = sorted(set(oids))
    shown = run_git_sync(
        "cat-file",
        "--batch-check=%(objecttype)",
        git_dir=view,
        stdin=lines_of(asked),
        timeout=TIMEOUT,
        doing="look up objects",
    ).lines
    return {oid for oid, kind in zip(asked, shown, strict=True) if kind == "commit"}


def _find_history(view: Path, refs: Mapping[str, str]) -> str | None:
    """The newest record that no other record builds on; of two of one time the one that was written again.

    What upstream's refs reach is upstream's, whatever it looks like.
    """
    theirs = {oid for ref, oid in refs.items() if not ref.startswith(OURS)}
    graph = read_graph(view, _commits_among(view, theirs))
    candidates = {oid: when for oid, when in _looking_like_records(view) if oid not in graph}
    parents = {parent for oid in candidates for parent in _parents(view, oid)}
    last = [oid for oid in candidates if oid not in parents]
    return max(last, key=lambda oid: (candidates[oid], oid), default=None)


def _looking_like_records(view: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    listing = run_git_sync(
        "cat-file", "--batch-all-objects", "--unordered", "--buffer", "--batch-check=%(objecttype) %(objectname)",
        git_dir=view,
        timeout=TIMEOUT,
        doing="look for the ref history",
    )  # fmt: skip
    commits = [line.split()[1] for line in listing.lines if line.startswith("commit ")]
    output = run_git_sync(
        "cat-file",
        "--batch",
        "--buffer",
        git_dir=view,
        stdin=lines_of(commits),
        timeout=TIMEOUT,
        doing="look for the ref history",
    ).stdout
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        oid, _, size = output[at:end].split()
        body = output[end + 1 : end + 1 + int(size)]
        found = _OURS.search(body.partition(b"\n\n")[0])
        if found and _TRAILER in body and read_record(view, oid.decode())[0]:
            yield oid.decode(), (int(found[1]), body.count(_FORMER))
        at = end + int(size) + 2


def _parents(view: Path, oid: str) -> tuple[str, ...]:
    shown = run_git_sync("cat-file", "commit", oid, git_dir=view, doing="read a ref record").stdout
    header = shown.partition(b"\n\n")[0]
    return tuple(line[7:].decode() for line in header.split(b"\n") if line.startswith(b"parent "))


def _head(
    names: Names, recorded: str | None, default_branch: str | None, refs: Mapping[str, str]
) -> str | None:
    """HEAD as the newest record has it, else as it is, or as the catalog or custom says."""
    said = (
        recorded,
        names.head,
        f"refs/heads/{default_branch}" if default_branch else None,
        *_USUAL,
    )
    branches = (ref for ref in sorted(refs) if ref.startswith("refs/heads/"))
    return next((ref for ref in (*said, *branches) if ref in refs), names.head)


Bring = Callable[[BundleFile, str], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Past:
    """`record` is the newest of `donor`, from when it is, and the refs that the bundle keeps."""

    at: datetime
    donor: str
    record: str
    kept: Refs


async def find_past(
    view: Repository, files: Iterable[BundleFile], name: MirrorName, bring: Bring
) -> Past | None:
    """The newest history among bundles of the mirror; `bring` gets a record with all it reaches into the view, or says False."""
    found: list[Past] = []
    for file in files:
        record = file.contents.history
        if record is None or not file.is_of(name) or not await bring(file, record):
            continue
        at = await _stood_at(view, record)
        if at is not None:
            kept = {f"{KEPT}{oid}": oid for oid in file.contents.kept}
            found.append(Past(at, file.name, record, kept))
    return max(found, key=lambda past: past.at, default=None)


async def _stood_at(view: Repository, record: str) -> datetime | None:
    """When the record was made; None where it is none."""
    try:
        await must_be_history(view, record)
        return (await list_records(view, limit=1, start=record))[0].at
    except MirrordError:
        return None
