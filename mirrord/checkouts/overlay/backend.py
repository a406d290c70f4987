"""The overlay backend: a checkout is one mount, a private layer over the immutable layers of its template.

Owns `checkouts/<id>/tree`, where the mount is, and `leases/<id>/layer/`, with `upper`, what the
client wrote, and overlayfs's `work`. With a warm template a checkout is six mkdirs and a mount. A
reset makes another layer, proves the mount of it before it is attached anywhere, and puts it in
the place of the old one in one step, which containers that mounted `checkouts/<id>` follow. All
that is done on the event loop: it takes less time than a thread would to begin. Taking things
down again waits for the kernel and the disk, and is done by threads.

Mounts outlive the daemon. After a crash a lease is found mounted as it was; after a reboot its
layer is mounted again. What is called `.trash-…` in a private directory is rubbish.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio.to_thread
import structlog

from ...errors import BackendUnavailableError, MirrordError, ProofFailedError, ResourceError
from ...git.workers import Workers
from ...host.files import full_disk_named, open_child, open_regular, opened
from ...host.mounting import Mounter, OverlayOrder
from ...host.mounts import read_overlays
from ...host.processes import Owner
from ...host.trash import Trash, find_trash, new_trash
from ...model import Backend, CheckoutId, MirrorName
from ...protocol import Proof
from ..backend import DIFF_TIMEOUT, must_prove
from ..leases import Directories, Lease, Leases, LeaseState, resetting
from ..templates.store import Template, Templates
from .changes import changed_paths

_METHOD = "a fresh layer over a template that was verified by content"
_LAYER, _NEXT = "layer", "next"
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
        trash: Trash,
    ) -> None:
        self._store = f"{state_dir}/templates/"
        self._leases = state_dir / "leases"
        self._mounter = mounter
        self._templates = templates
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._may_map_owners = may_map_owners
        self._me = (os.geteuid(), os.getegid())
        self._held: dict[CheckoutId, Template] = {}
        self._sights: dict[tuple[Path, ...], TemplateFacts] = {}
        self._mapping = anyio.Lock()
        self._mounted: set[str] = set()
        self._trash = trash

    async def open(self) -> None:
        """See what is mounted."""
        self._mounted = await anyio.to_thread.run_sync(read_overlays)

    async def close(self) -> None:
        is_leased = any(not path.name.startswith(".") for path in self._leases.iterdir())
        self._mounter.close(unbind=not is_leased)

    async def create(self, lease: Lease) -> tuple[str, dict[str, float]]:
        began = time.perf_counter()

        async def fill(template: Template) -> tuple[str, dict[str, float]]:
            ready = time.perf_counter()
            with full_disk_named(f"checkout {lease.id}"), suppress(FileExistsError):
                os.mkdir(lease.tree_path, 0o700)  # nobody enters it while nothing is mounted there
            with opened(self._make(lease, _LAYER, template)) as mount:
                self._mounter.attach(lease.id, mount)
            timings = {
                "template": round(ready - began, 6),
                "mount": round(time.perf_counter() - ready, 6),
            }
            return template.tree, timings

        return await self._with_template(lease, fill)

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """Where it fails before the new tree is in place, nothing was touched of what is there."""
        await self._trash.keep_up()

        async def swap_in(template: Template) -> Proof:
            sight = self._sights.get(template.layers) or await self._look_at(template)
            before = leases.get(to.id)
            leases.save(resetting(to))
            try:
                mount = self._make(to, _NEXT, template)
                try:
                    proof = _prove(_read_head(mount), template, sight, to)
                except BaseException:
                    os.close(mount)
                    raise
            except BaseException:
                leases.save(before)
                raise
            with opened(mount):
                self._attach_next(to, mount)
            leases.save(to)
            return proof

        return await self._with_template(to, swap_in)

    async def adopt(self, lease: Lease) -> bool:
        is_mounted = str(lease.tree_path) in self._mounted
        self._mounted.discard(str(lease.tree_path))
        for old in find_trash(lease.private):
            self._trash.add(old)

        async def mount(template: Template) -> None:
            if not is_mounted and lease.state is LeaseState.LIVE:
                self._mount_again(lease, template)

        try:
            await self._with_template(lease, mount)
        except (MirrordError, OSError) as error:
            log.warning(
                "checkout.orphaned", checkout=lease.id, mounted=is_mounted, error=str(error)
            )
            return is_mounted
        return True

    async def take_down(self, directories: Directories, lease: Lease | None) -> bool:
        def unmount() -> bool:
            self._mounter.umount(directories.public.name)
            is_gone = _remove_public(directories.public)
            return remove_untouched(directories.private) and is_gone

        try:
            return await self._trash.in_thread(unmount)
        finally:
            if lease is not None and (template := self._held.pop(lease.id, None)):
                self._templates.drop(template)

    async def changed_paths(self, lease: Lease) -> list[bytes]:
        template = self._held.get(lease.id)
        layers = template.layers if template else ()
        mirror = self._mirrors_path(lease.mirror)
        upper = lease.private / _LAYER / "upper"
        facts = (lease.tree_path, upper, layers, mirror, lease.tree, _owner(lease))
        return await self._workers.run(changed_paths, *facts, timeout=DIFF_TIMEOUT)

    # -- templates ----------------------------------------------------------------------------------------------------

    async def _with_template(self, lease: Lease, use: Callable[[Template], Awaitable[T]]) -> T:
        """Find or make the lease's template and `use` it; hold it for the lease, in the place of the one before.

        A template can vanish between the two, or be deleted behind our back: the mount finds that
        out, and it is made again, once.
        """
        owner = _owner(lease)
        self._must_serve(owner)
        wanted = (lease.mirror, lease.commit, lease.history)
        for attempt in (1, 2):
            await self._map_owner(owner)
            found = self._templates.find(*wanted) if attempt == 1 else None
            template = found or await self._templates.ensure(*wanted)
            self._templates.hold(template)
            try:
                used = await use(template)
            except FileNotFoundError as error:
                self._templates.drop(template)
                if attempt == 2:
                    raise ResourceError(
                        f"cannot mount checkout {lease.id}: {error.strerror}", hint="try again"
                    ) from error
            except BaseException:
                self._templates.drop(template)
                raise
            else:
                break
        if before := self._held.get(lease.id):
            self._templates.drop(before)
        self._held[lease.id] = template
        return used

    async def _look_at(self, template: Template) -> TemplateFacts:
        sight = await anyio.to_thread.run_sync(look_at, template.layers)
        if len(self._sights) >= _SIGHTS_MAX:
            self._sights.clear()
        self._sights[template.layers] = sight
        return sight

    # -- layers and mounts --------------------------------------------------------------------------------------------

    def _make(self, lease: Lease, layer: str, template: Template) -> int:
        """Make an empty layer, and an overlay of it that nobody sees yet."""
        owner, place = _owner(lease), f"{lease.private}/{layer}"
        with full_disk_named(f"checkout {lease.id}"):
            try:
                os.mkdir(place, 0o700)
            except FileExistsError:  # what was half made
                self._discard(lease, layer)
                os.mkdir(place, 0o700)
            os.mkdir(f"{place}/upper", 0o755)
            os.mkdir(f"{place}/work", 0o700)
            if owner != self._me:
                os.chown(f"{place}/upper", *owner)
        return self._mount(lease, layer, template)

    def _attach_next(self, lease: Lease, mount: int) -> None:
        """Put the next layer in the place of the one there is.

        The old tree is held until the client has its answer: to tear one down takes 15 ms where
        5,000 files were looked at.
        """
        old = os.open(lease.tree_path, os.O_PATH | os.O_CLOEXEC)
        self._mounter.replace(lease.id, mount)
        self._discard(lease, _LAYER, holding=old)
        os.rename(lease.private / _NEXT, lease.private / _LAYER)

    def _discard(self, lease: Lease, layer: str, *, holding: int | None = None) -> None:
        old, held = new_trash(lease.private), [holding] if holding is not None else []
        with suppress(FileNotFoundError):
            os.rename(lease.private / layer, old)

        def remove() -> bool:
            if held:
                os.close(held.pop())
            return remove_layer(old)

        self._trash.add(old, take_down=partial(self._trash.in_thread, remove))

    def _mount_again(self, lease: Lease, template: Template) -> None:
        """Mount the layer that is there. A volatile overlay's work directory cannot be used twice."""
        self._mounter.umount(lease.id)
        work = lease.private / _LAYER / "work"
        self._discard(lease, f"{_LAYER}/work")
        work.mkdir(mode=0o700)
        with opened(self._mount(lease, _LAYER, template)) as mount:
            self._mounter.attach(lease.id, mount)
        log.info("checkout.remounted", checkout=lease.id)

    def _mount(self, lease: Lease, layer: str, template: Template) -> int:
        layers = tuple(str(path).removeprefix(self._store) for path in template.layers)
        owner = _owner(lease)
        return self._mounter.make(
            OverlayOrder(lease.id, layer, layers, None if owner == self._me else owner)
        )

    # -- owners -------------------------------------------------------------------------------------------------------

    def _must_serve(self, owner: Owner) -> None:
        if owner != self._me and not self._may_map_owners:
            raise BackendUnavailableError(
                f"cannot give an overlay checkout to uid {owner[0]}: this host has no idmapped mounts for it",
                hint="use the pool backend; Linux 5.19 and newer have them on ext4, xfs and btrfs",
            )

    async def _map_owner(self, owner: Owner) -> None:
        """The first time takes a fork of this process: 10 to 34 ms, in a thread."""
        if owner == self._me or self._mounter.is_mapped(owner):
            return
        async with self._mapping:
            if not self._mounter.is_mapped(owner):
                await anyio.to_thread.run_sync(self._mounter.map_owner, owner)


