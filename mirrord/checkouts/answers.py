"""What the service answers of leases and snapshots."""

from typing import Any

from .. import protocol
from ..model import Bind
from .leases import Lease, SavedState

_SHOWN = (
    *("id", "commit", "tree", "instance", "history", "view", "backend"),
    *("owner_uid", "owner_gid", "taken_by", "created_at", "expires_at", "parent"),
)


def members(lease: Lease, timings: dict[str, float]) -> dict[str, Any]:
    return {name: getattr(lease, name) for name in _SHOWN} | {
        "path": f"{lease.directory}/tree",
        "directory": str(lease.directory),
        "mirror": str(lease.mirror),
        "bind": Bind.PROCESS if lease.bound_to else Bind.LEASE,
        "timings": timings,
    }


def copied(snapshot: SavedState) -> protocol.Copied:
    names = ("taken_at", "files", "size_bytes", "left_out", "git")
    return protocol.Copied(**{name: getattr(snapshot, name) for name in names})


def shown_snapshot(lease: Lease, snapshot: SavedState) -> protocol.Snapshot:
    return protocol.Snapshot(
        name=snapshot.name,
        checkout=lease.id,
        commit=snapshot.commit,
        instance=snapshot.instance,
        copied=copied(snapshot),
    )
