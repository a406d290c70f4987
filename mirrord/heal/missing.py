"""Exactly which objects a set of tips reaches that a repository does not have.

git alone cannot say: its walk ends at the first missing commit (2.39). So the commits are put together from those that are there,
and the trees of all of them are walked at once. What lies behind a missing tree shows when that is back. The repository is a
view: every object that git finds in it is good. Runs in a worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..audit.graph import TIMEOUT, Graph, ancestors, first_absent_ancestor, read_graph
from ..audit.past import kinds_of
from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of, read_objects_sync
from ..git.command import run_git_sync

_MOST_TIPS = 2000


@dataclass(frozen=True, slots=True)
class Missing:
    """`commits` may hold tips of unknown kind. `whole` are commits whose ancestors are all there, the latest ones."""

    commits: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    whole: tuple[str, ...] = ()

    @property
    def all(self) -> frozenset[str]:
        return self.commits | self.others

    def __bool__(self) -> bool:
        return bool(self.commits or self.others)


def find_missing(repository: Path, tips: Collection[str]) -> Missing:
    """What is missing of the closures of `tips`, as far as what is there tells."""
    kinds = kinds_of(repository, tips)
    lost, kinds = _follow_tags(repository, kinds)
    if not lost and _is_whole(repository, kinds):
        return Missing()
    commits = [oid for oid, kind in kinds.items() if kind == "commit"]
    graph = read_graph(repository, commits)
    reached = ancestors(graph, commits)
    present = reached & graph.keys()
    others = _walk_trees(
        repository, [*present, *(oid for oid, kind in kinds.items() if kind in {"tree", "blob"})]
    )
    absent = lost | (reached - present)
    return Missing(frozenset(absent), frozenset(others), _latest_whole(graph, present))


def _follow_tags(repository: Path, kinds: Mapping[str, str]) -> tuple[set[str], dict[str, str]]:
    """Absent objects among the tips or at the end of tag objects, and all the others by kind."""
    lost: set[str] = set()
    known: dict[str, str] = {}
    pending = dict(kinds)
    while pending:
        lost |= {oid for oid, kind in pending.items() if not kind}
        known |= {oid: kind for oid, kind in pending.items() if kind}
        targets = set(_targets(repository, [oid for oid, kind in pending.items() if kind == "tag"]))
        pending = kinds_of(repository, targets - known.keys() - lost) if targets else {}
    return lost, known


def _targets(repository: Path, tags: Collection[str]) -> Iterator[str]:
    for tag in read_objects_sync(repository, tags, timeout=TIMEOUT, doing="read tags"):
        yield tag.data[7:47].decode("ascii", "replace")  # after "object "


def _is_whole(repository: Path, kinds: Mapping[str, str]) -> bool:
    try:
        run_git_sync(
            "rev-list", "--objects", "--quiet", "--stdin", git_dir=repository, stdin=lines_of(kinds), timeout=TIMEOUT,
            doing="walk closures",
        )  # fmt: skip
    except (CorruptObjectError, GitFailedError):
        return False
    return True


def _walk_trees(repository: Path, starts: Collection[str]) -> set[str]:
    """Missing trees and blobs of all `starts`, parents of commits not followed."""
    shown = run_git_sync(
        "rev-list", "--objects", "--no-object-names", "--missing=print", "--no-walk", "--stdin",
        git_dir=repository,
        stdin=lines_of(starts),
        timeout=TIMEOUT,
        doing="walk trees",
    )  # fmt: skip
    return {line[1:] for line in shown.lines if line.startswith("?")}


def _latest_whole(graph: Graph, present: Collection[str]) -> tuple[str, ...]:
    broken = first_absent_ancestor(graph, present)
    sound = [oid for oid in present if oid not in broken]
    parents = {parent for oid in sound for parent in graph[oid]}
    return tuple(sorted(oid for oid in sound if oid not in parents))[:_MOST_TIPS]
