"""After a start, and after an operation that failed: what the disk holds is the truth, and the catalog follows.

Owns the one pass over all mirrors at the start, and the same for one mirror later. It finishes interrupted transactions, removes
locks and temporary files of gits that died, adopts mirrors and pins that the catalog does not know, and drops pins of datasets
that no ref keeps: those are known from what the dataset records. A pin that only the catalog knows of stays in it until a heal
has made it again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import anyio
import structlog

from ..catalog import Catalog, MirrorRow, PinRow
from ..errors import DamagedMirrorError, GitFailedError, InvalidNameError, MirrordError
from ..host.files import host_error
from ..model import MirrorName, utc_now
from .fetch import unmark
from .history import columns_of
from .maintenance import mend_halves
from .pins import ADOPTED, read_pins, stands_alone
from .repository import Repository
from .stale_files import remove_stale_files
from .transaction import recover

_AT_ONCE = 4

log = structlog.get_logger()


async def reconcile(
    catalog: Catalog,
    root: Path,
    repository: Callable[[MirrorName], Repository],
    default_url: Callable[[MirrorName], str],
) -> list[MirrorName]:
    """Bring disk and catalog in line; answers the mirrors that cannot be, which are marked as failed and stop no other."""
    rows = {row.name.key: row for row in await catalog.list_mirrors()}
    on_disk = _names(root)
    for name in on_disk:
        if name.key not in rows:
            await catalog.put_mirror(
                MirrorRow(name=name, url=default_url(name), added_at=utc_now())
            )
            log.warning("mirror.adopted", mirror=str(name))
    limiter = anyio.CapacityLimiter(_AT_ONCE)
    failed: list[MirrorName] = []

    async def work(name: MirrorName) -> None:
        async with limiter:
            if not await _reconcile_one(catalog, repository(name)):
                failed.append(name)

    async with anyio.create_task_group() as group:
        for name in on_disk:
            group.start_soon(work, name)
    for key in rows.keys() - {name.key for name in on_disk}:
        await _forget_state(catalog, rows[key])
    return failed


def _names(root: Path) -> list[MirrorName]:
    names = []
    for path in sorted(root.iterdir()):
        try:
            names.append(MirrorName.parse(path.name))
        except InvalidNameError:
            log.warning("mirror.ignored", path=path.name)
    return names


async def _reconcile_one(catalog: Catalog, repository: Repository) -> bool:
    try:
        await put_in_line(catalog, repository)
    except (DamagedMirrorError, GitFailedError, NotADirectoryError, IsADirectoryError) as error:
        fact = (
            error.message.partition(": ")[2]
            if isinstance(error, MirrordError)
            else str(error.strerror)
        )
        problem: MirrordError = DamagedMirrorError(
            f"cannot open mirror {repository.name}: {fact}",
            hint=f"`mirrord heal {repository.name}`",
        )
    except (MirrordError, OSError) as error:
        found = (
            error
            if isinstance(error, MirrordError)
            else host_error(error, f"open mirror {repository.name}")
        )
        if found is None:
            raise
        problem = found
    else:
        return True
    await catalog.update_mirror(repository.name.key, error=problem.problem())
    log.warning(
        "mirror.damaged", mirror=str(repository.name), code=problem.code, detail=problem.message
    )
    return False


async def put_in_line(catalog: Catalog, repository: Repository) -> None:
    """Finish what was interrupted in one mirror. No git of ours runs in it: the caller holds its lock, or the daemon starts.

    So age says nothing of what lies about; who still holds a file does.
    """
    await anyio.to_thread.run_sync(remove_stale_files, repository.path, timedelta())
    await mend_halves(repository)
    await recover(repository)
    await unmark(repository)
    await follow_pins(catalog, repository)
    await _follow_history(catalog, repository)


async def follow_pins(catalog: Catalog, repository: Repository) -> None:
    """Adopt pins that the catalog does not have, and tell those that only it has."""
    there = set(read_pins(await repository.all_refs()))
    said = {(row.owner, row.commit): row for row in await catalog.list_pins(repository.name.key)}
    now = utc_now()
    adopted = [
        PinRow(repository.name, commit, owner, ADOPTED, now)
        for owner, commit in sorted(there - said.keys())
    ]
    if adopted:
        await catalog.put_pins(adopted)
        owners = sorted({row.owner for row in adopted})
        log.warning("pins.adopted", mirror=str(repository.name), count=len(adopted), owners=owners)
    for owner, commit in sorted(said.keys() - there):
        # an unpin forgets the row first, so this ref was lost: an audit tells, a heal makes it again
        log.warning("pin.lost", mirror=str(repository.name), commit=commit, owner=owner)


async def _follow_history(catalog: Catalog, repository: Repository) -> None:
    """Know the newest record of a mirror that the catalog has none of."""
    row = await catalog.find_mirror(repository.name.key)
    if row is not None and row.history is None:
        await catalog.update_mirror(repository.name.key, **await columns_of(repository, None))


async def _forget_state(catalog: Catalog, row: MirrorRow) -> None:
    """A mirror without a directory was never synced, or somebody deleted it: the next sync clones it again."""
    for pin in await catalog.list_pins(row.name.key):
        if not stands_alone(pin):
            await catalog.delete_pins(row.name.key, [pin.commit], pin.owner)
    if row.synced_at is not None:
        log.warning("mirror.gone", mirror=str(row.name))
        await catalog.update_mirror(
            row.name.key, synced_at=None, ref_count=None, kept_count=None, size_bytes=None
        )
