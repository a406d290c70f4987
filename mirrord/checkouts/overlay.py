"""The overlay backend: a checkout is one mount, a private layer over the immutable layers of its template.

Owns `checkouts/<id>/tree`, where the mount is, and `checkouts/<id>/layer/` (0700, so that nobody reaches past the mount) with
`upper`, what the client wrote, and overlayfs's `work`. With a warm template a checkout is five mkdirs and a mount. A reset makes
another in `.next-…` (0700, so that nobody is in it before it was proven), and one rename exchanges the two: what was there goes
as a released checkout does. All that is done on the event loop: it takes less time than a thread would to begin. Taking things
down again waits for the kernel and the disk, and is done by threads.

Mounts outlive the daemon. After a crash a lease is found mounted as it was; after a reboot its layer is mounted again. What is
called `.next-…` is no checkout yet, or no longer; what is called `.old-…` or `.gone-…` in a checkout's directory is rubbish.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import anyio.to_thread
import structlog

from ..errors import BackendUnavailableError, MirrordError, ProofFailedError, ResourceError
from ..git.workers import Workers
from ..host.files import full_disk_named, open_child, open_directory, open_regular, opened
from ..host.mounting import Mounter, OverlayOrder
from ..host.mounts import read_overlays
from ..host.userns import Owner
from ..model import Backend, CheckoutId, MirrorName
from ..protocol import Proof
from .backend import Made
from .calls import list_overlay_changes
from .graves import find_graves, new_grave
from .leases import Lease, Leases
from .proof import require
from .rubbish import Rubbish, remove_untouched
from .sights import Sight, look_at
from .spares import Fresh, Spares
from .templates import Template, Templates

_METHOD = "a fresh layer over a template that was verified by content"
_TIMEOUT = timedelta(minutes=10)
_IDMAPS_MAX = 256
_SIGHTS_MAX = 4096

T = TypeVar("T")

log = structlog.get_logger()


class OverlayBackend:
    """Checkouts as overlay mounts below `state_dir/checkouts`. All methods belong to the event loop's thread."""

    name = Backend.OVERLAY

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
        self._spares = Spares(state_dir / "checkouts", self._make_fresh, self._remove)

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

        async def fill(template: Template) -> Made:
            ready = time.perf_counter()
            self._fill(str(lease.directory), lease, template)
            timings = {"template": round(ready - began, 6), "mount": round(time.perf_counter() - ready, 6)}
            return Made(template.tree, timings)

        return await self._with_template(lease, fill)

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """Where it fails, nothing was touched of what is there."""
        await self._rubbish.keep_up()

        async def move_in(template: Template) -> Proof:
            sight = self._sights.get(template.layers) or await self._look_at(template)
            spare = self._spares.take(to.id, template)
            directory = spare.directory if spare else self._spares.new_directory()
            try:
                proof = _prove(spare or self._make_fresh(directory, to, template), sight, to)
                leases.move_in(to, directory)
            finally:
                self._remove(directory)
            if self._held.get(to.id) is template:  # it may well be reset to here once more
                self._spares.make_ahead(to, template)
            return proof

        return await self._with_template(to, move_in)

    async def adopt(self, lease: Lease) -> bool:
        is_mounted = str(lease.tree_path) in self._mounted
        self._mounted.discard(str(lease.tree_path))
        for old in find_graves(lease.directory):
            self._rubbish.add(old)

        async def mount(template: Template) -> None:
            if not is_mounted:
                self._mount_again(lease, template)

        try:
            await self._with_template(lease, mount)
        except (MirrordError, OSError) as error:
            log.warning("checkout.orphaned", checkout=lease.id, mounted=is_mounted, error=str(error))
            return is_mounted
        return True

    async def destroy(self, directory: Path, lease: Lease | None) -> None:
        if lease is not None:
            self._spares.drop(lease.id)
        try:
            await self._rubbish.remove(directory, self._take_down)
        finally:
            if lease is not None and (template := self._held.pop(lease.id, None)):
                self._templates.drop(template)

    def _take_down(self, directory: Path) -> bool:
        """Unmount a checkout and remove what is quickly removed, in a thread: it is nearly all waiting, for the kernel."""
        self._mounter.umount(directory.name)
        return remove_untouched(directory)

    def _remove(self, directory: str) -> None:
        """Take away soon what no lease stands for."""
        self._rubbish.add(Path(directory), self._take_down)

    async def changed_paths(self, lease: Lease) -> list[bytes]:
        template = self._held.get(lease.id)
        layers = template.layers if template else ()
        mirror = self._mirrors_path(lease.mirror)
        upper = lease.directory / "layer" / "upper"
        facts = (lease.tree_path, upper, layers, mirror, lease.tree)
        return await self._workers.call(list_overlay_changes, *facts, timeout=_TIMEOUT)

    # -- templates ----------------------------------------------------------------------------------------------------

    async def _with_template(self, lease: Lease, use: Callable[[Template], Awaitable[T]]) -> T:
        """Find or make the lease's template and `use` it; hold it for the lease, in the place of the one before.

        A template can vanish between the two, or be deleted behind our back: it is made again, once. A new checkout lets the
        mount find that out; a reset looks, because what was made ahead is mounted already.
        """
        owner = _owner(lease)
        self._must_serve(owner)
        wanted = (lease.mirror, lease.commit, lease.history, owner)
        for attempt in (1, 2):
            await self._have_idmap(owner, anew=attempt > 1)
            found = self._templates.find(*wanted) if attempt == 1 and lease.id not in self._held else None
            template = found or await self._templates.ensure(*wanted)
            self._templates.hold(template)
            try:
                used = await use(template)
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
        return used

    async def _look_at(self, template: Template) -> Sight:
        sight = await anyio.to_thread.run_sync(look_at, template.layers)
        if len(self._sights) >= _SIGHTS_MAX:
            self._sights.clear()
        self._sights[template.layers] = sight
        return sight

    # -- layers and mounts --------------------------------------------------------------------------------------------

    def _make_fresh(self, directory: str, lease: Lease, template: Template) -> Fresh:
        """What may take the place of a lease's directory, in one that only the daemon enters."""
        with full_disk_named(f"checkout {lease.id}"):
            os.mkdir(directory, 0o700)
        self._fill(directory, lease, template)
        return Fresh(directory, template, _read_head(f"{directory}/tree"))

    def _fill(self, directory: str, lease: Lease, template: Template) -> None:
        """Make an empty layer in a directory, which may be half done already, and mount it over the template."""
        owner = _owner(lease)
        with full_disk_named(f"checkout {lease.id}"), suppress(FileExistsError):
            os.mkdir(f"{directory}/tree", 0o755)
            os.mkdir(f"{directory}/layer", 0o700)
            os.mkdir(f"{directory}/layer/upper", 0o755)
            os.mkdir(f"{directory}/layer/work", 0o700)
            if owner != self._me:
                os.chown(f"{directory}/layer/upper", *owner)
        self._mount(os.path.basename(directory), template, owner)

    def _mount_again(self, lease: Lease, template: Template) -> None:
        """Mount the layer that is there. A volatile overlay's work directory cannot be used twice."""
        self._mounter.umount(lease.id)
        old, work = new_grave(lease.directory), lease.directory / "layer" / "work"
        with suppress(FileNotFoundError):
            work.rename(old)
        work.mkdir(mode=0o700)
        self._rubbish.add(old)
        self._mount(lease.id, template, _owner(lease))
        log.info("checkout.remounted", checkout=lease.id)

    def _mount(self, directory: str, template: Template, owner: Owner) -> None:
        layers = tuple(str(path).removeprefix(self._store) for path in template.layers)
        self._mounter.mount(OverlayOrder(directory, layers, None if owner == self._me else owner))

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


def _prove(fresh: Fresh, sight: Sight, to: Lease) -> Proof:
    proof = Proof(
        head=fresh.head,
        tree=fresh.template.tree,
        index=sight.index,
        control_files=sight.control_files,
        files_checked=None,
        files_restored=None,
        files_removed=None,
        refs=list(sight.refs),
        packs=list(sight.packs),
        method=_METHOD,
    )
    return require(proof, head=fresh.template.head, tree=to.tree)


def _read_head(tree: str) -> str:
    """What HEAD says through a mount."""
    try:
        with (
            opened(open_directory(Path(tree))) as top,
            opened(open_child(top, b".git")) as git,
            opened(open_regular(git, b"HEAD")) as head,
        ):
            return os.read(head, 64).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise ProofFailedError(
            f"cannot prove the checkout clean: its HEAD cannot be read: {error}", hint="audit the mirror"
        ) from error
