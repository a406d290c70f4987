"""Layers: what forks, snapshots, grades and prepared layers have over their commits.

A layer is a directory `templates/.layers/<id>` in the form of overlayfs's upper layers: changed
files, directories, and a whiteout (a character device 0/0) for each path that the layer removes.
The daemon owns its files, which never change. It is kept while a lease or the record of a prepared
layer refers to it.
"""

import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Set
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ..errors import (
    SnapshotExistsError,
    SnapshotNotFoundError,
    TooManySnapshotsError,
    full_disk_named,
)
from ..host.files import (
    CREATE,
    make_whiteout,
    open_child,
    open_directory,
    open_regular,
    opened,
    write_all,
)
from ..host.processes import ActingAs
from ..host.trash import Trash, TrashDirectory, new_trash
from ..model import CheckoutId, LayerId, new_layer_id, shown
from ..trees.manifest import (
    DIRECTORY,
    NO_OBJECT,
    SUBMODULE,
    SYMLINK,
    Entry,
    Manifest,
    blob_id,
    clock_ns,
)
from ..trees.reader import TreeReader, file_id, open_top, parents
from ..trees.writer import TreeWriter
from .backend import CheckoutBackend, CopyRule, Taken
from .leases import Lease, Leases, SavedLayer, SavedState

_LAYERS = ".layers"  # below `templates`, which the mounter shows to each owner as its own


def layer_path(state_dir: Path, layer: LayerId) -> Path:
    return state_dir / "templates" / _LAYERS / layer


def objects_path(state_dir: Path, mirror: Path, tree: str, saved: SavedLayer | None) -> Path:
    """Return the repository with the base objects of a checkout: its mirror, or that of its
    prepared layer, which borrows from the mirror.
    """
    if saved is None or saved.tree == tree:
        return mirror
    return layer_path(state_dir, saved.id).with_suffix(".git")


class Layers:
    """The layers of a state directory, counted by its `leases`. Belongs to the event loop."""

    def __init__(self, state_dir: Path, leases: Leases, trash: Trash) -> None:
        self.directory = state_dir / "templates" / _LAYERS
        self._leases = leases
        self._trash = trash

    def open(self) -> None:
        """Remove unused layers; call once, after leases and prepared layers were read.

        Where one could not be read, the layers that it needs are unknown, and all stay.
        """
        if not self._leases.knows_all:
            return
        with suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                if not self._leases.layers[LayerId(path.name.partition(".")[0])]:
                    self._trash.add(path)

    def path(self, layer: LayerId) -> Path:
        return self.directory / layer

    @contextmanager
    def making(self) -> Iterator[Path]:
        """Yield a path to make a new layer at. At the end it is removed unless a lease refers to
        it; until then it is kept, also where a backend that failed cleans up before the next one.
        """
        layer = new_layer_id()
        self.directory.mkdir(mode=0o700, exist_ok=True)  # not in `open`: a start needs no room
        self._leases.layers[layer] += 1
        try:
            yield self.path(layer)
        finally:
            self._leases.layers[layer] -= 1
            self.drop_unused([layer])

    @contextmanager
    def held(self, layer: LayerId | None) -> Iterator[Path | None]:
        """Keep a layer meanwhile; yield its path, or None if no lease refers to it."""
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
        """Remove those of the layers that no lease refers to; the next start removes the others."""
        if not self._leases.knows_all:
            return
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


# -- forks and snapshots ---------------------------------------------------------------------------

SNAPSHOTS_LIMIT = 128
_LATEST_MAX = 4096


