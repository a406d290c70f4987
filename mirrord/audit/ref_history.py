"""Refs that are not what they should be: HEAD and the refs that follow upstream, kept refs and the
ref history.

Every move of a ref by mirrord is in the ref history, in the same transaction; so a ref that is not
what the newest record says was moved or taken away by somebody else, and so was a history without
the record that the catalog knows. Reads only. Runs in a worker.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of
from ..git.command import run_git_sync
from ..git.environment import UNTRUSTING
from ..mirrors.history import WAS, parse_record
from ..mirrors.refs import theirs
from ..mirrors.repository import HISTORY, KEPT, PINS
from ..mirrors.transaction import JOURNAL
from ..model import FindingKind
from .connectivity import Answers, Graph, ancestors, ask, kinds_of, read_graph
from .object_files import TIMEOUT, Fault
from .ref_files import Names, read_names

_TOLD = 10
_MOVING_S = 10.0
"""A transaction takes less; a journal that is older was left by a crash."""


def lost_refs(
    repository: Path, git_dir: Path, names: Names, answers: Answers, known: str | None
) -> dict[str, Fault]:
    """Faults by ref. `repository` has the objects of `git_dir`, and is what git can read; `answers`
    are to `questions`, and `known` is a record that was the newest once.
    """
    found = _lost(repository, names, answers, known)
    if not found:
        return {}
    ends = time.monotonic() + _MOVING_S
    while (git_dir / JOURNAL).exists() and time.monotonic() < ends:  # refs are moving now
        time.sleep(_MOVING_S / 100)
    now = read_names(git_dir)
    asked = questions(now)
    again = _lost(repository, now, ask(repository, asked, blob=record_of(now)), known)
    return _told({ref: fault for ref, fault in found.items() if again.get(ref) == fault})


def questions(names: Names) -> set[str]:
    """What has to be known of the objects that refs name."""
    return set(names.refs.values())


def record_of(names: Names) -> str | None:
    """The newest record of the ref history, as git is asked for its text."""
    return f"{names.refs[HISTORY]}:refs" if HISTORY in names.refs else None


def _lost(repository: Path, names: Names, answers: Answers, known: str | None) -> dict[str, Fault]:
    # a pin that names nothing is told as the commit that it should keep
    hollow = [
        ref for ref, oid in names.refs.items() if oid not in answers.objects and PINS not in ref
    ]
    faults = dict.fromkeys(hollow, Fault(FindingKind.REF, "it names an object that is not here"))
    broken = {bad.path for bad in names.faults}
    tip = names.refs.get(HISTORY)
    if tip is None:
        is_lost = (names.refs or known) and HISTORY not in broken
        return faults | ({HISTORY: Fault(FindingKind.REF_LOST, "it is gone")} if is_lost else {})
    if answers.text is None:
        return {HISTORY: Fault(FindingKind.REF_MOVED, "it names no record")} | faults
    past = past_ids(repository, tip) if known not in {None, tip} else None
    if past is not None and known not in past:
        faults[HISTORY] = Fault(FindingKind.REF_MOVED, f"it does not lead to record {known}")
    recorded, head = parse_record(answers.text)
    for ref, oid in recorded.items():
        if ref in broken or ref in faults:
            continue
        if ref not in names.refs:
            faults[ref] = Fault(FindingKind.REF_LOST, "it is gone, and the ref history has it")
        elif names.refs[ref] != oid:
            reason = f"it names {names.refs[ref]}, and {oid} in the ref history"
            faults[ref] = Fault(FindingKind.REF_MOVED, reason)
    if head in recorded and names.head != head and "HEAD" not in broken:
        reason = f"it names {names.head}, and {head} in the ref history"
        faults["HEAD"] = Fault(FindingKind.HEAD, reason)
    return faults


def is_record(repository: Path, oid: str) -> bool:
    """Whether an object is a record, as far as its form tells."""
    return f"{oid}:refs" in ask(repository, [f"{oid}:refs"]).objects


def past_ids(repository: Path, tip: str) -> set[str] | None:
    """Every id that records of the history which ends at `tip` ever had; None where it has holes."""
    try:
        shown = run_git_sync(
            *UNTRUSTING, "log", f"--format=%H %(trailers:key={WAS},valueonly,separator=%x20)", tip, "--",
            git_dir=repository,
            doing="read the ref history",
        )  # fmt: skip
    except (CorruptObjectError, GitFailedError):
        return None
    return set(shown.stdout.decode("ascii", "replace").split())


def _told(faults: dict[str, Fault]) -> dict[str, Fault]:
    """One fault for each ref; those of many are told together."""
    told: dict[str, Fault] = {}
    for kind in dict.fromkeys(fault.kind for fault in faults.values()):
        listed = sorted(ref for ref, fault in faults.items() if fault.kind is kind)
        told |= {ref: faults[ref] for ref in listed[:_TOLD]}
        if more := listed[_TOLD:]:
            told[f"{more[0]} and {len(more) - 1} more refs"] = faults[more[0]]
    return told


def read_record(repository: Path, record: str) -> Record:
    """One record of the ref history; nothing where it cannot be read."""
    try:
        shown = run_git_sync(
            *UNTRUSTING,
            "cat-file",
            "blob",
            f"{record}:refs",
            git_dir=repository,
            doing="read a ref record",
        )
    except (CorruptObjectError, GitFailedError):
        return {}, None
    return parse_record(shown.stdout)


Record = tuple[dict[str, str], str | None]
"""The refs of a record of the ref history, the kept ones too, and what HEAD named."""


# -- what is missing behind refs --------------------------------------------------------------------------------------


# -- what refs were ---------------------------------------------------------------------------------------------------


def lost_tips(repository: Path, names: Names, graph: Graph) -> dict[str, Fault]:
    """A fault for each kept ref that is not there, while nothing else leads to its commit. `graph` is all that refs lead to."""
    if HISTORY not in names.refs:
        return {}
    lost = unkept(repository, read_records(repository, names.refs[HISTORY]), names.refs, graph)
    reason = "it is gone, and the ref history had its commit"
    return dict.fromkeys(lost, Fault(FindingKind.REF_LOST, reason))


def unkept(
    repository: Path, records: Iterable[Record], refs: Mapping[str, str], graph: Graph | None = None
) -> dict[str, str]:
    """Kept refs for the commits that some record had and that neither a ref of upstream nor a kept one leads to.

    None while something is missing or damaged, when nobody can tell what leads to what.
    """
    lasting = {oid for ref, oid in refs.items() if not ref.startswith(PINS)}
    past = {oid for recorded, _ in records for oid in theirs(recorded).values()} - lasting
    if not past:
        return {}
    ends = ask(repository, [f"{oid}^{{}}" for oid in lasting]).objects  # through tags
    tips = [end.oid for end in ends.values() if end.kind == "commit"]
    there = {oid for oid, kind in kinds_of(repository, past).items() if kind == "commit"}
    if graph is None or not there <= graph.keys():
        graph = read_graph(repository, [*tips, *there])
    reached = ancestors(graph, tips)
    if reached - graph.keys() or len(ends) < len(lasting):
        return {}
    lost = there - reached
    inner = {parent for oid in ancestors(graph, lost) for parent in graph.get(oid, ())}
    return {f"{KEPT}{oid}": oid for oid in sorted(lost - inner)}


def read_records(repository: Path, history: str) -> list[Record]:
    """Every record, the newest first, as far as they can be read."""
    try:
        walked = run_git_sync(
            *UNTRUSTING,
            "rev-list",
            "--first-parent",
            history,
            git_dir=repository,
            timeout=TIMEOUT,
            doing="walk the ref history",
        ).lines
    except (CorruptObjectError, GitFailedError):
        walked = [history]
    pending = [[f"{record}:refs" for record in walked]]
    found: list[Record] = []
    while pending:
        some = pending.pop()
        try:
            found += [parse_record(text) for text in _read_blobs(repository, some)]
        except (CorruptObjectError, GitFailedError):
            middle = len(some) // 2
            pending += [some[middle:], some[:middle]] if middle else []
    return found


def _read_blobs(repository: Path, names: Collection[str]) -> Iterator[bytes]:
    """The content of those that are there, in order; git ends at the first that is damaged."""
    output = run_git_sync(
        *UNTRUSTING,
        "cat-file",
        "--batch",
        "--buffer",
        git_dir=repository,
        stdin=lines_of(names),
        timeout=TIMEOUT,
        doing="read ref records",
    ).stdout
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        words = output[at:end].split()
        at = end + 1
        if len(words) == 3 and words[2].isdigit():
            yield output[at : at + int(words[2])]
            at += int(words[2]) + 1
