"""The overlay backend: a checkout is a mount of a private layer over its template's layers.

`checkouts/<id>/tree` is the mount point; `leases/<id>/layer/` has `upper`, with what the client
wrote, and overlayfs's `work`. An environment is another overlay, at `environment` in both. Mounts
outlive the daemon: after a crash a checkout is still mounted, after a reboot its layer is mounted
again.
"""

import errno
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

from .. import errors
from ..changes.pieces import CopyRule, Taken
from ..changes.survey import OverlayPaths, copy_overlay, overlay_changes
from ..errors import full_disk_named, host_error
from ..host.files import open_child, open_directory, open_regular, opened
from ..host.mount_tables import Visible, read_overlays
from ..host.mounting import Mounter, choose_mounter, probe_overlay
from ..host.namespaces import home
from ..host.overlays import ENVIRONMENT, TREE, OverlayOrder
from ..host.processes import Owner
from ..host.trash import Trash, find_trash, new_trash
from ..model import Backend, CheckoutId, LayerId, MirrorName, Target
from ..patches import journal
from ..presence import lexists
from ..protocol import Proof
from ..telemetry import elapsed_s, log
from ..templates.environments import EnvironmentStore
from ..templates.service import Template, TemplateFacts, Templates, last_proven_at, read_facts
from ..trees.proof import must_prove
from ..workers.pool import Workers
from .backend import ChangedPaths
from .layers import layer_path, objects_path
from .lease import Directories, Lease, LeaseState, resetting
from .leases import Leases


class _Overlay(NamedTuple):
    """One overlay of a checkout, mounted at `target`.

    Its upper and work directories are in `layer` of the private directory, those of a reset in
    `next`. Below them is the checkout's `own` layer, and the layers `below`, top first.
    """

    target: str
    layer: str
    next: str
    own: Path | None
    below: tuple[Path, ...]


class _Held(NamedTuple):
    """The template and the environments, by digest, that a checkout keeps on disk."""

    template: Template
    environments: frozenset[str]


