"""Whether this host allows overlay checkouts, found by making one.

Owns the trial: a real mount in the state directory, for the daemon's own user and for another. It leaves nothing behind; what a
kill leaves is a checkout without a lease, which the next start removes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import structlog

from ...errors import BackendUnavailableError, MirrordError
from ...git.workers import Workers
from ...host.files import host_error, opened
from ...host.mounting import PROBE_LAYER, Mounter, OverlayOrder, choose_mounter
from ...host.processes import Owner
from ...host.trash import Trash, find_trash, remove_tree
from ...model import MirrorName, new_checkout_id
from ..templates.store import Templates
from .backend import OverlayBackend

_SOMEBODY: Owner = (65534, 65534)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Trial:
    """`may_map_owners`: whether other users than the daemon's can have overlay checkouts; `reason` says why not."""

    may_map_owners: bool
    reason: str = ""


async def find_overlay(
    *,
    state_dir: Path,
    service: Path,
    templates: Templates,
    workers: Workers,
    mirrors_path: Callable[[MirrorName], Path],
    trash: Trash,
) -> OverlayBackend | None:
    """The overlay backend, where this host allows it; `service` is where the mount service listens, if there is one."""
    try:
        mounter = choose_mounter(state_dir, service)
        await anyio.to_thread.run_sync(mounter.open)
        trial = await anyio.to_thread.run_sync(try_overlay, state_dir, mounter)
    except MirrordError as error:
        log.warning("overlay.refused", reason=error.message, hint=error.hint)
        return None
    except OSError as error:
        if host_error(error, "try an overlay") is None:
            raise
        log.warning("overlay.unprobed", reason=str(error))  # held checkouts need it now
        trial = Trial(may_map_owners=True)
    if not trial.may_map_owners:
        log.warning("owners.unmapped", reason=trial.reason)
    return OverlayBackend(
        state_dir=state_dir,
        mounter=mounter,
        templates=templates,
        workers=workers,
        mirrors_path=mirrors_path,
        may_map_owners=trial.may_map_owners,
        trash=trash,
    )


def try_overlay(state_dir: Path, mounter: Mounter) -> Trial:
    """Mount, use and unmount an overlay; raises BackendUnavailableError where that does not work."""
    me = (os.geteuid(), os.getegid())
    layer = state_dir / "templates" / PROBE_LAYER
    (layer / "directory").mkdir(mode=0o755, parents=True, exist_ok=True)
    (layer / "directory" / "file").touch()
    try:
        _try_one(state_dir, mounter, me, None)
        return _try_other(state_dir, mounter)
    except FileNotFoundError as error:
        raise BackendUnavailableError(
            f"cannot mount an overlay in {state_dir}: {error.strerror}"
        ) from error
    finally:
        for left in [
            layer,
            *find_trash(layer.parent),
        ]:  # an earlier daemon may have been killed here
            remove_tree(left)


def _try_other(state_dir: Path, mounter: Mounter) -> Trial:
    try:
        _try_one(state_dir, mounter, _SOMEBODY, _SOMEBODY)
    except (MirrordError, OSError) as error:
        return Trial(may_map_owners=False, reason=str(error))
    return Trial(may_map_owners=True)


def _try_one(state_dir: Path, mounter: Mounter, seen: Owner, owner: Owner | None) -> None:
    name = new_checkout_id()
    public, private = state_dir / "checkouts" / name, state_dir / "leases" / name
    for path in (public / "tree", private / "layer" / "upper", private / "layer" / "work"):
        path.mkdir(mode=0o700, parents=True)
    (private / "lease.json").write_text(json.dumps({"owner_uid": seen[0], "owner_gid": seen[1]}))
    try:
        with opened(mounter.make(OverlayOrder(name, "layer", (PROBE_LAYER,), owner))) as mount:
            mounter.attach(name, mount)
        _use(public / "tree", seen)
    finally:
        mounter.umount(name)
        remove_tree(public)
        remove_tree(private)


def _use(tree: Path, seen: Owner) -> None:
    """See the layer below, as its owner's, and rename a directory of it."""
    try:
        found = (tree / "directory" / "file").stat()
        (tree / "directory").rename(tree / "renamed")
    except OSError as error:
        raise BackendUnavailableError(
            f"cannot use an overlay in {tree.parent.parent}: {error.strerror}"
        ) from error
    if (found.st_uid, found.st_gid) != seen:
        raise BackendUnavailableError(
            f"cannot give files to uid {seen[0]}: they are seen as uid {found.st_uid}'s"
        )
