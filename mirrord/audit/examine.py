"""Look at one mirror: which of its recorded commits can be served, and what keeps each alive. Runs in a worker, reads only.

What takes long is one git for everything: one walk at level `closure`, one fsck at level `content`. What else there is to ask and
to read is done meanwhile. Only where that one git is not content does the search for what is wrong begin. All of it runs on
threads that yield the processor and the disk to whoever serves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..host.processes import lower_priority
from ..mirrors.pins import is_pin
from ..mirrors.repository import HISTORY, KEPT, OURS, PINS
from ..model import AuditLevel, CommitId, CommitState, FindingKind, Reach
from .connectivity import (
    Answers,
    Closures,
    Graph,
    Verdict,
    ancestors,
    are_whole,
    ask,
    incomplete_refs,
    peel,
    peeled,
    read_graph,
    tree_of,
)
from .fsck import Damage, Fsck, check_everything, find_damage, unreadable
from .object_files import BadFile, Fault, find_bad_files, find_lying, find_strange
from .ref_files import Names, read_names
from .ref_history import lost_refs, lost_tips, questions, record_of
from .stand_in import readable

_THREADS = 3  # the judge of the mirror, the one long git, and what is read beside it


@dataclass(slots=True)
class Examined:
    """`faults` are about the mirror itself, by file or ref; a recorded commit need not be hit.
    `unknown` are pins that the catalog does not have.
    """

    verdicts: dict[CommitId, Verdict] = field(default_factory=dict)
    reached: Reached = field(default_factory=lambda: Reached("", {}))
    faults: dict[str, Fault] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()

    @property
    def reach(self) -> dict[CommitId, Reach]:
        return self.reached.by_commit


def examine(
    git_dir: Path,
    commits: Collection[CommitId],
    level: AuditLevel,
    pins: Collection[str] = (),
    known: Reached | None = None,
    record: str | None = None,
) -> Examined:
    """Judge `commits` at `level`, and the mirror itself, which should have `pins`, given as
    OWNER/COMMIT, and in its ref history `record`. `known` is what an earlier look said of their reach.
    """
    with ThreadPoolExecutor(_THREADS, initializer=lower_priority) as threads:
        work = threads.submit(
            _examine, git_dir, sorted(commits), level, pins, known, record, threads
        )
        return work.result()


def _examine(
    git_dir: Path,
    commits: Sequence[CommitId],
    level: AuditLevel,
    pins: Collection[str],
    known: Reached | None,
    record: str | None,
    threads: ThreadPoolExecutor,
) -> Examined:
    names = read_names(git_dir)
    with readable(git_dir, names, list(find_strange(git_dir))) as repository:
        looking = threads.submit(_look_at_files, git_dir, repository, level)
        history = [names.refs[HISTORY]] if HISTORY in names.refs else []
        proving = threads.submit(_PROOFS[level], repository, [*commits, *history])
        answers = ask(repository, _questions(names, commits), blob=record_of(names))
        refs = peel(names.refs, answers.objects)
        reached = reach_of(
            repository, names, refs, commits, known, look_for_lost=level is not AuditLevel.QUICK
        )
        (bad_files, lying), damage = looking.result(), Damage()
        proof = proving.result()
        if proof.fsck and (bad_files or not proof.fsck.is_sound):
            bad_files = find_bad_files(git_dir, level)
            damage = find_damage(repository, bad_files, proof.fsck)
        verdicts = _absent(repository, commits, answers)
        verdicts |= Closures(
            repository, _doubtful(commits, verdicts, reached, proof, damage), damage
        ).judge()
        lost = lost_refs(repository, git_dir, names, answers, record)
        if not (proof.of_all or proof.of_reached):
            proven = [oid for oid in commits if oid not in verdicts]
            lost = incomplete_refs(repository, names, level, proven) | lost
    _judge_the_rest(verdicts, commits, refs)
    told = {bad.name: Fault(bad.kind.finding, bad.reason) for bad in [*bad_files, *names.faults]}
    failing = {file: Fault(FindingKind.PACK, reason) for file, reason in damage.files.items()}
    said = {f"{PINS}{pin}" for pin in pins}
    faults = _lost_pins(names, said, verdicts) | reached.lost | failing | lying | told | lost
    unknown = frozenset(ref for ref in names.refs if ref not in said and is_pin(ref))
    return Examined(verdicts, reached, faults, unknown)


def _look_at_files(
    git_dir: Path, repository: Path, level: AuditLevel
) -> tuple[list[BadFile], dict[str, Fault]]:
    """What needs no walk: bad files, and at level `content` derived ones that are whole and lie."""
    if level is AuditLevel.QUICK:
        return find_bad_files(git_dir, level), {}
    bad_files = find_bad_files(git_dir, AuditLevel.CLOSURE)
    is_deep = level is AuditLevel.CONTENT and not bad_files
    return bad_files, find_lying(repository) if is_deep else {}


# -- what proves most commits at once -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Proof:
    """What is known to be whole: the closures of all commits and the ref history, or of all that a ref reaches."""

    of_all: bool = False
    of_reached: bool = False
    fsck: Fsck | None = None


def _no_proof(_repository: Path, _commits: Sequence[str]) -> _Proof:
    return _Proof(of_all=True)  # `quick` does not look at closures


def _proof_by_walk(repository: Path, commits: Sequence[str]) -> _Proof:
    return _Proof(of_all=are_whole(repository, commits))


def _proof_by_fsck(repository: Path, _commits: Sequence[str]) -> _Proof:
    fsck = check_everything(repository)
    return _Proof(of_reached=fsck.is_sound, fsck=fsck)


_PROOFS = {
    AuditLevel.QUICK: _no_proof,
    AuditLevel.CLOSURE: _proof_by_walk,
    AuditLevel.CONTENT: _proof_by_fsck,
}


def _doubtful(
    commits: Sequence[CommitId],
    verdicts: Mapping[CommitId, Verdict],
    reached: Reached,
    proof: _Proof,
    damage: Damage,
) -> list[CommitId]:
    """The commits that are there and whose closure is not proven."""
    if proof.of_all:
        return []
    is_reached_proven = proof.of_reached and not damage.objects
    present = (oid for oid in commits if oid not in verdicts)
    return [
        oid for oid in present if not is_reached_proven or reached.by_commit[oid] is Reach.NOTHING
    ]


# -- verdicts -----------------------------------------------------------------------------------------------------------


def _questions(names: Names, commits: Sequence[CommitId]) -> set[str]:
    about_commits = {name for oid in commits for name in (oid, tree_of(oid))}
    return about_commits | {peeled(oid) for oid in names.refs.values()} | questions(names)


def _absent(
    repository: Path, commits: Sequence[CommitId], answers: Answers
) -> dict[CommitId, Verdict]:
    """Verdicts on the commits that are not there, are no commits, or whose tree is not there."""
    verdicts: dict[CommitId, Verdict] = {}
    without_tree = []
    for oid in commits:
        if oid not in answers.objects or answers.objects[oid].kind != "commit":
            verdicts[oid] = Verdict(CommitState.MISSING, (oid,), "the commit is not in the mirror")
        elif tree_of(oid) not in answers.objects:
            without_tree.append(oid)
    damaged = unreadable(repository, without_tree)
    for oid in without_tree:
        corrupt = Verdict(CommitState.CORRUPT, (oid,), "it is damaged")
        verdicts[oid] = (
            corrupt
            if oid in damaged
            else Verdict(CommitState.INCOMPLETE, (), "its tree is missing")
        )
    return verdicts


def _judge_the_rest(
    verdicts: dict[CommitId, Verdict], commits: Sequence[CommitId], refs: Mapping[str, str]
) -> None:
    """What can be served is in order when it has a pin of its own."""
    pinned = {oid for ref, oid in refs.items() if ref.startswith(PINS) and ref.endswith(oid)}
    unpinned = Verdict(CommitState.UNPINNED, detail="no pin keeps it")
    for oid in commits:
        verdicts.setdefault(oid, Verdict(CommitState.OK) if oid in pinned else unpinned)


def _lost_pins(
    names: Names, said: Collection[str], verdicts: Mapping[CommitId, Verdict]
) -> dict[str, Fault]:
    """Pins that only the catalog has; a commit that is told already is not told again."""
    ok = Verdict(CommitState.OK)
    lost = (ref for ref in said if ref not in names.refs)
    untold = (ref for ref in lost if verdicts.get(CommitId(ref[-40:]), ok).state is CommitState.OK)
    return dict.fromkeys(untold, Fault(FindingKind.PIN_LOST, "it is gone, and the catalog has it"))


_WITH_LOST = "with lost refs "
_PULL_REQUESTS = ("refs/pull/", "refs/merge-requests/", "refs/changes/")


@dataclass(frozen=True, slots=True)
class Reached:
    """`lost` are kept refs that should be there, where they were looked for. `key` stands for what was asked; it is empty where
    the answer must not be used again.
    """

    key: str
    by_commit: dict[CommitId, Reach]
    lost: dict[str, Fault] = field(default_factory=dict)


def reach_of(
    git_dir: Path,
    names: Names,
    refs: Mapping[str, str],
    commits: Collection[CommitId],
    known: Reached | None = None,
    *,
    look_for_lost: bool = True,
) -> Reached:
    """The best thing that keeps each of `commits` alive; `refs` lead to commits. `known` is an answer from before."""
    key = _key(refs, names.head, commits)
    good_enough = {_WITH_LOST + key} if look_for_lost else {_WITH_LOST + key, key}
    if known is not None and known.key in good_enough:
        return known
    graph = read_graph(git_dir, set(refs.values()))
    by_commit = _classify(graph, refs, names.head, commits)
    lost = lost_tips(git_dir, names, graph) if look_for_lost else {}
    if lost or not _is_closed(graph, refs.values()):
        return Reached("", by_commit, lost)
    return Reached(_WITH_LOST + key if look_for_lost else key, by_commit)


def _key(refs: Mapping[str, str], head: str | None, commits: Collection[CommitId]) -> str:
    said = [str(head), *sorted(commits), *(f"{oid} {ref}" for ref, oid in sorted(refs.items()))]
    return hashlib.sha256("\n".join(said).encode("utf-8", "surrogateescape")).hexdigest()


def _is_closed(graph: Graph, tips: Collection[str]) -> bool:
    return all(tip in graph for tip in tips) and all(
        parent in graph for parents in graph.values() for parent in parents
    )


def _classify(
    graph: Graph, refs: Mapping[str, str], head: str | None, commits: Collection[CommitId]
) -> dict[CommitId, Reach]:
    """The best thing that keeps each of `commits` alive."""
    groups: dict[Reach, list[str]] = {reach: [] for reach in Reach}
    for ref, oid in refs.items():
        groups[_reach_of(ref, head)].append(oid)
    groups[Reach.NOTHING] = []
    found: dict[CommitId, Reach] = {}
    seen: set[str] = set()
    for reach, tips in groups.items():
        ancestors(graph, tips, seen=seen)
        found |= {oid: reach for oid in commits if oid in seen and oid not in found}
    return found | {oid: Reach.NOTHING for oid in commits if oid not in found}


def _reach_of(ref: str, head: str | None) -> Reach:
    if ref == head:
        return Reach.DEFAULT_BRANCH
    table = {KEPT: Reach.KEPT, PINS: Reach.PIN, OURS: Reach.NOTHING, "refs/tags/": Reach.TAG}
    table |= dict.fromkeys(_PULL_REQUESTS, Reach.PULL_REQUEST)
    return next((reach for prefix, reach in table.items() if ref.startswith(prefix)), Reach.BRANCH)