@dataclass(eq=False, repr=False)
class Forks:
    """Forks and snapshots of checkouts; the caller holds the checkout's lock."""

    leases: Leases
    layers: Layers
    backend_of: Callable[[Lease], CheckoutBackend]

    def __post_init__(self) -> None:
        # the last copy of each checkout, and of its environment
        self._latest: dict[tuple[CheckoutId, CopyRule], LayerId] = {}

    @asynccontextmanager
    async def source(self, lease: Lease, name: str | None) -> AsyncIterator[SavedState]:
        """Yield the state to fork: a snapshot, or a copy of the present one. The layers of a copy
        are removed at the end unless a lease refers to them.
        """
        if name is not None:
            yield self.get(lease, name)
            return
        async with AsyncExitStack() as stack:
            layer, taken = await stack.enter_async_context(self._copied(lease, CopyRule()))
            environment_layer = None
            if lease.base.environment is not None:
                copied = self._copied(lease, CopyRule(of_environment=True))
                environment_layer, beside = await stack.enter_async_context(copied)
                taken = taken.plus(beside)
            yield SavedState(
                name="",
                base=replace(lease.base, layer=layer, environment_layer=environment_layer),
                taken_at=taken.taken_at,
                files=taken.files,
                size_bytes=taken.size_bytes,
                left_out=taken.left_out,
                git=taken.git,
            )

    @asynccontextmanager
    async def _copied(self, lease: Lease, what: CopyRule) -> AsyncIterator[tuple[LayerId, Taken]]:
        """Yield a layer with a copy of a checkout: the last one if nothing changed since."""
        latest = self._latest.get((lease.id, what))
        with self.layers.held(latest) as earlier, self.layers.making() as new:
            taken = await self.backend_of(lease).copy_layer(lease, new, earlier, what)
            layer = latest if latest and taken.is_same else LayerId(new.name)
            if len(self._latest) >= _LATEST_MAX:
                self._latest.clear()
            self._latest[lease.id, what] = layer
            yield layer, taken

    async def make(self, lease: Lease, name: str | None) -> SavedState:
        """Save the present state under a name, by default `s1`, `s2` and so on."""
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
            self.leases.save(replace(lease, snapshots=(*lease.snapshots, made)))
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
        """Remove a snapshot, and its layer if no other lease refers to it."""
        gone = self.get(lease, name)
        left = tuple(each for each in lease.snapshots if each is not gone)
        self.leases.save(replace(lease, snapshots=left))
        self.layers.drop_unused(gone.base.own_layers)


# -- writing a layer from files in memory ----------------------------------------------------------

LayerFile = tuple[bytes, int | None, bytes]
"""Path, git's mode (None for a removed path), and the bytes as a work tree has them."""


def write_layer(
    directory: Path, names_in: Callable[[bytes], Collection[bytes]], files: Iterable[LayerFile]
) -> None:
    """Write `files` as a layer into the new `directory`.

    `names_in` returns the names in a directory of the base tree, none if it has no such directory.
    As in git, a directory that loses all its names is removed.
    """
    present: dict[bytes, tuple[int, bytes]] = {}
    removed: set[bytes] = set()
    for path, mode, data in files:
        if mode is None:
            removed.add(path)
        else:
            present[path] = mode, data
    directories = {above for path in present for above in parents(path)}
    hidden = _hidden(removed, names_in, present.keys(), directories)
    directories |= {above for path in hidden for above in parents(path)}
    directories |= {path for path, (mode, _) in present.items() if mode in (SUBMODULE, DIRECTORY)}
    top, links = os.fsencode(directory) + b"/", dict[bytes, bytes]()
    with full_disk_named("a layer"):
        directory.mkdir(mode=0o755)
        for path in sorted(directories):
            os.mkdir(top + path, 0o755)
        for path, (mode, data) in present.items():
            if mode == SYMLINK:
                links[path] = data
            elif mode not in (SUBMODULE, DIRECTORY):
                with opened(os.open(top + path, CREATE, 0o755 if mode & 0o100 else 0o644)) as file:
                    if data:
                        write_all(file, data)
        for path in hidden:
            make_whiteout(None, top + path)
        for path, target in links.items():  # last: plain paths above lead through none
            os.symlink(target, top + path)


def _hidden(
    removed: Iterable[bytes],
    names_in: Callable[[bytes], Collection[bytes]],
    files: Set[bytes],
    directories: Set[bytes],
) -> set[bytes]:
    """Return the removed paths that need a whiteout: paths of the base that the layer does not
    hide otherwise. A directory that loses all its names replaces them.
    """
    hidden = set[bytes]()
    for path in removed:
        above, _, name = path.rpartition(b"/")
        is_free = path not in files and path not in directories
        if is_free and name in names_in(above) and files.isdisjoint(parents(path)):
            hidden.add(path)
    for above in sorted({each for path in hidden for each in parents(path)}, reverse=True):
        inside = {above + b"/" + name for name in names_in(above)}
        if above not in directories and inside <= hidden:
            hidden = {*(hidden - inside), above}
    return hidden


# -- laying a layer on a plain tree ----------------------------------------------------------------

_BATCH = 64


class _LayerPath(NamedTuple):
    """One path of a layer; `file` is the descriptor of a regular file."""

    path: bytes
    found: os.stat_result
    attributes: dict[str, bytes]
    target: bytes = b""
    file: int = -1


