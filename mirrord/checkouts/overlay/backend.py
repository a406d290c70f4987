"""The overlay backend: a checkout is one mount, a private layer over its template's layers.

`checkouts/<id>/tree` is the mount point, `leases/<id>/layer/` has `upper`, what the client wrote,
and overlayfs's `work`; a lease's own layer comes between the two. A warm checkout is six mkdirs and
a mount. A reset makes another layer, proves its mount before that is attached anywhere, and swaps
it in: in one step, which containers that mounted `checkouts/<id>` follow. All that runs on the
event loop, where it takes less time than to start a thread; taking down waits for kernel and disk,
and runs in threads.

Mounts outlive the daemon. After a crash a lease is found mounted as it was; after a reboot its
layer is mounted again. `.trash-*` in a private directory is to be removed.
"""

import errno
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar

import anyio.to_thread

from ...errors import (
    BackendUnavailableError,
    MirrordError,
    PathNotFoundError,
    ProofFailedError,
    ResourceError,
)
from ...git.workers import Workers
from ...host.files import full_disk_named, open_child, open_directory, open_regular, opened
from ...host.mounting import Mounter, OverlayOrder
from ...host.mounts import read_overlays
from ...host.trash import Trash, find_trash, new_trash
from ...model import Backend, CheckoutId, MirrorName, Target
from ...protocol import Proof
from ...telemetry import log
from ..backend import DIFF_TIMEOUT, ChangedPaths, Taken, must_prove
from ..leases import Directories, Lease, Leases, LeaseState, resetting
from ..snapshots.layers import layer_path
from ..templates.store import Template, Templates, proven_at
from .changes import changed_paths
from .copying import copy_checkout

T = TypeVar("T")

_LAYER, _NEXT = "layer", "next"


