"""What refs reach and reached: holes behind those that are there, and tips that the ref history had and nothing leads to now.

Nothing mirrored is lost: a tip that upstream left has a kept ref, so one without was taken away by somebody else. Reads only.
Runs in a worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of
from ..git.command import run_git_sync
from ..git.environment import UNTRUSTING
from ..mirrors.history import parse_record
from ..mirrors.refs import theirs
from ..mirrors.repository import HISTORY, KEPT, PINS
from ..model import AuditLevel, FindingKind
from .files import Fault
from .graph import TIMEOUT, Graph, ancestors, read_graph
from .names import Names
from .questions import ask

Record = tuple[dict[str, str], str | None]
"""The refs of a record of the ref history, the kept ones too, and what HEAD named."""


# -- what is missing behind refs --------------------------------------------------------------------------------------


def incomplete_refs(
    repository: Path, names: Names, level: AuditLevel, proven: Collection[str]
) -> dict[str, Fault]:
    """A fault for the first ref whose objects are not all there: of the ref history, and at level `content` of all refs.

    Nothing is walked behind `proven`, commits that are whole. One fault is enough for a heal, which looks at all of them.
    """
    kinds = kinds_of(repository, names.refs.values())
    there = {ref: oid for ref, oid in sorted(names.refs.items()) if kinds[oid] and PINS not in ref}
    found = {}
    for refs in (
        [HISTORY],
        [ref for ref in there if ref != HISTORY] if level is AuditLevel.CONTENT else [],
    ):
        tips = {ref: there[ref] for ref in refs if ref in there}
        if reason := _hole(repository, tips.values(), proven):
            first = _first_with_a_hole(repository, tips, proven)
            reason = f"not all that it reaches is here: {reason}"
            found[first] = Fault(FindingKind.REF_INCOMPLETE, reason)
    return found


def _hole(repository: Path, tips: Iterable[str], proven: Iterable[str]) -> str | None:
    """What git says where something is missing behind `tips`."""
    wanted = sorted(set(tips))
    if not wanted:
        return None
    revisions = [*wanted, *(f"^{oid}" for oid in proven)]
    walk = ("rev-list", "--objects", "--quiet", "--stdin")
    try:
        run_git_sync(
            *UNTRUSTING,
            *walk,
            git_dir=repository,
            stdin=lines_of(revisions),
            timeout=TIMEOUT,
            doing="walk what refs reach",
        )
    except (CorruptObjectError, GitFailedError) as error:
        return error.message.removeprefix("cannot walk what refs reach: ")
    return None


def _first_with_a_hole(repository: Path, tips: Mapping[str, str], proven: Collection[str]) -> str:
    refs = list(tips)
    while len(refs) > 1:
        half = refs[: len(refs) // 2]
        refs = half if _hole(repository, [tips[ref] for ref in half], proven) else refs[len(half) :]
    return refs[0]


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


def kinds_of(repository: Path, oids: Iterable[str]) -> dict[str, str]:
    """The type of each object; empty where it is not there, or git cannot tell."""
    known = ask(repository, asked := set(oids)).objects
    return {oid: known[oid].kind if oid in known else "" for oid in asked}
