"""Packs of which a crash left one half: git sees no pack without its index, and removes the pack before the index.

A pack without its index is indexed. An index without its pack is removed where every object that it names is elsewhere, which is
how a repack that was killed leaves it; where one is not, the pack is lost, and that is the audit's to report.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import structlog

from ..errors import MirrordError
from ..git.packfile import PackIndex
from .repository import Repository

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
