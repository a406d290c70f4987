"""The commit graph of a mirror in memory: who is whose ancestor.

Read by git, without its commit-graph file. Where a commit is missing, so that git cannot walk, the graph is put
together from every commit that the object store has. Runs in a worker.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable
from datetime import timedelta
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of
from ..git.command import GitResult, run_git_sync
from ..git.environment import UNTRUSTING

TIMEOUT = timedelta(hours=1)
_PARENT = re.compile(rb"^parent ([0-9a-f]{40})$", re.MULTILINE)

Graph = dict[str, tuple[str, ...]]
"""Commit to parents, for every commit that can be read."""


def read_graph(git_dir: Path, tips: Collection[str]) -> Graph:
    """Every commit that `tips` lead to."""
    try:
        walked = run_git_sync(
            *UNTRUSTING,
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
    listed = _cat_file(
        git_dir, "--batch-all-objects", "--unordered", "--batch-check=%(objectname)"
    ).stdout
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
    return run_git_sync(
        *UNTRUSTING,
        "cat-file",
        "--buffer",
        *options,
        git_dir=git_dir,
        stdin=stdin,
        timeout=TIMEOUT,
        doing="read objects",
    )


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
    absent = {
        parent: parent for parents in graph.values() for parent in parents if parent not in graph
    }
    if not absent:
        return {}
    for oid in oldest_first(graph, graph.keys()):
        blamed = next((absent[parent] for parent in graph[oid] if parent in absent), None)
        if blamed:
            absent[oid] = blamed
    return {oid: absent[oid] for oid in commits if oid in absent and oid in graph}
