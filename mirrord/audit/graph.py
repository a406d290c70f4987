"""The commit graph of a mirror in memory: who is whose ancestor, and what keeps a recorded commit alive.

Read by git, with its commit-graph file only where asked. Where a commit is missing, so that git cannot walk, the graph is put
together from every commit that the object store has. Runs in a worker.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import GitResult, run_git_sync
from ..model import CommitId, Reach

TIMEOUT = timedelta(hours=1)
UNTRUSTING = ("-c", "core.commitGraph=false")
KEPT, PINS, OURS = "refs/mirrord/kept/", "refs/mirrord/pins/", "refs/mirrord/"
_PULL_REQUESTS = ("refs/pull/", "refs/merge-requests/", "refs/changes/")
_PARENT = re.compile(rb"^parent ([0-9a-f]{40})$", re.MULTILINE)

Graph = dict[str, tuple[str, ...]]
"""Commit to parents, for every commit that can be read."""


def lines_of(oids: Iterable[str]) -> bytes:
    return "".join(f"{oid}\n" for oid in oids).encode()


def read_graph(git_dir: Path, tips: Collection[str], *, trusting: bool = False) -> Graph:
    """Every commit that `tips` lead to. `trusting`: believe the commit-graph file, which hides missing commits."""
    try:
        walked = run_git_sync(
            *(() if trusting else UNTRUSTING),
            "rev-list",
            "--parents",
            "--stdin",
            git_dir=git_dir,
            stdin=lines_of(sorted(tips)),
            timeout=TIMEOUT,
            doing="walk commits",
        )
    except (CorruptObjectError, GitFailedError):
        return _read_store(git_dir)
    words = (line.split() for line in walked.lines)
    return {oid: tuple(parents) for oid, *parents in words}


def _read_store(git_dir: Path) -> Graph:
    """Every commit in the object store, for a mirror that git cannot walk."""
    # by id: asked for the types of all objects, git (2.39) dies of a pack that is too short to be opened
    listed = _cat_file(git_dir, "--batch-all-objects", "--unordered", "--batch-check=%(objectname)").stdout
    shown = _cat_file(git_dir, "--batch-check=%(objecttype) %(objectname)", stdin=listed)
    pending = deque([[line.split()[1] for line in shown.lines if line.startswith("commit ")]])
    graph: Graph = {}
    while pending:
        some = pending.popleft()
        try:
            graph |= _read_commits(git_dir, some)
        except (CorruptObjectError, GitFailedError):
            middle = len(some) // 2
            pending.extend([some[:middle], some[middle:]] if middle else [])
    return graph


def _cat_file(git_dir: Path, *options: str, stdin: bytes | None = None) -> GitResult:
    return run_git_sync("cat-file", "--buffer", *options, git_dir=git_dir, stdin=stdin, timeout=TIMEOUT, doing="read objects")


def _read_commits(git_dir: Path, oids: Collection[str]) -> Graph:
    output = _cat_file(git_dir, "--batch", stdin=lines_of(oids)).stdout
    graph: Graph = {}
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        words = output[at:end].split()
        at = end + 1
        if len(words) == 3:
            header = output[at : at + int(words[2])].partition(b"\n\n")[0]
            graph[words[0].decode()] = tuple(parent.decode() for parent in _PARENT.findall(header))
            at += int(words[2]) + 1
    return graph


def oldest_first(graph: Graph, commits: Collection[str]) -> list[str]:
    """`commits` in an order in which no commit comes before its ancestor."""
    children: dict[str, list[str]] = {}
    waiting: dict[str, int] = {}
    for oid, parents in graph.items():
        known = [parent for parent in parents if parent in graph]
        waiting[oid] = len(known)
        for parent in known:
            children.setdefault(parent, []).append(oid)
    ready = deque(oid for oid, count in waiting.items() if not count)
    position: dict[str, int] = {}
    while ready:
        oid = ready.popleft()
        position[oid] = len(position)
        for child in children.get(oid, ()):
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    return sorted(commits, key=lambda oid: (position.get(oid, -1), oid))


def ancestors(graph: Graph, tips: Iterable[str], *, seen: set[str] | None = None) -> set[str]:
    """`tips` and all they lead to; adds to `seen` and does not go where that was."""
    seen = set() if seen is None else seen
    pending = [tip for tip in tips if tip not in seen]
    while pending:
        oid = pending.pop()
        if oid not in seen:
            seen.add(oid)
            pending.extend(graph.get(oid, ()))
    return seen


def first_absent_ancestor(graph: Graph, commits: Collection[str]) -> dict[str, str]:
    """For each of `commits` that leads to a commit which is not in the graph: that one."""
    absent = {parent: parent for parents in graph.values() for parent in parents if parent not in graph}
    if not absent:
        return {}
    for oid in oldest_first(graph, graph.keys()):
        blamed = next((absent[parent] for parent in graph[oid] if parent in absent), None)
        if blamed:
            absent[oid] = blamed
    return {oid: absent[oid] for oid in commits if oid in absent and oid in graph}


# -- reach ------------------------------------------------------------------------------------------------------------


def peel(git_dir: Path, refs: Mapping[str, str]) -> dict[str, str]:
    """Every ref to the commit it names, through its tag objects; those that name none are left out."""
    asked = sorted(set(refs.values()))
    shown = run_git_sync(
        "cat-file",
        "--batch-check=%(objectname)",
        git_dir=git_dir,
        stdin=lines_of(f"{oid}^{{commit}}" for oid in asked),
        ok=(0, 128),
        timeout=TIMEOUT,
        doing="peel tags",
    ).lines
    peeled = {oid: line for oid, line in zip(asked, shown, strict=False) if len(line) == 40}
    return {ref: peeled[oid] for ref, oid in refs.items() if oid in peeled}


def classify(graph: Graph, refs: Mapping[str, str], head: str | None, commits: Collection[CommitId]) -> dict[CommitId, Reach]:
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
