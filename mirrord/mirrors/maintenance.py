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
import structlog

from ..errors import MirrordError
from ..git.packs import PackIndex
from ..git.priority import giving_way
from ..protocol import Progress
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


log = structlog.get_logger()


async def mend_halves(repository: Repository) -> None:
    """Make whole, or remove, what has one half. The caller holds the mirror's lock, or nobody else is there yet."""
    packs = {path.with_suffix("") for path in await _glob(repository, "pack-*.pack")}
    indexes = {path.with_suffix("") for path in await _glob(repository, "pack-*.idx")}
    for stem in sorted(packs - indexes):
        await _index(repository, stem.with_suffix(".pack"))
    for stem in sorted(indexes - packs):
        await _remove_index(repository, stem)


async def _glob(repository: Repository, pattern: str) -> list[Path]:
    return await anyio.to_thread.run_sync(lambda: list((repository.objects / "pack").glob(pattern)))


async def _index(repository: Repository, pack: Path) -> None:
    try:
        await repository.git.run(
            "index-pack", str(pack), git_dir=repository.path, doing=f"index {pack.name}"
        )
        log.info("pack.indexed", mirror=str(repository.name), pack=pack.name)
    except MirrordError as error:  # a damaged one is the audit's to report
        log.warning(
            "pack.refused", mirror=str(repository.name), pack=pack.name, detail=error.message
        )


async def _remove_index(repository: Repository, stem: Path) -> None:
    try:
        ids = await anyio.to_thread.run_sync(
            lambda: [oid.hex() for oid in PackIndex(stem.with_suffix(".idx"))]
        )
        lost = await repository.absent(ids)
    except (MirrordError, OSError) as error:
        log.warning("pack.lost", mirror=str(repository.name), pack=stem.name, detail=str(error))
        return
    if lost:
        log.warning("pack.lost", mirror=str(repository.name), pack=stem.name, objects=len(lost))
        return
    for file in await _glob(repository, f"{stem.name}.*"):
        file.unlink(missing_ok=True)
        log.info("leftover.removed", path=str(file.relative_to(repository.path.parent)))
