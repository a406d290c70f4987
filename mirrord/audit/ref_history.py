"""Refs against the ref history: what is lost or moved, and tips that nothing leads to any more.

Every move of a ref by mirrord is in the history, in the same transaction. So a ref that differs
from the newest record was moved or removed by somebody else, and so was a history without the
record that the catalog knows. A tip that upstream left has a kept ref. Reads only, in a worker.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import BatchObject, read_objects_sync
from ..git.command import run_git_sync
from ..git.environment import UNTRUSTING
from ..mirrors.history import parse_record
from ..mirrors.refs import theirs
from ..mirrors.repository import HISTORY, KEPT, PINS
from ..mirrors.transaction import JOURNAL
from ..model import FindingKind
from .connectivity import Graph, ancestors, look_up, object_kinds, read_graph
from .object_files import TIMEOUT, Defect
from .ref_files import RefFiles, read_ref_files

Record = tuple[dict[str, str], str | None]
"""The refs of a record of the ref history, the kept ones too, and what HEAD named."""


def newest_record(found: RefFiles) -> str | None:
    """The newest record, as git is asked for its bytes."""
    return f"{found.refs[HISTORY]}:refs" if HISTORY in found.refs else None


def wrong_refs(
    repository: Path,
    git_dir: Path,
    found: RefFiles,
    objects: Mapping[str, BatchObject],
    known: str | None,
) -> dict[str, Defect]:
    """Defects by ref. `repository` has the objects of `git_dir`, readable for git.

    `objects` are what refs name, with the bytes of the newest record; `known` was once the newest.
    """
    defects = _wrong_refs(repository, found, objects, known)
    if not defects:
        return {}
    ends = time.monotonic() + 10  # longer than any transaction: a crash left an older journal
    while (git_dir / JOURNAL).exists() and time.monotonic() < ends:  # refs are moving now
        time.sleep(0.1)
    now = read_ref_files(git_dir)
    record = newest_record(now)
    objects = look_up(repository, now.refs.values(), read=[record] if record else [])
    again = _wrong_refs(repository, now, objects, known)
    defects = {ref: defect for ref, defect in defects.items() if again.get(ref) == defect}
    reported: dict[str, Defect] = {}
    for kind in dict.fromkeys(defect.kind for defect in defects.values()):
        refs = sorted(ref for ref, defect in defects.items() if defect.kind is kind)
        reported |= {ref: defects[ref] for ref in refs[:10]}
        if more := refs[10:]:
            reported[f"{more[0]} and {len(more) - 1} more refs"] = defects[more[0]]
    return reported


def _wrong_refs(
    repository: Path, found: RefFiles, objects: Mapping[str, BatchObject], known: str | None
) -> dict[str, Defect]:
    # the finding of a pin that names nothing is about the commit that it should keep
    hollow = [ref for ref, oid in found.refs.items() if oid not in objects and PINS not in ref]
    defects = dict.fromkeys(hollow, Defect(FindingKind.REF, "it names an object that is not here"))
    broken = {bad.path for bad in found.bad}
    tip = found.refs.get(HISTORY)
    if tip is None:
        if (found.refs or known) and HISTORY not in broken:
            defects[HISTORY] = Defect(FindingKind.REF_LOST, "it is gone")
        return defects
    record = objects.get(f"{tip}:refs")
    if record is None or record.kind != "blob":
        return {HISTORY: Defect(FindingKind.REF_MOVED, "it names no record")} | defects
    past = record_ids(repository, tip) if known not in {None, tip} else None
    if past is not None and known not in past:
        defects[HISTORY] = Defect(FindingKind.REF_MOVED, f"it does not lead to record {known}")
    recorded, head = parse_record(record.data)
    for ref, oid in recorded.items():
        if ref in broken or ref in defects:
            continue
        value = found.refs.get(ref)
        if value is None:
            reason = "it is gone, and the ref history has it"
            defects[ref] = Defect(FindingKind.REF_LOST, reason)
        elif value != oid:
            reason = f"it names {value}, and {oid} in the ref history"
            defects[ref] = Defect(FindingKind.REF_MOVED, reason)
    if head in recorded and found.head != head and "HEAD" not in broken:
        reason = f"it names {found.head}, and {head} in the ref history"
        defects["HEAD"] = Defect(FindingKind.HEAD, reason)
    return defects


# -- the records -----------------------------------------------------------------------------------


def is_record(repository: Path, oid: str) -> bool:
    """Whether an object is a record, as far as its form tells."""
    return bool(look_up(repository, [f"{oid}:refs"]))


def record_ids(repository: Path, tip: str) -> set[str] | None:
    """The records of the history up to `tip`; None where it has holes."""
    try:
        shown = run_git_sync(
            *UNTRUSTING, "rev-list", tip, "--", git_dir=repository, doing="read the ref history"
        )
    except (CorruptObjectError, GitFailedError):
        return None
    return set(shown.stdout.decode("ascii", "replace").split())


def read_record(repository: Path, record: str) -> Record:
    """One record of the ref history; nothing where it cannot be read."""
    return next(iter(_read(repository, [record])), ({}, None))


def read_records(repository: Path, tip: str) -> list[Record]:
    """Every record, the newest first, as far as they can be read."""
    try:
        walked = run_git_sync(
            *UNTRUSTING, "rev-list", "--first-parent", tip,
            git_dir=repository, timeout=TIMEOUT, doing="walk the ref history",
        ).lines  # fmt: skip
    except (CorruptObjectError, GitFailedError):
        walked = [tip]
    return _read(repository, walked)


def _read(repository: Path, records: Collection[str]) -> list[Record]:
    blobs = read_objects_sync(
        repository, [f"{record}:refs" for record in records],
        options=UNTRUSTING, timeout=TIMEOUT, bisect=True, doing="read ref records",
    )  # fmt: skip
    return [parse_record(blob.data) for blob in blobs if blob.exists]


# -- tips that records had -------------------------------------------------------------------------


def unkept(
    repository: Path, records: Iterable[Record], refs: Mapping[str, str], graph: Graph | None = None
) -> dict[str, str]:
    """Kept refs for commits of records that no ref of upstream and no kept one leads to.

    Empty while an object is missing or damaged: then ancestry is unknown.
    """
    lasting = {oid for ref, oid in refs.items() if not ref.startswith(PINS)}
    past = {oid for recorded, _ in records for oid in theirs(recorded).values()} - lasting
    if not past:
        return {}
    ends = look_up(repository, [f"{oid}^{{}}" for oid in lasting])  # through tags
    tips = [end.oid for end in ends.values() if end.kind == "commit"]
    there = {oid for oid, kind in object_kinds(repository, past).items() if kind == "commit"}
    if graph is None or not there <= graph.keys():
        graph = read_graph(repository, [*tips, *there])
    reached = ancestors(graph, tips)
    if reached - graph.keys() or len(ends) < len(lasting):
        return {}
    lost = there - reached
    inner = {parent for oid in ancestors(graph, lost) for parent in graph.get(oid, ())}
    return {f"{KEPT}{oid}": oid for oid in sorted(lost - inner)}