class OverlayBackend:
    """Checkouts as overlay mounts. Belongs to the event loop's thread."""

    name = Backend.OVERLAY

    def __init__(
        self,
        state_dir: Path,
        mounter: Mounter,
        templates: Templates,
        workers: Workers,
        mirrors_path: Callable[[MirrorName], Path],
        trash: Trash,
        *,
        may_map_owners: bool,
    ) -> None:
        self._state = state_dir
        self._store = f"{state_dir}/templates/"
        self._leases = state_dir / "leases"
        self._mounter = mounter
        self._templates = templates
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._may_map_owners = may_map_owners
        self._trash = trash
        self._me = (os.geteuid(), os.getegid())
        self._held: dict[CheckoutId, Template] = {}
        self._facts: dict[tuple[tuple[Path, ...], int], TemplateFacts] = {}
        self._mapping = anyio.Lock()
        self._mounted: set[str] = set()

    async def open(self) -> None:
        """Read which overlays are mounted."""
        self._mounted = await anyio.to_thread.run_sync(read_overlays)

    async def close(self) -> None:
        is_leased = any(not path.name.startswith(".") for path in self._leases.iterdir())
        self._mounter.close(unbind=not is_leased)

    async def create(self, lease: Lease) -> tuple[str, dict[str, float]]:
        began = time.perf_counter()

        async def mount_layer(template: Template) -> tuple[str, dict[str, float]]:
            ready = time.perf_counter()
            with full_disk_named(f"checkout {lease.id}"), suppress(FileExistsError):
                os.mkdir(lease.tree_path, 0o700)  # nobody enters it while nothing is mounted there
            with opened(self._make(lease, _LAYER, template)) as mount:
                self._mounter.attach(lease.id, mount)
            mounted_s = time.perf_counter() - ready
            timings = {"template": round(ready - began, 6), "mount": round(mounted_s, 6)}
            return template.tree, timings

        return await self._with_template(lease, mount_layer)

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """Swap a new layer in. A failure before that leaves the old tree untouched."""
        await self._trash.keep_up()

        async def swap_in(template: Template) -> Proof:
            # evicted and built again, it may have other packs: another inode
            key = template.layers, os.stat(template.layers[1]).st_ino
            if key not in self._facts:
                found = await anyio.to_thread.run_sync(read_facts, template.layers)
                if len(self._facts) >= 4096:
                    self._facts.clear()
                self._facts[key] = found
            facts = self._facts[key]
            before = leases.get(to.id)
            leases.save(resetting(to))
            try:
                mount = self._make(to, _NEXT, template)
                try:
                    proof = _prove(mount, template, facts, to, self._layer_of(to))
                except BaseException:
                    os.close(mount)
                    raise
            except BaseException:
                leases.save(before)
                raise
            with opened(mount):
                # Held until the client has its answer: the kernel takes 15 ms to tear down a tree
                # in which 5,000 files were looked at.
                old = os.open(to.tree_path, os.O_PATH | os.O_CLOEXEC)
                self._mounter.replace(to.id, mount)
                self._discard(to, _LAYER, holding=old)
                os.rename(to.private / _NEXT, to.private / _LAYER)
            leases.save(to)
            return proof

        return await self._with_template(to, swap_in)

    async def adopt(self, lease: Lease) -> bool:
        is_mounted = str(lease.tree_path) in self._mounted
        self._mounted.discard(str(lease.tree_path))
        for old in find_trash(lease.private):
            self._trash.add(old)

        async def mount_again(template: Template) -> None:
            if is_mounted or lease.state is not LeaseState.LIVE:
                return
            self._mounter.umount(lease.id)
            # the work directory of a volatile overlay cannot be used twice
            self._discard(lease, f"{_LAYER}/work")
            os.mkdir(lease.private / _LAYER / "work", 0o700)
            with opened(self._mount(lease, _LAYER, template)) as mount:
                self._mounter.attach(lease.id, mount)
            log.info("checkout.remounted", checkout=lease.id)

        try:
            await self._with_template(lease, mount_again)
        except (MirrordError, OSError) as error:
            facts = {"mounted": is_mounted, "error": str(error)}
            log.warning("checkout.orphaned", checkout=lease.id, **facts)
            return is_mounted
        return True

    async def take_down(self, directories: Directories, lease: Lease | None) -> bool:
        def unmount() -> bool:
            self._mounter.umount(directories.public.name)
            return _remove(directories)

        try:
            return await self._trash.in_thread(unmount)
        finally:
            if lease is not None and (template := self._held.pop(lease.id, None)):
                self._templates.drop(template)

    async def template_proven_at(self, lease: Lease) -> datetime | None:
        template = self._held.get(lease.id)
        return await anyio.to_thread.run_sync(proven_at, template) if template else None

    async def copy_layer(self, lease: Lease, directory: Path, earlier: Path | None) -> Taken:
        template = self._held.get(lease.id)
        return await self._workers.run(
            copy_checkout,
            directory,
            lease.tree_path,
            lease.private / _LAYER / "upper",
            self._layer_of(lease),
            template.layers if template else (),
            lease.owner,
            earlier,
            timeout=DIFF_TIMEOUT,
        )

    def clone(self, lease: Lease, target: Target) -> int:
        try:
            return self._mounter.clone(lease.id, target, lease.owner)
        except FileNotFoundError as error:
            raise PathNotFoundError(
                f"cannot attach the {target} of checkout {lease.id}: it has none",
                hint="ask for a checkout with an environment",
            ) from error

    def changed_paths(self, lease: Lease) -> ChangedPaths:
        template = self._held.get(lease.id)
        return partial(
            changed_paths,
            lease.tree_path,
            lease.private / _LAYER / "upper",
            self._layer_of(lease),
            template.layers if template else (),
            self._mirrors_path(lease.mirror),
            lease.tree,
            lease.owner,
        )

    # -- templates ---------------------------------------------------------------------------------

    async def _with_template(self, lease: Lease, use: Callable[[Template], Awaitable[T]]) -> T:
        """Find or make the lease's template and `use` it; the lease holds it from now on.

        It may be evicted meanwhile, or deleted behind our back: the mount finds that out, and it is
        made again, once.
        """
        if lease.owner != self._me and not self._may_map_owners:
            raise BackendUnavailableError(
                f"cannot give an overlay checkout to uid {lease.owner_uid}: this host has no"
                " idmapped mounts for it",
                hint="use the pool backend; Linux 5.19 and newer have them on ext4, xfs and btrfs",
            )
        wanted = (lease.mirror, lease.commit, lease.history)
        for attempt in (1, 2):
            if lease.owner != self._me and not self._mounter.is_mapped(lease.owner):
                async with self._mapping:  # forks this process: 10 to 34 ms, in a thread
                    if not self._mounter.is_mapped(lease.owner):
                        await anyio.to_thread.run_sync(self._mounter.map_owner, lease.owner)
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

    # -- layers and mounts -------------------------------------------------------------------------

    def _make(self, lease: Lease, layer: str, template: Template) -> int:
        """Make an empty layer, and an overlay of it that is attached nowhere."""
        path = f"{lease.private}/{layer}"
        with full_disk_named(f"checkout {lease.id}"):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:  # half-made
                self._discard(lease, layer)
                os.mkdir(path, 0o700)
            os.mkdir(f"{path}/upper", 0o755)
            os.mkdir(f"{path}/work", 0o700)
            if lease.owner != self._me:
                os.chown(f"{path}/upper", *lease.owner)
        return self._mount(lease, layer, template)

    def _mount(self, lease: Lease, layer: str, template: Template) -> int:
        own = self._layer_of(lease)
        paths = (own, *template.layers) if own else template.layers
        layers = tuple(str(path).removeprefix(self._store) for path in paths)
        owner = None if lease.owner == self._me else lease.owner
        return self._mounter.make(OverlayOrder(lease.id, layer, layers, owner))

    def _layer_of(self, lease: Lease) -> Path | None:
        return layer_path(self._state, lease.layer) if lease.layer else None

    def _discard(self, lease: Lease, layer: str, *, holding: int | None = None) -> None:
        """Remove a layer later, and before that close the descriptor `holding`."""
        old, held = new_trash(lease.private), [holding] if holding is not None else []
        with suppress(FileNotFoundError):
            os.rename(lease.private / layer, old)

        def remove() -> bool:
            if held:
                os.close(held.pop())
            return remove_layer(old)

        self._trash.add(old, take_down=partial(self._trash.in_thread, remove))