@dataclass(eq=False, repr=False)
class OverlayBackend:
    """Checkouts as overlay mounts. Belongs to the event loop's thread."""

    name = Backend.OVERLAY

    state_dir: Path
    mounter: Mounter
    templates: Templates
    workers: Workers
    mirrors_path: Callable[[MirrorName], Path]
    trash: Trash
    environments: EnvironmentStore
    _: KW_ONLY
    may_map_owners: bool

    def __post_init__(self) -> None:
        self._store = f"{self.state_dir}/templates/"
        self._me = (os.geteuid(), os.getegid())
        self._held: dict[CheckoutId, _Held] = {}
        self._mapping = anyio.Lock()
        self._mounted: set[str] = set()
        # A mount point is closed to the client until, and where, no mount covers it: outside of a
        # home it never is, and the client has the uid that owns it.
        self._uncovered_mode = 0 if home.is_inside() else 0o700

    async def open(self) -> None:
        # once for all leases: with 3,000 mounts the table takes 10 ms to read
        self._mounted = await anyio.to_thread.run_sync(read_overlays)

    async def close(self) -> None:
        leases = (self.state_dir / "leases").iterdir()
        is_leased = any(not path.name.startswith(".") for path in leases)
        self.mounter.close(unbind=not is_leased)

    async def create(self, lease: Lease) -> tuple[str, dict[str, float]]:
        began = time.perf_counter()
        # what follows runs on the event loop: starting a thread takes longer than a mount
        async with self._template_for(lease) as template:
            template_s, ready = elapsed_s(began), time.perf_counter()
            for overlay in self._overlays(lease, template.layers):
                with opened(self._make(lease, overlay, overlay.layer)) as mount:
                    self.mounter.attach(lease.id, mount, overlay.target)
        return template.tree, {"template": template_s, "mount": elapsed_s(ready)}

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """Swap in a new layer. A failure before the swap leaves the old tree untouched."""
        await self.trash.keep_up()

        async with self._template_for(to) as template:
            read = partial(anyio.to_thread.run_sync, read_facts, template.layers)
            template.facts = proven = template.facts or await read()
            before = leases.get(to.id)
            # from here on a crash leaves RESETTING, which the next start completes
            leases.save(resetting(to))
            overlays = self._overlays(to, template.layers)
            with ExitStack() as stack:
                try:
                    mounts = [
                        stack.enter_context(opened(self._make(to, overlay, overlay.next)))
                        for overlay in overlays
                    ]
                    proof = _prove(mounts[0], template, proven, to, overlays[0].own)
                except BaseException:
                    # nothing was swapped yet: the tree is as it was
                    leases.save(before)
                    raise
                for overlay, mount in zip(overlays, mounts, strict=True):
                    # Held until the client has its answer: the kernel takes 15 ms to tear down a
                    # tree in which 5,000 files were looked at.
                    old = os.open(to.directory / overlay.target, os.O_PATH | os.O_CLOEXEC)
                    self.mounter.replace(to.id, mount, overlay.target)
                    self._discard(to, overlay.layer, holding=old)
                    # the new mount holds its directories, not their names
                    os.rename(to.private / overlay.next, to.private / overlay.layer)
            journal.end(to.private)  # of an apply that was killed: the tree is as `to` says
            leases.save(to)
        return proof

    async def adopt(self, lease: Lease) -> None:
        for old in find_trash(lease.private):
            self.trash.add(old)

        try:
            async with self._template_for(lease) as template:
                if lease.state is LeaseState.LIVE:
                    self._remount(lease, template)
        except (errors.MirrordError, OSError) as error:
            fields = {"mounted": self._is_mounted(lease, TREE), "error": str(error)}
            log.warning("checkout.orphaned", checkout=lease.id, **fields)
            if not self._is_mounted(lease, TREE):
                raise

    def _is_mounted(self, lease: Lease, target: str) -> bool:
        """Return whether it was mounted when the daemon started."""
        return str(lease.directory / target) in self._mounted

    def _remount(self, lease: Lease, template: Template) -> None:
        """Mount what a reboot, or somebody, unmounted."""
        overlays = self._overlays(lease, template.layers)
        missing = [overlay for overlay in overlays if not self._is_mounted(lease, overlay.target)]
        if missing == overlays:
            self.mounter.umount(lease.id)
        for overlay in missing:
            # the work directory of a volatile overlay cannot be used twice
            self._discard(lease, f"{overlay.layer}/work")
            os.mkdir(lease.private / overlay.layer / "work", 0o700)
            with opened(self._mount(lease, overlay, overlay.layer)) as mount:
                self.mounter.attach(lease.id, mount, overlay.target)
            log.info("checkout.remounted", checkout=lease.id, target=overlay.target)

    async def take_down(self, directories: Directories, lease: Lease | None) -> bool:
        def unmount() -> bool:
            self.mounter.umount(directories.public.name)
            return _remove(directories)

        try:
            return await self.trash.in_thread(unmount)
        finally:
            if lease is not None and (held := self._held.pop(lease.id, None)):
                self._drop(held)

    def released(self, lease: Lease) -> None:
        pass

    def visible_to(self, pid: int) -> Visible:
        return self.mounter.visible_to(pid)

    async def template_proven_at(self, lease: Lease) -> datetime | None:
        held = self._held.get(lease.id)
        return await anyio.to_thread.run_sync(last_proven_at, held.template) if held else None

    async def copy_layer(
        self, lease: Lease, directory: Path, earlier: Path | None, what: CopyRule
    ) -> Taken:
        paths = self._paths(lease, of_environment=what.of_environment)
        return await self.workers.run(
            copy_overlay, directory, paths, earlier, what, timeout=what.limits.timeout
        )

    def clone(self, lease: Lease, target: Target) -> int:
        try:
            return self.mounter.clone(lease.id, target, lease.owner)
        except FileNotFoundError as error:
            raise errors.PathNotFoundError(
                f"cannot attach the {target} of checkout {lease.id}: it has no {target}",
                hint="make a checkout with an environment",
            ) from error

    def changed_paths(self, lease: Lease) -> ChangedPaths:
        mirror = self.mirrors_path(lease.mirror)
        objects = objects_path(self.state_dir, mirror, lease.base)
        return partial(overlay_changes, self._paths(lease), objects, lease.base.clean_tree)

    def _paths(self, lease: Lease, *, of_environment: bool = False) -> OverlayPaths:
        held = self._held.get(lease.id)
        overlay = self._overlays(lease, held.template.layers if held else ())[of_environment]
        mount, upper = (
            f"{lease.directory}/{overlay.target}",
            f"{lease.private}/{overlay.layer}/upper",
        )
        below = tuple(map(str, overlay.below))
        return OverlayPaths(mount, upper, overlay.own, below, lease.owner)

    # -- templates ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def _template_for(self, lease: Lease) -> AsyncIterator[Template]:
        """Find or build the lease's template. If the block succeeds, the lease holds it from then
        on, instead of the one that it had.
        """
        await self._map(lease.owner)
        wanted = lease.template
        template = self.templates.find(*wanted) or await self.templates.ensure(*wanted)
        # before the one that it replaces is dropped: both may have the same layers
        self._hold(held := _Held(template, lease.environments))
        try:
            yield template
        except FileNotFoundError as error:  # deleted by hand meanwhile
            self._drop(held)
            raise errors.ResourceError(
                f"cannot mount checkout {lease.id}: {error.strerror}", hint="try again"
            ) from error
        except BaseException:
            self._drop(held)
            raise
        if before := self._held.get(lease.id):
            self._drop(before)
        self._held[lease.id] = held

    async def _map(self, owner: Owner) -> None:
        """Have the templates shown as the owner's files."""
        if owner == self._me or self.mounter.is_mapped(owner):
            return
        if not self.may_map_owners:
            raise errors.BackendUnavailableError(
                f"cannot give an overlay checkout to uid {owner[0]}: this host has no idmapped"
                " mounts for it",
                hint="use the pool backend; "
                + (
                    "only root's daemon maps files of the host for others"
                    if home.is_inside()
                    else "Linux 5.19 and newer have them on ext4, xfs and btrfs"
                ),
            )
        async with self._mapping:  # forks this process: 10 to 34 ms, in a thread
            if not self.mounter.is_mapped(owner):
                await anyio.to_thread.run_sync(self.mounter.map_owner, owner)

    def _hold(self, held: _Held) -> None:
        self.templates.hold(held.template)
        for digest in held.environments:
            self.environments.hold(digest)

    def _drop(self, held: _Held) -> None:
        self.templates.drop(held.template)
        for digest in held.environments:
            self.environments.drop(digest)

    # -- layers and mounts -------------------------------------------------------------------------

    def _overlays(self, lease: Lease, template: tuple[Path, ...]) -> list[_Overlay]:
        """Return the overlays of a checkout, the tree's first; `template` are its layers."""

        def path(layer: LayerId) -> Path:
            return layer_path(self.state_dir, layer)

        saved = lease.base.saved
        below = (*map(path, saved.layers if saved else ()), *template)
        own = path(lease.base.layer) if lease.base.layer else None
        overlays = [_Overlay(TREE, "layer", "next", own, below)]
        if lease.base.environment is not None:
            lowers = self.environments.lowers(lease.base.environment.digest, lease.base.cover)
            below = (*map(path, saved.environment_layers if saved else ()), *lowers)
            own = path(lease.base.environment_layer) if lease.base.environment_layer else None
            overlays.append(_Overlay(ENVIRONMENT, ENVIRONMENT, f"{ENVIRONMENT}-next", own, below))
        return overlays

    def _make(self, lease: Lease, overlay: _Overlay, layer: str) -> int:
        """Make an empty layer and a detached mount of it; return the mount's descriptor."""
        path = f"{lease.private}/{layer}"
        with full_disk_named(f"checkout {lease.id}"):
            # a reset may be the first to show an environment
            if layer == overlay.layer or overlay.target == ENVIRONMENT:
                with suppress(FileExistsError):
                    os.mkdir(f"{lease.directory}/{overlay.target}", self._uncovered_mode)
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:  # left by a reset that failed
                self._discard(lease, layer)
                os.mkdir(path, 0o700)
            # the root of the mount has the mode and the owner of `upper`
            os.mkdir(f"{path}/upper", 0o755)
            os.mkdir(f"{path}/work", 0o700)
            if lease.owner != self._me:
                os.chown(f"{path}/upper", *lease.owner)
        return self._mount(lease, overlay, layer)

    def _mount(self, lease: Lease, overlay: _Overlay, layer: str) -> int:
        below = (overlay.own, *overlay.below) if overlay.own else overlay.below
        layers = tuple(str(path).removeprefix(self._store) for path in below)
        owner = None if lease.owner == self._me else lease.owner
        return self.mounter.make(OverlayOrder(lease.id, layer, layers, owner))

    def _discard(self, lease: Lease, layer: str, *, holding: int | None = None) -> None:
        """Remove a layer later, after closing the descriptor `holding`."""
        old, held = new_trash(lease.private), [holding] if holding is not None else []
        with suppress(FileNotFoundError):
            os.rename(lease.private / layer, old)

        def remove() -> bool:
            if held:
                os.close(held.pop())
            return remove_layer(old)

        self.trash.add(old, take_down=partial(self.trash.in_thread, remove))