def _remove_public(public: Path) -> bool:
    """Remove the mount point with its directory; False for a tree that another backend made."""
    for directory in (public / "tree", public):
        try:
            os.rmdir(directory)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                return False
            if error.errno != errno.ENOENT:
                raise
    return True


def remove_layer(layer: Path) -> bool:
    """Remove a layer to which its owner wrote nothing, but the `.git` of a `git status`."""
    try:
        for upper in (f"{layer}/upper/.git", f"{layer}/upper"):
            with suppress(FileNotFoundError):
                os.rmdir(upper)
        # what overlayfs leaves in a volatile work directory (Linux 6.18)
        with suppress(FileNotFoundError):
            os.unlink(f"{layer}/work/work/incompat/volatile/dirty")
        for below in ("work/work/incompat/volatile", "work/work/incompat", "work/work", "work", ""):
            with suppress(FileNotFoundError):
                os.rmdir(layer / below)
    except OSError:
        return False
    return True


def remove_untouched(private: Path) -> bool:
    """Remove the private directory of a checkout to which its owner wrote nothing."""
    if not remove_layer(private / "layer"):
        return False
    try:
        with suppress(FileNotFoundError):
            os.unlink(private / "lease.json")
        with suppress(FileNotFoundError):
            os.rmdir(private)
    except OSError:
        return False
    return True