def lay(layer: Path, tree: Path, owner: tuple[int, int], trash: TrashDirectory) -> None:
    """Write the content of a layer into a clean tree, as new files of the tree's owner."""
    with (
        opened(open_top(tree)) as root,
        TreeWriter(root, ActingAs(owner), mtime_ns=time.time_ns(), trash=trash) as writer,
    ):
        directories: list[_LayerPath] = []
        pieces = _iter_pieces(layer)
        while batch := list(islice(pieces, _BATCH)):
            try:
                with writer.owner:  # once per batch; the owner may not read the layer
                    for piece in batch:
                        _put(writer, piece)
            finally:
                for piece in batch:
                    if piece.file >= 0:
                        os.close(piece.file)
            directories += [piece for piece in batch if stat.S_ISDIR(piece.found.st_mode)]
        for piece in reversed(directories):  # writing into one changed its times
            permissions = stat.S_IMODE(piece.found.st_mode)
            writer.finish_directory(
                piece.path, permissions, piece.found.st_mtime_ns, piece.attributes
            )
            if permissions & stat.S_IRWXU != stat.S_IRWXU:  # opening it may have changed them
                os.chmod(layer / os.fsdecode(piece.path), permissions)


def with_layers(clean: Manifest, layers: Iterable[Path], tree: Path) -> Manifest:
    """Return the manifest of a clean tree on which layers were just laid, the lowest first."""
    files, touched = clean.files.copy(), set[bytes]()
    for layer in layers:
        for piece in _iter_pieces(layer):
            try:
                entry = _entry_of(piece)
            finally:
                if piece.file >= 0:
                    os.close(piece.file)
            before = files.get(piece.path)
            if before and before.is_directory and not (entry and entry.is_directory):
                for path in [each for each in files if each.startswith(piece.path + b"/")]:
                    del files[path]
            if entry is not None:
                files[piece.path] = entry
            elif before:
                del files[piece.path]
            touched |= {piece.path, *parents(piece.path), b""}
    recorded_ns = clock_ns()
    acting = ActingAs(clean.owner)
    with opened(open_top(tree)) as root, acting, TreeReader(root, acting) as reader:
        for path in touched & files.keys():
            if (seen := reader.find_stat(path)) is not None:
                files[path] = files[path].with_stat(seen)
    return replace(clean, files=files, recorded_ns=recorded_ns)


def _entry_of(piece: _LayerPath) -> Entry | None:
    """Return the manifest's entry of a path of a layer, without a stat; None for a whiteout."""
    if is_whiteout(piece.found):
        return None
    mode, content = DIRECTORY, NO_OBJECT
    if piece.file >= 0:
        mode = 0o100755 if piece.found.st_mode & 0o100 else 0o100644
        content = file_id(piece.file)
    elif stat.S_ISLNK(piece.found.st_mode):
        mode, content = SYMLINK, blob_id(piece.target)
    return Entry(mode, NO_OBJECT, content)


def is_whiteout(found: os.stat_result) -> bool:
    """Return whether a path of a layer hides the one in the layers below."""
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def read_attributes(file: int) -> dict[str, bytes]:
    """Return the extended attributes that a user may set."""
    return {
        name: os.getxattr(file, name) for name in os.listxattr(file) if name.startswith("user.")
    }


def _iter_pieces(layer: Path) -> Iterator[_LayerPath]:
    with opened(open_directory(layer)) as root, TreeReader(root, ActingAs(None)) as reader:
        for path, found in iter_below(reader):
            directory, name = reader.locate(path)
            if stat.S_ISREG(found.st_mode):
                file = open_regular(directory, name)
                yield _LayerPath(path, found, read_attributes(file), file=file)
            elif stat.S_ISDIR(found.st_mode):
                with opened(open_child(directory, name)) as fd:
                    yield _LayerPath(path, found, read_attributes(fd))
            elif stat.S_ISLNK(found.st_mode):
                yield _LayerPath(path, found, {}, target=os.readlink(name, dir_fd=directory))
            else:
                yield _LayerPath(path, found, {})


def iter_below(reader: TreeReader) -> Iterator[tuple[bytes, os.stat_result]]:
    """Iterate over all paths of a layer, a directory before its content."""
    for name in reader.names_in(b""):
        yield from reader.iter_stats_below(name)


def _put(writer: TreeWriter, piece: _LayerPath) -> None:
    mtime_ns, permissions = piece.found.st_mtime_ns, stat.S_IMODE(piece.found.st_mode)
    if piece.file >= 0:
        writer.copy_file(
            piece.path,
            piece.file,
            permissions=permissions,
            mtime_ns=mtime_ns,
            attributes=piece.attributes,
        )
    elif stat.S_ISDIR(piece.found.st_mode):
        writer.make_directory(piece.path)
    elif stat.S_ISLNK(piece.found.st_mode):
        writer.write_symlink(piece.path, piece.target, mtime_ns=mtime_ns)
    elif is_whiteout(piece.found):
        writer.remove(piece.path)
