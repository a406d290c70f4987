"""The rows of datasets that a bundle brings, into the catalog. Every row is read as one that anybody may have written."""

from __future__ import annotations

from pathlib import Path

import anyio

from ...catalog.catalog import Catalog
from ...catalog.spool import spooled, unspooled
from ...errors import InvalidBundleError, MirrordError
from ...host.files import full_disk_named
from ...model import MirrorName
from ..repository import Repository
from .records import Records, extract_rows


async def merge_datasets(
    catalog: Catalog, scratch: Repository, commit: str | None, records: Records, name: MirrorName
) -> tuple[dict[str, int], list[str]]:
    """Add what is missing; answers how many rows each dataset got, and the datasets that are not the bundle's.

    Rows speak of the mirror they were bundled with: in one of another name they mean nothing.
    """
    restored: dict[str, int] = {}
    refused: list[str] = []
    for dataset in records.datasets:
        added = None
        if commit is not None and MirrorName.parse(records.mirror).key == name.key:
            spool = await _spool(scratch, commit, dataset.name, name)
            added = await catalog.merge_dataset(dataset.head(), spool)
        if added is None:
            refused.append(dataset.name)
        else:
            restored[dataset.name] = added
    return restored, refused


async def _spool(scratch: Repository, commit: str, dataset: str, name: MirrorName) -> Path:
    raw, spool = scratch.path.parent / "rows.raw", scratch.path.parent / "rows.jsonl"
    if not await extract_rows(scratch, commit, dataset, raw):
        raise InvalidBundleError(f"cannot import the bundle: the rows of dataset {dataset} are not in it")
    await anyio.to_thread.run_sync(_rewrite, raw, spool, name)
    raw.unlink()
    return spool


def _rewrite(raw: Path, spool: Path, name: MirrorName) -> None:
    with full_disk_named("quarantine"), raw.open("rb") as lines, spool.open("wb") as out:
        for number, line in enumerate(lines, 1):
            try:
                row = unspooled(line)
            except (ValueError, KeyError, TypeError, MirrordError) as error:
                raise InvalidBundleError(f"cannot import the bundle: row {number} of a dataset is none: {error}") from error
            if row.mirror.key == name.key:
                out.write(spooled(row))