def _remove(directories: Directories) -> bool:
    """Remove the directories of a checkout if its owner wrote nothing; return whether all went."""
    is_gone = True
    public = directories.public
    environment = [ENVIRONMENT] if lexists(directories.private / ENVIRONMENT) else []
    for directory in (public / TREE, *(public / name for name in environment), public):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            is_gone = False  # the other backend's tree
    try:
        for layer in ("layer", *environment):
            if not remove_layer(directories.private / layer):
                return False
        with suppress(FileNotFoundError):
            os.unlink(directories.private / "lease.json")
        with suppress(FileNotFoundError):
            os.rmdir(directories.private)
    except OSError:
        return False
    return is_gone


def remove_layer(layer: Path) -> bool:
    """Remove a layer if its owner wrote nothing but the `.git` that `git status` makes."""
    # overlayfs leaves this in the work directory of a volatile mount (Linux 6.18)
    dirty = "work/work/incompat/volatile/dirty"
    above = ("work/work/incompat/volatile", "work/work/incompat", "work/work", "work", "")
    try:
        for path in ("upper/.git", "upper", dirty, *above):
            with suppress(FileNotFoundError):
                (os.unlink if path is dirty else os.rmdir)(layer / path)
    except OSError:
        return False
    return True


def _prove(
    mount: int, template: Template, proven: TemplateFacts, to: Lease, layer: Path | None
) -> Proof:
    """Prove that a mount shows the lease `to`, by its HEAD and the proven template below it."""
    expected = str(template.head)
    method = "a new layer over a template that was verified by content"
    try:
        head = _read_head(mount)
        if layer is not None:
            method += ", over the layer of a snapshot"
            # without a `.git` in the layer, HEAD is the template's
            with suppress(FileNotFoundError), opened(open_directory(layer)) as own:
                expected = _read_head(own)
    except (OSError, ValueError) as error:
        raise errors.ProofFailedError(
            f"cannot prove the checkout clean: its HEAD cannot be read: {error}",
            hint="audit the mirror",
        ) from error
    proof = Proof(
        **proven,
        head=head,
        tree=template.tree,
        files_checked=None,
        files_restored=None,
        files_removed=None,
        method=method,
    )
    return must_prove(proof, head=expected, tree=to.base.tree)


