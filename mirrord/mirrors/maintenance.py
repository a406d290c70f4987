"""Keeping a mirror fast and small: packs, commit-graph, multi-pack index, refs, leftovers.

Owns when what is packed. Never drops an object that a ref reaches: git refuses to repack when one is missing. What nothing
reaches is kept in a cruft pack and expires thirty days after it was last written, so an object that was fetched by id and not
yet pinned is safe. What a killed git leaves is removed (`leftovers.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import anyio

from ..git.priority import giving_way
from ..protocol import Progress
from .incomplete_packs import mend_halves
from .repository import Repository
from .stale_files import remove_stale_files

_FULL_EVERY = timedelta(days=30)
_MANY_PACKS = 20
_OLD = timedelta(hours=1)
_DEADLINE = timedelta(hours=6)
_STAMP = "mirrord-repacked"
_EXPIRATION = "30.days.ago"


async def maintain(
    repository: Repository, progress: Callable[[Progress], None] | None = None
) -> None:
    """Do what is due. The caller holds the mirror's lock."""
    await anyio.to_thread.run_sync(remove_stale_files, repository.path, _OLD)
    try:
        await repository.pack_refs()
        full = await anyio.to_thread.run_sync(_needs_full, repository.path)
        with giving_way():
            await _repack(repository, full=full, progress=progress)
            await _write_commit_graph(repository, replace=full)
    finally:
        with anyio.CancelScope(
            shield=True
        ):  # git that ends well may have left something too: it only warns
            await anyio.to_thread.run_sync(remove_stale_files, repository.path, timedelta())
            await mend_halves(repository)
    if full:
        await anyio.to_thread.run_sync((repository.path / _STAMP).touch)


def _needs_full(path: Path) -> bool:
    packs = sum(1 for _ in (path / "objects/pack").glob("*.pack"))
    stamp = path / _STAMP
    age = time.time() - stamp.stat().st_mtime if stamp.exists() else _FULL_EVERY.total_seconds() + 1
    return packs > 1 and (packs > _MANY_PACKS or age > _FULL_EVERY.total_seconds())


async def _repack(
    repository: Repository, *, full: bool, progress: Callable[[Progress], None] | None
) -> None:
    """Fully now and then; else by halves of a geometric series, which costs what is new."""
    how = ("--cruft", f"--cruft-expiration={_EXPIRATION}") if full else ("--geometric=2",)
    await repository.git.run(
        "repack", "-d", "--write-midx", "--no-write-bitmap-index", *how,
        git_dir=repository.path,
        timeout=_DEADLINE,
        progress=progress,
        doing=f"pack mirror {repository.name}",
    )  # fmt: skip


async def _write_commit_graph(repository: Repository, *, replace: bool) -> None:
    """A whole graph after a full repack, so that it names no commit that has gone; else a layer for what is new."""
    await repository.git.run(
        "commit-graph", "write", "--reachable", "--changed-paths", f"--split{'=replace' if replace else ''}",
        git_dir=repository.path,
        timeout=_DEADLINE,
        doing=f"write the commit-graph of mirror {repository.name}",
    )  # fmt: skip


def size_bytes(path: Path) -> int:
    """The disk that a directory takes, hard links counted once."""
    seen: set[int] = set()
    total = 0
    for directory, _, files in os.walk(path):
        for name in files:
            try:
                stat = (Path(directory) / name).lstat()
            except FileNotFoundError:
                continue
            if stat.st_ino not in seen:
                seen.add(stat.st_ino)
                total += stat.st_blocks * 512
    return total
