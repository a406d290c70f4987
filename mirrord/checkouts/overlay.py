"""The overlay backend: an immutable template below, a private layer above, nothing copied.

Owns what lies in a checkout's directory: `tree` (the mount), and `layer-N` with what was written since the N-th reset. Making one
is four directories and a mount; a reset is a new layer and another mount at the same path, and the old layer is deleted in the
background. Nothing on that path asks git, libgit2 or the catalog. Mounts outlive the daemon: the next one reads once what is
mounted and takes it over; after a reboot the layer is mounted again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import anyio.to_thread
import structlog

from ..errors import BackendUnavailableError, MirrordError, ProofFailedError
from ..git.workers import Workers
from ..host.files import full_disk_named
from ..host.mounts import Mount, allow_remount, read_mounts
from ..model import Backend, CommitId, MirrorName
from ..protocol import Proof
from .backend import Made, Target
from .calls import list_overlay_changes
from .control import discard
from .leases import Lease
from .mounting import Mounter
from .sights import Sight, look_at
from .templates import Template, Templates

_TIMEOUT = timedelta(minutes=5)
_LAYER = "layer-"
_REMOVALS = 64

log = structlog.get_logger()


class OverlayBackend:
    """Checkouts as overlay mounts at `state_dir/checkouts/<id>/tree`. Belongs to one event loop."""

    name = Backend.OVERLAY

    def __init__(
        self,
        *,
        state_dir: Path,
        templates: Templates,
        workers: Workers,
        mounter: Mounter,
        mirrors_path: Callable[[MirrorName], Path],
    ) -> None:
        self._checkouts = state_dir / "checkouts"
        self._store = state_dir / "templates"
        self._idmaps = state_dir / "idmaps"
        self._templates = templates
        self._workers = workers
        self._mounter = mounter
        self._mirrors_path = mirrors_path
        self._mapped: set[tuple[int, int]] = set()
        self._held: dict[Path, tuple[Path, ...]] = {}
        self._sights: dict[tuple[Path, ...], Sight] = {}
        self._found: dict[Path, Mount] = {}
        self._removals: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Read once what an earlier daemon left mounted."""
        self._idmaps.mkdir(mode=0o700, exist_ok=True)
        for mount in await anyio.to_thread.run_sync(read_mounts, self._idmaps):
            uid, _, gid = mount.target.name.partition("-")
            self._mapped.add((int(uid), int(gid)))
        self._found = {mount.target: mount for mount in await anyio.to_thread.run_sync(read_mounts, self._checkouts)}

    async def close(self) -> None:
        """Let the removal of old layers end; what is left goes with its checkout. Mounts stay."""
        if self._removals:
            await asyncio.wait(self._removals, timeout=5)

    async def create(self, lease: Lease) -> Made:
        began = time.perf_counter()
        template = await self._ready(lease, lease.commit)
        found = time.perf_counter()
        self._hold(lease, template.layers)
        with full_disk_named(f"checkout {lease.id}"):
            lease.tree_path.mkdir()
            self._mount(lease, template, _make_layer(lease, 0))
        return Made(template.tree, {"template": round(found - began, 6), "mount": round(time.perf_counter() - found, 6)})

    async def reset(self, lease: Lease, to: Target) -> Proof:
        template = await self._ready(lease, to.commit)
        sight = await self._sight(template)
        await self._keep_up()
        before, old = self._held.get(lease.directory), _newest(lease.directory)
        self._templates.hold(template)  # both stacks stay until one of them is mounted
        with full_disk_named(f"checkout {lease.id}"):
            fresh = _make_layer(lease, _number(old) + 1)
        self._mounter.unmount(lease.tree_path)
        try:
            self._mount(lease, template, fresh)
        except MirrordError:
            self._templates.drop(template)
            self._go_back(lease, before, old, fresh)
            raise
        self._held[lease.directory] = template.layers
        if before is not None:
            self._templates.drop_layers(before)
        if old is not None:
            self._remove_soon(old)
        return _prove(lease, template, sight)

    async def adopt(self, lease: Lease) -> bool:
        mount = self._found.pop(lease.tree_path, None)
        if mount is not None:
            layers = tuple(self._unmapped(path) for path in mount.lower)
            self._templates.hold_layers(layers)
            self._held[lease.directory] = layers
            return True
        return await self._mount_again(lease)

    async def destroy(self, directory: Path, lease: Lease | None) -> None:
        self._mounter.unmount(directory / "tree")
        held = self._held.pop(lease.directory, None) if lease is not None else None
        if held is not None:
            self._templates.drop_layers(held)
        await anyio.to_thread.run_sync(discard, directory)

    async def changed_paths(self, lease: Lease) -> list[bytes]:
        layer = _newest(lease.directory)
        if layer is None:
            raise BackendUnavailableError(f"cannot read checkout {lease.id}: its layer is gone", hint="release it")
        mirror = self._mirrors_path(lease.mirror)
        return await self._workers.call(
            list_overlay_changes, layer / "upper", lease.tree_path, mirror, lease.tree, timeout=_TIMEOUT
        )

    # -- templates ----------------------------------------------------------------------------------------------------

    async def _ready(self, lease: Lease, commit: CommitId) -> Template:
        """The template for the lease's owner, with the layers shown as that owner's where it is not us."""
        owner = (lease.owner_uid, lease.owner_gid)
        if self._is_foreign(owner) and owner not in self._mapped:
            self._map(owner)
        found = self._templates.find(lease.mirror, commit, lease.history, owner)
        return found or await self._templates.ensure(lease.mirror, commit, lease.history, owner)

    def _hold(self, lease: Lease, layers: tuple[Path, ...]) -> None:
        self._templates.hold_layers(layers)
        self._held[lease.directory] = layers

    async def _sight(self, template: Template) -> Sight:
        """What the template's `.git` holds; read once for each template."""
        if template.layers not in self._sights:
            if len(self._sights) > 4096:
                self._sights.clear()
            self._sights[template.layers] = await anyio.to_thread.run_sync(look_at, template.layers)
        return self._sights[template.layers]

    # -- owners -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_foreign(owner: tuple[int, int]) -> bool:
        return owner != (os.geteuid(), os.getegid())

    def _map(self, owner: tuple[int, int]) -> None:
        """Show all templates once more, as this owner's."""
        target = self._idmaps / f"{owner[0]}-{owner[1]}"
        target.mkdir(mode=0o700, exist_ok=True)
        self._mounter.bind_idmapped(self._store, target, owner)
        self._mapped.add(owner)
        log.info("templates.mapped", uid=owner[0], gid=owner[1])

    def _lower(self, layers: tuple[Path, ...], owner: tuple[int, int]) -> list[Path]:
        if not self._is_foreign(owner):
            return list(layers)
        shown = self._idmaps / f"{owner[0]}-{owner[1]}"
        return [shown / path.relative_to(self._store) for path in layers]

    def _unmapped(self, path: Path) -> Path:
        """The layer itself, for a path as it was mounted."""
        if not path.is_relative_to(self._idmaps):
            return path
        return self._store.joinpath(*path.relative_to(self._idmaps).parts[1:])

    # -- mounts -------------------------------------------------------------------------------------------------------

    def _mount(self, lease: Lease, template: Template, layer: Path) -> None:
        lower = self._lower(template.layers, (lease.owner_uid, lease.owner_gid))
        self._mounter.mount_overlay(lease.tree_path, lower, layer / "upper", layer / "work")

    def _go_back(self, lease: Lease, before: tuple[Path, ...] | None, old: Path | None, fresh: Path) -> None:
        """A reset could not mount: bring the former state back as far as it goes."""
        self._remove_soon(fresh)
        if before is None or old is None:
            return
        lower = self._lower(before, (lease.owner_uid, lease.owner_gid))
        allow_remount(old / "work")
        with suppress(MirrordError):
            self._mounter.mount_overlay(lease.tree_path, lower, old / "upper", old / "work")

    async def _mount_again(self, lease: Lease) -> bool:
        """After a reboot, or when somebody unmounted it: what the owner wrote is still in the newest layer."""
        layer = _newest(lease.directory)
        if layer is None:
            return False
        try:
            template = await self._ready(lease, lease.commit)
            allow_remount(layer / "work")
            self._mount(lease, template, layer)
        except (MirrordError, OSError) as error:
            log.warning("checkout.unmountable", checkout=lease.id, error=str(error))
            return False
        self._hold(lease, template.layers)
        return True

    # -- old layers ---------------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        """Wait while many old layers are still to be deleted."""
        while len(self._removals) > _REMOVALS:
            await asyncio.wait(self._removals, return_when=asyncio.FIRST_COMPLETED)

    def _remove_soon(self, layer: Path) -> None:
        task = asyncio.get_running_loop().create_task(self._remove(layer))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _remove(self, layer: Path) -> None:
        try:
            await anyio.to_thread.run_sync(discard, layer)
        except (MirrordError, OSError) as error:
            log.warning("layer.kept", layer=str(layer), error=str(error))  # it goes with its checkout


