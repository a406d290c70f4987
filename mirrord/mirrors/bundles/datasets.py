"""The rows of datasets that a bundle brings, into the catalog. Every row is read as one that anybody may have written.

Reading them all comes before the first change: a bad row refuses the bundle.
"""

from __future__ import annotations

from pathlib import Path

import anyio

from ...catalog import Catalog, DatasetHead, spooled, unspooled
from ...errors import InvalidBundleError, MirrordError
from ...host.files import full_disk_named
from ...model import MirrorName
from ..repository import Repository
from .records import Records, extract_rows

Spools = dict[str, tuple[DatasetHead, Path]]
"""By dataset: its head, and its checked rows as the catalog takes them."""


async def spool_datasets(scratch: Repository, commit: str | None, records: Records) -> Spools:
    """Check the rows of a bundle; none where they speak of a mirror of another name than this one will have."""
    if commit is None or MirrorName.parse(records.mirror).key != scratch.name.key:
        return {}
    directory = scratch.path.parent
    spools: Spools = {}
    for number, dataset in enumerate(records.datasets):
        raw, spool = directory / "rows.raw", directory / f"rows-{number}.jsonl"
        if not await extract_rows(scratch, commit, dataset.name, raw):
            raise InvalidBundleError(
                f"cannot import the bundle: the rows of dataset {dataset.name} are not in it"
            )
        await anyio.to_thread.run_sync(_check, raw, spool, scratch.name)
        spools[dataset.name] = (dataset.head(), spool)
    return spools


async def merge_datasets(
    catalog: Catalog, records: Records, spools: Spools
) -> tuple[dict[str, int], list[str]]:
    """Add what is missing; answers how many rows each dataset got, and the datasets that are not the bundle's."""
    restored: dict[str, int] = {}
    for name, (head, spool) in spools.items():
        added = await catalog.merge_dataset(head, spool)
        if added is not None:
            restored[name] = added
    return restored, sorted({dataset.name for dataset in records.datasets} - restored.keys())


def _check(raw: Path, spool: Path, name: MirrorName) -> None:
    with full_disk_named("quarantine"), raw.open("rb") as lines, spool.open("wb") as out:
        for number, line in enumerate(lines, 1):
            try:
                row = unspooled(line)
            except (ValueError, KeyError, TypeError, MirrordError) as error:
                raise InvalidBundleError(
                    f"cannot import the bundle: row {number} of a dataset is none: {error}"
                ) from error
            if row.mirror.key == name.key:
                out.write(spooled(row))