def _read_head(tree: int) -> str:
    with opened(open_child(tree, b".git")) as git, opened(open_regular(git, b"HEAD")) as fd:
        return os.read(fd, 512).decode("utf-8").strip()


async def find_overlay(
    state_dir: Path,
    service: Path,
    templates: Templates,
    workers: Workers,
    mirrors_path: Callable[[MirrorName], Path],
    trash: Trash,
    environments: EnvironmentStore,
) -> OverlayBackend | None:
    """Return the overlay backend if this host allows it; `service` is the mount service's."""
    unmapped = ""
    try:
        mounter = choose_mounter(state_dir, service)
        await anyio.to_thread.run_sync(mounter.open)
        unmapped = await anyio.to_thread.run_sync(probe_overlay, state_dir, mounter)
    except errors.MirrordError as error:
        log.warning("overlay.refused", reason=error.message, hint=error.hint)
        return None
    except OSError as error:
        if host_error(error, "try an overlay") is None:
            raise
        # a full disk: the leases of an earlier daemon need the backend all the same
        log.warning("overlay.unprobed", reason=str(error))
    if unmapped and not home.is_inside():  # as the kernel has it: see docs/where.md
        log.warning("owners.unmapped", reason=unmapped)
    return OverlayBackend(
        state_dir, mounter, templates, workers, mirrors_path, trash, environments,
        may_map_owners=not unmapped,
    )  # fmt: skip
