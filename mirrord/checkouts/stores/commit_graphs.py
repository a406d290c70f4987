"""Commit-graphs for sealed stores: with one, `log`, `blame` and `describe` need not inflate every commit of a long history.

Owns `commit-graph` beside a large closure pack: the graph of that layer's closure, written by git in a repository of nothing but
the packs of its chain, so it can name no other commit. Nobody waits for it: it is written after a store needed it and it was not
there, and stores that are built from then on link it. What is above it in a chain git reads as ever. Like the packs it is not
flushed; one that is not whole is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import structlog

from ...git import commit_graph
from ...git.command import Git
from ...host.trash import Remains
from ..deferred import Deferred
from .closures import building, link_or_copy
from .packer import TIMEOUT, PackFile

LARGE = 20_000  # objects; below that git is as fast without

log = structlog.get_logger()


class Graphs:
    """Finds graphs, and has missing ones written afterwards."""

    def __init__(self, git: Git, remains: Remains, afterwards: Deferred) -> None:
        self._git = git
        self._remains = remains
        self._afterwards = afterwards

    def find(self, packs: Sequence[PackFile]) -> Path | None:
        """The graph for a chain of packs, root first; one that is not there is asked for."""
        large = [number for number, pack in enumerate(packs, 1) if pack.object_count >= LARGE]
        if not large:
            return None
        chain = packs[: large[-1]]
        graph = chain[-1].path.with_name("commit-graph")
        if commit_graph.is_whole(graph):
            return graph
        self._afterwards.begin(("commit-graph", graph), partial(self._write, graph, chain))
        return None

    async def _write(self, graph: Path, chain: Sequence[PackFile]) -> None:
        tip = graph.parent.name
        with building(graph.parent.parent, self._remains) as scratch:
            _lay_out(scratch, chain)
            await self._git.run(
                *(
                    "-c",
                    "core.fsync=none",
                    "commit-graph",
                    "write",
                    "--stdin-commits",
                    "--no-progress",
                ),
                git_dir=scratch,
                stdin=f"{tip}\n".encode(),
                timeout=TIMEOUT,
                doing=f"write the commit-graph of {tip}",
            )
            (scratch / "objects/info/commit-graph").rename(graph)
        log.info("graph.written", commit=tip, size_bytes=graph.stat().st_size)


def _lay_out(repository: Path, chain: Sequence[PackFile]) -> None:
    for directory in ("objects/pack", "objects/info", "refs"):
        (repository / directory).mkdir(parents=True)
    (repository / "HEAD").write_text("ref: refs/heads/none\n")
    for pack in chain:
        for source in (pack.path, pack.index):
            link_or_copy(source, repository / "objects/pack" / source.name)
