"""Maintenance of a mirror: packs, commit-graph, multi-pack index, refs, stale files.

Never drops an object that a ref reaches: git refuses to repack when one is missing. Unreachable
objects are kept in a cruft pack and expire thirty days after they were last written, so an object
that was fetched by id and not yet pinned is safe.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import anyio
import structlog
from anyio import to_thread

from ..errors import MirrordError
from ..git.command import low_priority
from ..git.packs import PackIndex
from ..protocol import Progress
from .repository import Repository
from .stale_files import remove_stale_files

_FULL_EVERY = timedelta(days=30)
_MANY_PACKS = 20
_OLD = timedelta(hours=1)
_DEADLINE = timedelta(hours=6)
_STAMP = "mirrord-repacked"

log = structlog.get_logger()


async def maintain(
    repository: Repository, progress: Callable[[Progress], None] | None = None
) -> None:
    """Pack what is due. The caller holds the mirror's lock.

    A full repack comes now and then; otherwise packs are halved in a geometric series, which costs
    as much as there is new.
    """
    stamp = repository.path / _STAMP

    def needs_full() -> bool:
        packs = sum(1 for _ in (repository.objects / "pack").glob("*.pack"))
        age = time.time() - stamp.stat().st_mtime if stamp.exists() else math.inf
        return packs > 1 and (packs > _MANY_PACKS or age > _FULL_EVERY.total_seconds())

    await to_thread.run_sync(remove_stale_files, repository.path, _OLD)
    try:
        await repository.pack_refs()
        full = await to_thread.run_sync(needs_full)
        with low_priority():
            how = ("--cruft", "--cruft-expiration=30.days.ago") if full else ("--geometric=2",)
            await repository.run(
                "repack", "-d", "--write-midx", "--no-write-bitmap-index", *how,
                timeout=_DEADLINE,
                progress=progress,
                doing=f"pack mirror {repository.name}",
            )  # fmt: skip
            # whole after a full repack, so that it names no expired commit; else a layer
            split = "--split=replace" if full else "--split"
            await repository.run(
                "commit-graph", "write", "--reachable", "--changed-paths", split,
                timeout=_DEADLINE,
                doing=f"write the commit-graph of mirror {repository.name}",
            )  # fmt: skip
    finally:
        with anyio.CancelScope(shield=True):
            # a git that succeeds may leave files too: it only warns
            await to_thread.run_sync(remove_stale_files, repository.path, timedelta())
            await repair_incomplete_packs(repository)
    if full:
        await to_thread.run_sync(stamp.touch)


async def repair_incomplete_packs(repository: Repository) -> None:
    """Repair packs of which a crash left the pack or the index alone.

    git sees no pack without its index, and removes the pack before the index. A pack alone is
    indexed. An index alone is removed where each object that it names is elsewhere, as a killed
    repack leaves it; otherwise the pack is lost, which the audit reports. The caller holds the
    mirror's lock, or the daemon starts.
    """
    mirror, directory = str(repository.name), repository.objects / "pack"

    def stems(suffix: str) -> set[Path]:
        return {path.with_suffix("") for path in directory.glob(f"pack-*{suffix}")}

    packs, indexes = await to_thread.run_sync(lambda: (stems(".pack"), stems(".idx")))
    for stem in sorted(packs - indexes):
        pack = stem.with_suffix(".pack")
        try:
            await repository.run("index-pack", str(pack), doing=f"index {pack.name}")
            log.info("pack.indexed", mirror=mirror, pack=pack.name)
        except MirrordError as error:  # damaged: the audit reports it
            log.warning("pack.refused", mirror=mirror, pack=pack.name, detail=error.message)
    for stem in sorted(indexes - packs):
        index = stem.with_suffix(".idx")
        try:
            ids = await to_thread.run_sync(lambda index: list(PackIndex(index)), index)
            lost = await repository.absent(oid.hex() for oid in ids)
        except (MirrordError, OSError) as error:
            log.warning("pack.lost", mirror=mirror, pack=stem.name, detail=str(error))
            continue
        if lost:
            log.warning("pack.lost", mirror=mirror, pack=stem.name, objects=len(lost))
            continue
        for file in await to_thread.run_sync(list, directory.glob(f"{stem.name}.*")):
            file.unlink(missing_ok=True)
            log.info("stale_file.removed", path=str(file.relative_to(repository.path.parent)))


def size_bytes(path: Path) -> int:
    """The disk that a directory takes, hard links counted once."""
    sizes: dict[int, int] = {}
    for directory, _, files in os.walk(path):
        for name in files:
            try:
                stat = os.lstat(os.path.join(directory, name))
            except FileNotFoundError:
                continue
            sizes[stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())