def _make_layer(lease: Lease, number: int) -> Path:
    layer = lease.directory / f"{_LAYER}{number}"
    for path in (layer, layer / "upper", layer / "work"):
        path.mkdir()
    upper = layer / "upper"
    upper.chmod(0o755)  # whatever the umask: this is the mode of the tree's top
    if lease.owner_uid != os.geteuid() or lease.owner_gid != os.getegid():
        os.chown(upper, lease.owner_uid, lease.owner_gid)
    return layer


def _newest(directory: Path) -> Path | None:
    """The layer with the highest number; older ones are waiting to be deleted."""
    layers = [path for path in directory.glob(f"{_LAYER}*") if (path / "upper").is_dir()]
    return max(layers, key=_number, default=None)


def _number(layer: Path | None) -> int:
    return int(layer.name.removeprefix(_LAYER)) if layer is not None else -1


def _prove(lease: Lease, template: Template, sight: Sight) -> Proof:
    """Read HEAD through the mount: the stack that serves is the one that was asked for."""
    head = (lease.tree_path / ".git/HEAD").read_text(encoding="ascii").strip()
    if head != template.head:
        raise ProofFailedError(
            f"cannot prove checkout {lease.id}: HEAD is {head}, not {template.head}",
            hint="the checkout was destroyed; ask for another",
            wanted=template.head,
            seen=head,
        )
    return Proof(
        head=head,
        tree=template.tree,
        index=sight.index,
        control_files=sight.control_files,
        files_checked=1,
        files_restored=0,
        files_removed=0,
        refs=list(sight.refs),
        packs=list(sight.packs),
        method="an empty layer over a template that was verified by content, HEAD read back",
    )
