"""What keeps a recorded commit alive: the default branch, another branch, a tag, a pull request, a kept ref, or only its pin; and
which kept refs are gone.

That follows from the refs and from which commits are asked about, for commits never change: while both stay the same an answer
stays true, and nothing has to be walked. An answer from a graph with holes is not reused. Runs in a worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..mirrors.repository import KEPT, OURS, PINS
from ..model import CommitId, Reach
from .files import Fault
from .graph import Graph, ancestors, read_graph
from .names import Names
from .past import lost_tips

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
