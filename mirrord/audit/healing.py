"""Bring back what an audit found missing: by fetching, and by pinning again. Deletes nothing.

An absent commit is fetched by its id; a hole in a closure is fetched with everything around it, because a plain fetch believes
that it has what its refs reach. A fetched pack outranks a damaged loose file, and git goes round a damaged pack.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import structlog

from ..catalog.rows import RecordedRow
from ..errors import MirrordError
from ..mirrors.service import Mirrors
from ..model import CommitId, CommitState, MirrorName

_HOLES = {CommitState.INCOMPLETE, CommitState.CORRUPT}
_ABSENT = {CommitState.MISSING, CommitState.NOT_MIRRORED}

log = structlog.get_logger()


async def heal(mirrors: Mirrors, name: MirrorName, rows: Collection[RecordedRow], states: Mapping[CommitId, CommitState]) -> bool:
    """Try to repair the commits of `states`; answers whether anything may have changed."""
    try:
        return await _heal(mirrors, name, rows, states)
    except MirrordError as error:
        log.warning("heal.failed", mirror=str(name), error=error.code, detail=error.message)
        return False


async def _heal(
    mirrors: Mirrors, name: MirrorName, rows: Collection[RecordedRow], states: Mapping[CommitId, CommitState]
) -> bool:
    absent = [oid for oid, state in states.items() if state in _ABSENT]
    holes = [oid for oid, state in states.items() if state in _HOLES]
    if absent:
        await mirrors.ensure_commits(name, absent)
    if holes:
        await mirrors.refetch(name, holes)
    await _pin_again(mirrors, name, rows, states)
    return True


async def _pin_again(
    mirrors: Mirrors, name: MirrorName, rows: Collection[RecordedRow], states: Mapping[CommitId, CommitState]
) -> None:
    """Pins follow the datasets; one is made only after the closure was verified."""
    owners: dict[str, set[CommitId]] = {}
    for row in rows:
        if row.commit in states:
            owners.setdefault(f"dataset/{row.dataset}", set()).add(row.commit)
    for owner, commits in sorted(owners.items()):
        await mirrors.pin(name, sorted(commits), owner=owner, reason="recorded by the dataset; pinned again by a heal")
