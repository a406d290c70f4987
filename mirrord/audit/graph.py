"""The commits that can be read, their parents, and the ancestors that are missing."""

import re
from collections.abc import Collection, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import BatchObject
from ..git.command import lines_of
from .reading import read_objects, run_git

_PARENT = re.compile(rb"^parent ([0-9a-f]{40})$", re.MULTILINE)

# commit to parents, for every commit that can be read
Graph = dict[str, tuple[str, ...]]


def read_graph(git_dir: Path, tips: Collection[str]) -> Graph:
    """Read the commits that `tips` reach; where git cannot walk, all commits of the repository."""
    command = ("rev-list", "--parents", "--stdin")
    try:
        walked = run_git(git_dir, "walk commits", *command, stdin=lines_of(sorted(tips)))
    except (CorruptObjectError, GitFailedError):
        return {commit.oid: parents_in(commit.data) for commit in iter_commits(git_dir)}
    return {oid: tuple(parents) for oid, *parents in map(str.split, walked.lines)}


def iter_commits(git_dir: Path) -> Iterator[BatchObject]:
    """Read every readable commit, reachable or not."""
    doing = "read all commits"
    # ids alone: git (2.39) dies of a pack that is too short when it lists types too
    command = ("cat-file", "--batch-all-objects", "--unordered", "--buffer")
    oids = run_git(git_dir, doing, *command, "--batch-check=%(objectname)").lines
    objects = read_objects(git_dir, (), info=oids, bisect=False, doing=doing)
    commits = [one.oid for one in objects if one.kind == "commit"]
    return (one for one in read_objects(git_dir, commits, doing=doing) if one.exists)


def parents_in(commit: bytes) -> tuple[str, ...]:
    return tuple(oid.decode() for oid in _PARENT.findall(commit.partition(b"\n\n")[0]))


def oldest_first(graph: Graph, commits: Collection[str]) -> list[str]:
    """Sort `commits` so that each comes after its ancestors."""
    position = {oid: n for n, oid in enumerate(TopologicalSorter(graph).static_order())}
    return sorted(commits, key=lambda oid: (position.get(oid, -1), oid))


def ancestors(graph: Graph, tips: Iterable[str], seen: set[str] | None = None) -> set[str]:
    """Return `tips` and all their ancestors; adds to `seen`, and stops at commits in it."""
    seen = set() if seen is None else seen
    pending = [tip for tip in tips if tip not in seen]
    while pending:
        oid = pending.pop()
        if oid not in seen:
            seen.add(oid)
            pending.extend(graph.get(oid, ()))
    return seen


def first_absent_ancestor(graph: Graph, commits: Collection[str]) -> dict[str, str]:
    """Map those of `commits` that have an ancestor missing from the graph to that ancestor."""
    absent = {oid: oid for parents in graph.values() for oid in parents if oid not in graph}
    for oid in oldest_first(graph, graph.keys()) if absent else ():
        blamed = next((absent[parent] for parent in graph[oid] if parent in absent), None)
        if blamed:
            absent[oid] = blamed
    return {oid: absent[oid] for oid in commits if oid in absent and oid in graph}
