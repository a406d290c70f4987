"""The layers there are: what forks, snapshots, grades and prepared layers have over their commits.

A layer is a directory `templates/.layers/<id>` in the form of overlayfs's upper layers: changed
files as they are, directories, and a whiteout (a character device 0/0) for each path that the base
has and the layer has not. Its files belong to the daemon, and nobody changes them. It lives while a
lease or the record of a prepared layer refers to it; else it is removed, by the next start too.

A snapshot is a layer with a name in the lease, and goes with it. A fork is a lease of its own on
such a layer, or on one that is made for it.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...errors import SnapshotExistsError, SnapshotNotFoundError, TooManySnapshotsError
from ...host.trash import Trash, new_trash
from ...model import CheckoutId, LayerId, new_layer_id, shown
from ..backend import CheckoutBackend, CopyRule, Taken
from ..leases import Lease, Leases, SavedLayer, SavedState

DIRECTORY = ".layers"
"""Below `templates`, which the mounter shows to other owners as theirs."""


def layer_path(state_dir: Path, layer: LayerId) -> Path:
    return state_dir / "templates" / DIRECTORY / layer


def objects_path(state_dir: Path, mirror: Path, tree: str, saved: SavedLayer | None) -> Path:
    """A repository with the objects that a checkout's changes are relative to: its mirror, or that
    of its prepared layer, which borrows from the mirror.
    """
    if saved is None or saved.tree == tree:
        return mirror
    return layer_path(state_dir, saved.id).with_suffix(".git")


class NewLayer(NamedTuple):
    """A layer to be written: `path` does not exist yet."""

    id: LayerId
    path: Path


class Layers:
    """The layers of a state directory, counted by its `leases`. Belongs to the event loop."""

    def __init__(self, state_dir: Path, leases: Leases, trash: Trash) -> None:
        self.directory = state_dir / "templates" / DIRECTORY
        self._state = state_dir
        self._leases = leases
        self._trash = trash

    def open(self) -> None:
        """Remove what nothing refers to; call once, when leases and prepared layers were read."""
        with suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                if not self._leases.layers[LayerId(path.name.partition(".")[0])]:
                    self._trash.add(path)

    def path(self, layer: LayerId) -> Path:
        return layer_path(self._state, layer)

    @contextmanager
    def making(self) -> Iterator[NewLayer]:
        """A new layer, removed at the end unless a lease refers to it by then."""
        layer = new_layer_id()
        # not at the start, which needs no room on a full disk
        self.directory.mkdir(mode=0o700, exist_ok=True)
        try:
            yield NewLayer(layer, self.path(layer))
        finally:
            self.drop_unused([layer])

    @contextmanager
    def held(self, layer: LayerId | None) -> Iterator[Path | None]:
        """Keep a layer for a while; its path, or None where no lease refers to it any more."""
        if layer is None or self._leases.layers[layer] <= 0:
            yield None
            return
        self._leases.layers[layer] += 1
        try:
            yield self.path(layer)
        finally:
            self._leases.layers[layer] -= 1
            self.drop_unused([layer])

    def drop_unused(self, layers: Iterable[LayerId]) -> None:
        """Remove those of the layers that no lease refers to any more."""
        for layer in layers:
            if self._leases.layers[layer] <= 0:
                del self._leases.layers[layer]
                path = self.path(layer)
                for each in (path, path.with_suffix(".git")):
                    gone = new_trash(path.parent)
                    with suppress(FileNotFoundError):
                        each.rename(gone)
                        self._trash.add(gone)
                self._trash.remove(path.with_suffix(".stats"))


# -- forks and snapshots of held checkouts ---------------------------------------------------------

SNAPSHOTS_LIMIT = 128
_LATEST_MAX = 4096


class Forks:
    """Forks and snapshots of held checkouts, whose lock the caller holds."""

    def __init__(
        self, leases: Leases, layers: Layers, backend_of: Callable[[Lease], CheckoutBackend]
    ) -> None:
        self._leases = leases
        self._layers = layers
        self._backend_of = backend_of
        # what was copied last of a checkout, or of its environment
        self._latest: dict[tuple[CheckoutId, CopyRule], LayerId] = {}

    @asynccontextmanager
    async def source(self, lease: Lease, name: str | None) -> AsyncIterator[SavedState]:
        """What a fork is made of: a snapshot, or the tree as it is. Its layer is removed at the end
        unless a lease refers to it by then.
        """
        if name is not None:
            yield self.get(lease, name)
            return
        async with AsyncExitStack() as stack:
            layer, taken = await stack.enter_async_context(self._copied(lease, CopyRule()))
            environment_layer = None
            if lease.environment is not None:
                copied = self._copied(lease, CopyRule(of_environment=True))
                environment_layer, beside = await stack.enter_async_context(copied)
                taken = taken.plus(beside)
            yield SavedState(
                name="",
                layer=layer,
                commit=lease.commit,
                tree=lease.tree,
                instance=lease.instance,
                dataset=lease.dataset,
                taken_at=taken.at,
                files=taken.files,
                size_bytes=taken.size_bytes,
                left_out=taken.left_out,
                git=taken.git,
                saved=lease.saved,
                environment=lease.environment,
                environment_layer=environment_layer,
            )

    @asynccontextmanager
    async def _copied(self, lease: Lease, what: CopyRule) -> AsyncIterator[tuple[LayerId, Taken]]:
        """A layer with a part of a checkout, made now, or before where nothing changed since."""
        latest = self._latest.get((lease.id, what))
        with self._layers.held(latest) as earlier, self._layers.making() as new:
            taken = await self._backend_of(lease).copy_layer(lease, new.path, earlier, what)
            layer = latest if latest and taken.is_same else new.id
            if len(self._latest) >= _LATEST_MAX:
                self._latest.clear()
            self._latest[lease.id, what] = layer
            yield layer, taken

    async def make(self, lease: Lease, name: str | None) -> SavedState:
        """Keep the tree as it is under a name, by default a new one."""
        names = {snapshot.name for snapshot in lease.snapshots}
        if name in names:
            raise SnapshotExistsError(
                f"cannot make snapshot {name}: checkout {lease.id} has one of this name",
                hint="remove it first, or choose another name",
            )
        if len(names) >= SNAPSHOTS_LIMIT:
            raise TooManySnapshotsError(
                f"cannot make a snapshot: checkout {lease.id} has {SNAPSHOTS_LIMIT}",
                hint="remove some, or fork the checkout",
                max=SNAPSHOTS_LIMIT,
            )
        numbers = (f"s{number}" for number in range(1, len(names) + 2))
        async with self.source(lease, None) as source:
            made = replace(source, name=name or next(each for each in numbers if each not in names))
            self._leases.save(replace(lease, snapshots=(*lease.snapshots, made)))
        return made

    def get(self, lease: Lease, name: str) -> SavedState:
        for snapshot in lease.snapshots:
            if snapshot.name == name:
                return snapshot
        raise SnapshotNotFoundError(
            f"cannot find snapshot {shown(name)}: checkout {lease.id} has none of this name",
            hint=f"see `mirrord snapshots {lease.id}`",
        )

    def remove(self, lease: Lease, name: str) -> None:
        """Forget a snapshot; its layer stays as long as a checkout is on it."""
        gone = self.get(lease, name)
        left = tuple(each for each in lease.snapshots if each is not gone)
        self._leases.save(replace(lease, snapshots=left))
        self._layers.drop_unused([gone.layer])