def _owner(lease: Lease) -> Owner:
    return lease.owner_uid, lease.owner_gid


def _prove(head: str, template: Template, sight: TemplateFacts, to: Lease) -> Proof:
    proof = Proof(
        head=head,
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
    return must_prove(proof, head=template.head, tree=to.tree)


def _read_head(mount: int) -> str:
    """What HEAD says in an overlay."""
    try:
        with opened(open_child(mount, b".git")) as git, opened(open_regular(git, b"HEAD")) as head:
            return os.read(head, 64).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise ProofFailedError(
            f"cannot prove the checkout clean: its HEAD cannot be read: {error}",
            hint="audit the mirror",
        ) from error


_CHECKSUM_BYTES = 20


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """`index` is the checksum at the end of the index; `packs` and `refs` are names."""

    index: str
    control_files: int
    packs: tuple[str, ...]
    refs: tuple[str, ...]


def look_at(layers: tuple[Path, ...]) -> TemplateFacts:
    """Look through the stack, top first; the layers with a `.git` are the index layer and the sealed store."""
    stores = [layer / ".git" for layer in layers if (layer / ".git").is_dir()]
    files = {
        path.relative_to(store): path
        for store in reversed(stores)
        for path in store.rglob("*")
        if path.is_file()
    }
    index = files[Path("index")].read_bytes()[-_CHECKSUM_BYTES:].hex()
    packs = sorted(path.name for path in files if path.suffix == ".pack")
    return TemplateFacts(index, len(files), tuple(packs), tuple(_refs(files)))


def _refs(files: dict[Path, Path]) -> list[str]:
    lines = (
        files[Path("packed-refs")]
        .read_text(encoding="utf-8", errors="surrogateescape")
        .splitlines()
    )
    return sorted(line.partition(" ")[2] for line in lines if line and line[0] not in "#^")
