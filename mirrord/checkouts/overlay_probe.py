"""Probe whether this host allows overlay checkouts, by real mounts in the state directory.

Leaves nothing behind; a kill leaves a checkout without a lease, which the next start removes.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread

from ..errors import BackendUnavailableError, MirrordError
from ..git.workers import Workers
from ..host.files import host_error, opened
from ..host.mounting import PROBE_LAYER, Mounter, OverlayOrder, choose_mounter
from ..host.processes import Owner
from ..host.trash import Trash, find_trash, remove_tree
from ..model import MirrorName, new_checkout_id
from ..telemetry import log
from .environments import EnvironmentStore
from .overlay import OverlayBackend
from .templates.service import Templates


async def find_overlay(
    state_dir: Path,
    service: Path,
    templates: Templates,
    workers: Workers,
    mirrors_path: Callable[[MirrorName], Path],
    trash: Trash,
    environments: EnvironmentStore,
) -> OverlayBackend | None:
    """The overlay backend, if this host allows it; `service` is the mount service's socket."""
    unmapped = ""
    try:
        mounter = choose_mounter(state_dir, service)
        await anyio.to_thread.run_sync(mounter.open)
        unmapped = await anyio.to_thread.run_sync(try_overlay, state_dir, mounter)
    except MirrordError as error:
        log.warning("overlay.refused", reason=error.message, hint=error.hint)
        return None
    except OSError as error:
        if host_error(error, "try an overlay") is None:
            raise
        log.warning("overlay.unprobed", reason=str(error))  # held checkouts need it now
    if unmapped:
        log.warning("owners.unmapped", reason=unmapped)
    can_map = not unmapped
    return OverlayBackend(
        state_dir, mounter, templates, workers, mirrors_path, trash, environments,
        may_map_owners=can_map,
    )  # fmt: skip


def try_overlay(state_dir: Path, mounter: Mounter) -> str:
    """Mount, use and unmount an overlay; answers why other users than the daemon's cannot have one,
    empty where they can. Raises BackendUnavailableError where nobody can.
    """
    layer = state_dir / "templates" / PROBE_LAYER
    (layer / "directory").mkdir(mode=0o755, parents=True, exist_ok=True)
    (layer / "directory" / "file").touch()
    try:
        _try_as(state_dir, mounter, None)
        try:
            _try_as(state_dir, mounter, (65534, 65534))
        except (MirrordError, OSError) as error:
            return str(error)
        return ""
    except FileNotFoundError as error:
        raise BackendUnavailableError(
            f"cannot mount an overlay in {state_dir}: {error.strerror}"
        ) from error
    finally:
        for left in (layer, *find_trash(layer.parent)):  # an earlier daemon may have been killed
            remove_tree(left)


def _try_as(state_dir: Path, mounter: Mounter, mapped: Owner | None) -> None:
    """See a file below as the owner's, and rename a directory."""
    owner = mapped or (os.geteuid(), os.getegid())
    name = new_checkout_id()
    public, private = state_dir / "checkouts" / name, state_dir / "leases" / name
    tree = public / "tree"
    for path in (tree, private / "layer" / "upper", private / "layer" / "work"):
        path.mkdir(mode=0o700, parents=True)
    (private / "lease.json").write_text(json.dumps({"owner_uid": owner[0], "owner_gid": owner[1]}))
    try:
        with opened(mounter.make(OverlayOrder(name, "layer", (PROBE_LAYER,), mapped))) as mount:
            mounter.attach(name, mount)
        try:
            found = (tree / "directory" / "file").stat()
            (tree / "directory").rename(tree / "renamed")
        except OSError as error:
            message = f"cannot use an overlay in {public.parent}: {error.strerror}"
            raise BackendUnavailableError(message) from error
        if (found.st_uid, found.st_gid) != owner:
            fact = f"they are seen as uid {found.st_uid}'s"
            raise BackendUnavailableError(f"cannot give files to uid {owner[0]}: {fact}")
    finally:
        mounter.umount(name)
        remove_tree(public)
        remove_tree(private)