def _remove(directories: Directories) -> bool:
    """Remove the directories of a checkout to which its owner wrote nothing."""
    is_gone = True
    for directory in (directories.public / "tree", directories.public):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            is_gone = False  # a tree that another backend made
    try:
        if not remove_layer(directories.private / _LAYER):
            return False
        with suppress(FileNotFoundError):
            os.unlink(directories.private / "lease.json")
        with suppress(FileNotFoundError):
            os.rmdir(directories.private)
    except OSError:
        return False
    return is_gone


def remove_layer(layer: Path) -> bool:
    """Remove a layer to which its owner wrote nothing, but the `.git` of a `git status`."""
    # what overlayfs leaves in a volatile work directory (Linux 6.18)
    dirty = "work/work/incompat/volatile/dirty"
    above = ("work/work/incompat/volatile", "work/work/incompat", "work/work", "work", "")
    try:
        for path in ("upper/.git", "upper", dirty, *above):
            with suppress(FileNotFoundError):
                (os.unlink if path is dirty else os.rmdir)(layer / path)
    except OSError:
        return False
    return True


class TemplateFacts(TypedDict):
    """What proofs say of a template's `.git`: the checksum at the end of the index, how many files
    there are, and the names of packs and refs.
    """

    index: str
    control_files: int
    packs: list[str]
    refs: list[str]


def read_facts(layers: tuple[Path, ...]) -> TemplateFacts:
    """Read the facts of an index layer over its sealed store; FileNotFoundError where one went."""
    index, store = (layer / ".git" for layer in layers[:2])
    files = {
        path.relative_to(git) for git in (store, index) for path in git.rglob("*") if path.is_file()
    }
    checksum = (index / "index").read_bytes()[-20:].hex()
    packed = (store / "packed-refs").read_text(encoding="utf-8", errors="surrogateescape")
    lines = [line for line in packed.splitlines() if line and line[0] not in "#^"]
    return TemplateFacts(
        index=checksum,
        control_files=len(files),
        packs=sorted(path.name for path in files if path.suffix == ".pack"),
        refs=sorted(line.partition(" ")[2] for line in lines),
    )


def _prove(
    mount: int, template: Template, facts: TemplateFacts, to: Lease, layer: Path | None
) -> Proof:
    """The proof that an overlay shows `to`, by its HEAD and the proven template below."""
    expected = str(template.head)
    method = "a fresh layer over a template that was verified by content"
    try:
        head = _read_head(mount)
        if layer is not None:
            method += ", under the layer of a snapshot"
            with suppress(FileNotFoundError), opened(open_directory(layer)) as own:
                expected = _read_head(own)
    except (OSError, ValueError) as error:
        raise ProofFailedError(
            f"cannot prove the checkout clean: its HEAD cannot be read: {error}",
            hint="audit the mirror",
        ) from error
    proof = Proof(
        **facts,
        head=head,
        tree=template.tree,
        files_checked=None,
        files_restored=None,
        files_removed=None,
        method=method,
    )
    return must_prove(proof, head=expected, tree=to.tree)


def _read_head(tree: int) -> str:
    with opened(open_child(tree, b".git")) as git, opened(open_regular(git, b"HEAD")) as fd:
        return os.read(fd, 512).decode("utf-8").strip()
