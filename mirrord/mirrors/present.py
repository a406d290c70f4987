"""A mirror as clients see it: the catalog's row without the secrets of its URL."""

from __future__ import annotations

from typing import Literal

from ..catalog import MirrorRow
from ..git.command import masked_url
from ..protocol import Mirror, Problem, RefFault


def shown_mirror(row: MirrorRow, pin_count: int) -> Mirror:
    return Mirror(
        name=str(row.name),
        repo=row.name.repo,
        url=masked_url(row.url),
        state=_state(row),
        default_branch=row.default_branch,
        ref_count=row.ref_count,
        pin_count=pin_count,
        kept_count=row.kept_count,
        size_bytes=row.size_bytes,
        synced_at=row.synced_at,
        attempted_at=row.attempted_at,
        error=Problem.from_json(row.error) if row.error else None,
        ref_faults=[RefFault.from_json(fault) for fault in row.ref_faults],
    )


def _state(row: MirrorRow) -> Literal["empty", "ready", "failed"]:
    if row.error:
        return "failed"
    return "ready" if row.synced_at else "empty"
