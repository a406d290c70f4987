"""A ref history whose records nobody could give by their names: what the bundles of the mirror have of it.

Only a bundle holds the records of a mirror; the newest whole one is where the history goes on. Reads only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from ..errors import MirrordError
from ..mirrors.bundles.merge import must_be_history
from ..mirrors.history import list_records
from ..mirrors.repository import KEPT, Refs, Repository
from ..model import MirrorName
from .bundles import BundleFile

Bring = Callable[[BundleFile, str], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Past:
    """`record` is the newest of `donor`, from when it is, and the refs that the bundle keeps."""

    at: datetime
    donor: str
    record: str
    kept: Refs


async def find_past(
    view: Repository, files: Iterable[BundleFile], name: MirrorName, bring: Bring
) -> Past | None:
    """The newest history among bundles of the mirror; `bring` gets a record with all it reaches into the view, or says False."""
    found: list[Past] = []
    for file in files:
        record = file.contents.history
        if record is None or not file.is_of(name) or not await bring(file, record):
            continue
        at = await _stood_at(view, record)
        if at is not None:
            kept = {f"{KEPT}{oid}": oid for oid in file.contents.kept}
            found.append(Past(at, file.name, record, kept))
    return max(found, key=lambda past: past.at, default=None)


async def _stood_at(view: Repository, record: str) -> datetime | None:
    """When the record was made; None where it is none."""
    try:
        await must_be_history(view, record)
        return (await list_records(view, limit=1, start=record))[0].at
    except MirrordError:
        return None
