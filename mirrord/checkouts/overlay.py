"""The overlay backend: a checkout is one mount, a private layer over the immutable layers of its template.

Owns `checkouts/<id>/tree`, where the mount is, and `checkouts/<id>/layer/` (0700, so that nobody reaches past the mount) with
`upper`, what the client wrote, and overlayfs's `work`. With a warm template a checkout is four mkdirs and a mount; a reset is the
same after the old layer was renamed away. That is done on the event loop: it takes less time than a thread would to begin. Taking
things down again waits for the disk, and is done by threads.

Mounts outlive the daemon. After a crash a lease is found mounted as it was; after a reboot its layer is mounted again. A LIVE
lease has one `layer`; whatever is called `.old-…` or `.gone-…` beside it is rubbish.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import anyio.to_thread
import structlog

from ..errors import BackendUnavailableError, MirrordError, ProofFailedError, ResourceError
from ..git.workers import Workers
from ..host.files import full_disk_named, open_child, open_directory, open_regular, opened
from ..host.mounting import Mounter, OverlayOrder
from ..host.mounts import read_overlays
from ..host.userns import Owner
from ..model import Backend, CheckoutId, CommitId, MirrorName
from ..protocol import Proof
from .backend import Made, Target
from .calls import list_overlay_changes
from .graves import find_graves, new_grave
from .leases import Lease, LeaseState
from .proof import require
from .rubbish import Rubbish, remove_untouched, remove_unwritten
from .sights import Sight, look_at
from .spares import Spares
from .templates import Template, Templates

_METHOD = "a fresh layer over a template that was verified by content"
_TIMEOUT = timedelta(minutes=10)
_IDMAPS_MAX = 256
_SIGHTS_MAX = 4096
_LAYER = "layer"
_EMPTY_NLINK = 2

log = structlog.get_logger()


class OverlayBackend:
    """Checkouts as overlay mounts below `state_dir/checkouts`. All methods belong to the event loop's thread."""

    name = Backend.OVERLAY
    undoes_resets = True

    def __init__(
        self,
        *,
        state_dir: Path,
        mounter: Mounter,
        templates: Templates,
        workers: Workers,
        mirrors_path: Callable[[MirrorName], Path],
        may_map_owners: bool,
    ) -> None:
        self._checkouts = state_dir / "checkouts"
        self._idmaps_path = state_dir / "idmaps"
        self._store = f"{state_dir}/templates/"
        self._mounter = mounter
        self._templates = templates
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._may_map_owners = may_map_owners
        self._me = (os.geteuid(), os.getegid())
        self._held: dict[CheckoutId, Template] = {}
        self._sights: dict[tuple[Path, ...], Sight] = {}
        self._idmaps: dict[Owner, None] = {}  # the one used last at the end
        self._mapping = anyio.Lock()  # making one forks: 10 to 34 ms
        self._mounted: set[str] = set()
        self._rubbish = Rubbish(workers)
        self._spares = Spares(self._checkouts, self._make_spare, lambda spare: self._rubbish.add(spare, self._take_down))

    async def open(self) -> None:
        """See what is mounted; drop the idmapped templates of an earlier daemon, which nothing needs."""
        self._idmaps_path.mkdir(mode=0o700, exist_ok=True)
        self._mounted = await anyio.to_thread.run_sync(read_overlays)
        for path in self._idmaps_path.iterdir():
            uid, _, gid = path.name.partition("-")
            self._drop_idmap((int(uid), int(gid)))

    async def close(self) -> None:
        await self._spares.close()
        await self._rubbish.close()
        for owner in list(self._idmaps):
            self._drop_idmap(owner)
        self._mounter.close()

    async def create(self, lease: Lease) -> Made:
        began = time.perf_counter()
        mounting_s = 0.0

        def mount(template: Template) -> None:
            nonlocal mounting_s
            ready = time.perf_counter()
            with full_disk_named(f"checkout {lease.id}"), suppress(FileExistsError):
                os.mkdir(f"{lease.directory}/tree", 0o755)
                self._make_layer(lease.directory, _owner(lease))
            self._mount(lease, template)
            mounting_s = time.perf_counter() - ready

        template = await self._with_template(lease, lease.commit, mount)
        template_s = time.perf_counter() - began - mounting_s
        return Made(template.tree, {"template": round(template_s, 6), "mount": round(mounting_s, 6)})

    async def prepare(self, lease: Lease, to: Target) -> None:
        """A reset makes it before it touches anything."""

    async def reset(self, lease: Lease, to: Target) -> Proof:
        await self._rubbish.keep_up()
        template = await self._with_template(lease, to.commit, lambda template: self._swap(lease, template))
        if self._mounter.keeps:
            self._spares.note_reset(template, _owner(lease))
        sight = self._sights.get(template.layers) or await self._look_at(template)
        proof = Proof(
            head=_read_head(lease.tree_path),
            tree=template.tree,
            index=sight.index,
            control_files=sight.control_files,
            files_checked=None,
            files_restored=None,
            files_removed=None,
            refs=list(sight.refs),
            packs=list(sight.packs),
            method=_METHOD,
        )
        return require(proof, head=template.head, tree=to.tree)

    async def adopt(self, lease: Lease) -> bool:
        is_mounted = str(lease.tree_path) in self._mounted
        self._mounted.discard(str(lease.tree_path))
        for old in find_graves(lease.directory):
            self._rubbish.add(old)
        if lease.state is LeaseState.RESETTING:  # whatever is there, it is reset next
            return True
        try:
            await self._with_template(lease, lease.commit, lambda found: None if is_mounted else self._mount_again(lease, found))
        except (MirrordError, OSError) as error:
            log.warning("checkout.orphaned", checkout=lease.id, mounted=is_mounted, error=str(error))
            return is_mounted
        return True

    async def destroy(self, directory: Path, lease: Lease | None) -> None:
        try:
            await self._rubbish.remove(directory, self._take_down)
        finally:
            if lease is not None and (template := self._held.pop(lease.id, None)):
                self._templates.drop(template)

    def _take_down(self, directory: Path) -> bool:
        """Unmount a checkout and remove what is quickly removed, in a thread: it is nearly all waiting, for the kernel."""
        self._mounter.umount(directory.name)
        return remove_untouched(directory)

    def _remove_layer(self, layer: Path) -> bool:
        """Take a layer away that a reset replaced, in a thread; False where something was written to it."""
        self._mounter.tear_down()
        return remove_unwritten(layer)

    async def changed_paths(self, lease: Lease) -> list[bytes]:
        template = self._held.get(lease.id)
        layers = template.layers if template else ()
        mirror = self._mirrors_path(lease.mirror)
        upper = lease.directory / "layer" / "upper"
        facts = (lease.tree_path, upper, layers, mirror, lease.tree)
        return await self._workers.call(list_overlay_changes, *facts, timeout=_TIMEOUT)

    # -- templates ----------------------------------------------------------------------------------------------------

    async def _with_template(self, lease: Lease, commit: CommitId, mount: Callable[[Template], object]) -> Template:
        """Find or make a template and `mount` it; hold it for the lease, in the place of the one before.

        A template can vanish between the two, or be deleted behind our back: it is made again, once. A new checkout has nothing
        to lose and lets the mount find that out; a reset looks before it touches anything.
        """
        owner = _owner(lease)
        self._must_serve(owner)
        wanted = (lease.mirror, commit, lease.history, owner)
        for attempt in (1, 2):
            await self._have_idmap(owner, anew=attempt > 1)
            found = self._templates.find(*wanted) if attempt == 1 and lease.id not in self._held else None
            template = found or await self._templates.ensure(*wanted)
            self._templates.hold(template)
            try:
                mount(template)
            except FileNotFoundError as error:
                self._templates.drop(template)
                if attempt == 2:
                    raise ResourceError(f"cannot mount checkout {lease.id}: {error.strerror}", hint="try again") from error
            except BaseException:
                self._templates.drop(template)
                raise
            else:
                break
        if before := self._held.get(lease.id):
            self._templates.drop(before)
        self._held[lease.id] = template
        return template

    async def _look_at(self, template: Template) -> Sight:
        sight = await anyio.to_thread.run_sync(look_at, template.layers)
        if len(self._sights) >= _SIGHTS_MAX:
            self._sights.clear()
        self._sights[template.layers] = sight
        return sight

    # -- layers and mounts --------------------------------------------------------------------------------------------

    def _swap(self, lease: Lease, template: Template) -> None:
        """Put a fresh layer and mount into the place of what is there. Where that fails, what was there comes back."""
        old = _set_aside(lease.directory)
        spare = self._spares.take(template, _owner(lease))
        try:
            if spare:
                os.rename(f"{spare.directory}/{_LAYER}", f"{lease.directory}/{_LAYER}")
            else:
                self._make_layer(lease.directory, _owner(lease))
            self._mounter.umount(lease.id, was_used=_is_written(str(old)))
            if spare:
                self._mounter.put_on(spare.mount, lease.id)
            else:
                self._mount(lease, template)
        except BaseException:
            self._put_back(lease, old)
            raise
        finally:
            if spare:
                self._spares.spend(spare)
        self._rubbish.add(old, self._remove_layer)

    def _put_back(self, lease: Lease, old: Path) -> None:
        self._rubbish.add(_set_aside(lease.directory))
        template = self._held.get(lease.id)
        try:
            old.rename(lease.directory / _LAYER)
            if template:
                self._mount_again(lease, template)
        except (MirrordError, OSError) as error:
            log.warning("checkout.unmounted", checkout=lease.id, error=str(error))

    def _mount_again(self, lease: Lease, template: Template) -> None:
        """Mount the layer that is there. A volatile overlay's work directory cannot be used twice."""
        layer = lease.directory / _LAYER
        self._mounter.umount(lease.id)
        old = _set_aside(lease.directory, f"{_LAYER}/work")
        (layer / "work").mkdir(mode=0o700)
        self._rubbish.add(old)
        self._mount(lease, template)
        log.info("checkout.remounted", checkout=lease.id)

    def _make_layer(self, directory: Path, owner: Owner) -> None:
        layer = f"{directory}/{_LAYER}"
        with full_disk_named(f"checkout {directory.name}"):
            os.mkdir(layer, 0o700)
            os.mkdir(f"{layer}/upper", 0o755)
            os.mkdir(f"{layer}/work", 0o700)
        if owner != self._me:
            os.chown(f"{layer}/upper", *owner)

    def _make_spare(self, directory: Path, template: Template, owner: Owner) -> int:
        """An overlay as a checkout's in a directory that only the daemon enters, taken off there again. In a thread."""
        with full_disk_named("a spare layer"):
            os.mkdir(directory, 0o700)
            os.mkdir(f"{directory}/tree", 0o755)
        self._make_layer(directory, owner)
        self._mounter.mount(self._order(directory.name, template, owner))
        return self._mounter.take_off(directory.name)

    def _mount(self, lease: Lease, template: Template) -> None:
        self._mounter.mount(self._order(lease.id, template, _owner(lease)))

    def _order(self, checkout: str, template: Template, owner: Owner) -> OverlayOrder:
        layers = tuple(str(path).removeprefix(self._store) for path in template.layers)
        return OverlayOrder(checkout, layers, None if owner == self._me else owner)

    # -- owners -------------------------------------------------------------------------------------------------------

    def _must_serve(self, owner: Owner) -> None:
        if owner != self._me and not self._may_map_owners:
            raise BackendUnavailableError(
                f"cannot give an overlay checkout to uid {owner[0]}: this host has no idmapped mounts for it",
                hint="use the pool backend; Linux 5.19 and newer have them on ext4, xfs and btrfs",
            )

    async def _have_idmap(self, owner: Owner, *, anew: bool) -> None:
        """`anew`: the store was deleted and made again, maybe, and the idmapped one is still the old."""
        if owner == self._me:
            return
        if anew or owner not in self._idmaps:
            async with self._mapping:
                if anew or owner not in self._idmaps:
                    await anyio.to_thread.run_sync(self._mounter.make_idmap, owner)
                    self._idmaps[owner] = None
        self._idmaps[owner] = self._idmaps.pop(owner, None)
        if len(self._idmaps) > _IDMAPS_MAX:
            self._drop_idmap(next(iter(self._idmaps)))

    def _drop_idmap(self, owner: Owner) -> None:
        self._idmaps.pop(owner, None)
        self._mounter.drop_idmap(owner)
        with suppress(OSError):
            (self._idmaps_path / f"{owner[0]}-{owner[1]}").rmdir()


def _owner(lease: Lease) -> Owner:
    return lease.owner_uid, lease.owner_gid


def _set_aside(directory: Path, name: str = _LAYER) -> Path:
    """Rename something in a checkout's directory out of the way; it need not be there."""
    old = new_grave(directory)
    with suppress(FileNotFoundError):
        os.rename(f"{directory}/{name}", old)
    return old


def _is_written(layer: str) -> bool:
    """Whether a directory was written to; `git status` alone makes `.git`. What was not written was hardly read either."""
    try:
        return os.stat(f"{layer}/upper").st_nlink > _EMPTY_NLINK
    except FileNotFoundError:
        return False


def _read_head(tree: Path) -> str:
    """What HEAD says through the mount, that of the client's tree."""
    try:
        with (
            opened(open_directory(tree)) as top,
            opened(open_child(top, b".git")) as git,
            opened(open_regular(git, b"HEAD")) as head,
        ):
            return os.read(head, 64).decode("ascii").strip()
    except (OSError, ValueError) as error:
        hint = "end the processes that run in it before a reset"
        raise ProofFailedError(f"cannot prove the checkout clean: its HEAD cannot be read: {error}", hint=hint) from error
