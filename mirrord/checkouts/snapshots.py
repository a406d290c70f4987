"""The layers there are: what forks, snapshots, grades and prepared layers have over their commits.

A layer is a directory `templates/.layers/<id>` in the form of overlayfs's upper layers: changed
files as they are, directories, and a whiteout (a character device 0/0) for each path that the base
has and the layer has not. Its files belong to the daemon, and nobody changes them. It lives while a
lease or the record of a prepared layer refers to it.
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

from ..errors import SnapshotExistsError, SnapshotNotFoundError, TooManySnapshotsError
from ..host.files import (
    CREATE,
    full_disk_named,
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
from .backend import CheckoutBackend, CopyRule, Taken
from .files.manifest import (
    DIRECTORY,
    NO_OBJECT,
    SUBMODULE,
    SYMLINK,
    Entry,
    Manifest,
    blob_id,
    clock_ns,
)
from .files.reader import TreeReader, file_id, open_top, parents
from .files.writer import TreeWriter
from .leases import Lease, Leases, SavedLayer, SavedState, base_of

_LAYERS = ".layers"  # below `templates`, which the mounter shows to other owners as theirs


def layer_path(state_dir: Path, layer: LayerId) -> Path:
    return state_dir / "templates" / _LAYERS / layer


def objects_path(state_dir: Path, mirror: Path, tree: str, saved: SavedLayer | None) -> Path:
    """A repository with the objects that a checkout's changes are relative to: its mirror, or that
    of its prepared layer, which borrows from the mirror.
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
        """Remove what nothing refers to; call once, when leases and prepared layers were read."""
        with suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                if not self._leases.layers[LayerId(path.name.partition(".")[0])]:
                    self._trash.add(path)

    def path(self, layer: LayerId) -> Path:
        return self.directory / layer

    @contextmanager
    def making(self) -> Iterator[Path]:
        """The path of a new layer, to be made there; removed at the end unless a lease refers to it
        by then.
        """
        layer = new_layer_id()
        # not at the start, which needs no room on a full disk
        self.directory.mkdir(mode=0o700, exist_ok=True)
        try:
            yield self.path(layer)
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


@dataclass(eq=False, repr=False)
class Forks:
    """Forks and snapshots of held checkouts, whose lock the caller holds."""

    leases: Leases
    layers: Layers
    backend_of: Callable[[Lease], CheckoutBackend]

    def __post_init__(self) -> None:
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
            base = base_of(lease) | {"layer": layer, "environment_layer": environment_layer}
            facts = taken._asdict()
            del facts["is_same"]
            yield SavedState(name="", **base, **facts)

    @asynccontextmanager
    async def _copied(self, lease: Lease, what: CopyRule) -> AsyncIterator[tuple[LayerId, Taken]]:
        """A layer with a part of a checkout, made now, or before where nothing changed since."""
        latest = self._latest.get((lease.id, what))
        with self.layers.held(latest) as earlier, self.layers.making() as new:
            taken = await self.backend_of(lease).copy_layer(lease, new, earlier, what)
            layer = latest if latest and taken.is_same else LayerId(new.name)
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
        """Forget a snapshot; its layer stays as long as a checkout is on it."""
        gone = self.get(lease, name)
        left = tuple(each for each in lease.snapshots if each is not gone)
        self.leases.save(replace(lease, snapshots=left))
        self.layers.drop_unused([gone.layer])


# -- layers by content: written from files in memory, and laid on a plain tree ---------------------

LayerFile = tuple[bytes, int | None, bytes]
"""Path, git's mode (None where the path is removed), and the bytes as a work tree has them."""


def write_layer(
    directory: Path, names_in: Callable[[bytes], Collection[bytes]], files: Iterable[LayerFile]
) -> None:
    """Write a layer into the new `directory`; a file of the base that `files` lacks stays.

    `names_in` answers the names in a directory of the base tree, none where it has no such
    directory: one that loses all of them goes, as git removes it. Nobody else enters a layer.
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
    """The removed paths that need a whiteout: those that the base has, and that no path of the
    layer hides. A directory that loses all its names stands for all in it.
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


# -- onto a plain tree -----------------------------------------------------------------------------

_BATCH = 64


class _Piece(NamedTuple):
    """One path of a layer; `file` is open where it is a regular file."""

    path: bytes
    found: os.stat_result
    attributes: dict[str, bytes]
    target: bytes = b""
    file: int = -1


def lay(layer: Path, tree: Path, owner: tuple[int, int], trash: TrashDirectory) -> None:
    """Write what a layer has into a clean tree, as new files of its owner's."""
    with (
        opened(open_top(tree)) as root,
        TreeWriter(root, ActingAs(owner), mtime_ns=time.time_ns(), trash=trash) as writer,
    ):
        directories: list[_Piece] = []
        pieces = _pieces(layer)
        while batch := list(islice(pieces, _BATCH)):
            try:
                with writer.owner:  # once for many: the owner may not read the layer
                    for piece in batch:
                        _put(writer, piece)
            finally:
                for piece in batch:
                    if piece.file >= 0:
                        os.close(piece.file)
            directories += [piece for piece in batch if stat.S_ISDIR(piece.found.st_mode)]
        for piece in reversed(directories):  # what was written in it changed its time
            permissions = stat.S_IMODE(piece.found.st_mode)
            writer.finish_directory(
                piece.path, permissions, piece.found.st_mtime_ns, piece.attributes
            )
            if permissions & stat.S_IRWXU != stat.S_IRWXU:  # which opening it may have changed
                os.chmod(layer / os.fsdecode(piece.path), permissions)


def with_layers(clean: Manifest, layers: Iterable[Path], tree: Path) -> Manifest:
    """The record of a clean tree on which layers were just laid, the lowest first."""
    files, touched = clean.files.copy(), set[bytes]()
    for layer in layers:
        for piece in _pieces(layer):
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


def _entry_of(piece: _Piece) -> Entry | None:
    """The record of a path of a layer, without a stat; None of a whiteout."""
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
    """Whether a layer hides a path of those below it."""
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def read_attributes(file: int) -> dict[str, bytes]:
    """The extended attributes that a user may set."""
    return {
        name: os.getxattr(file, name) for name in os.listxattr(file) if name.startswith("user.")
    }


def _pieces(layer: Path) -> Iterator[_Piece]:
    with opened(open_directory(layer)) as root, TreeReader(root, ActingAs(None)) as reader:
        for path, found in iter_below(reader):
            directory, name = reader.locate(path)
            if stat.S_ISREG(found.st_mode):
                file = open_regular(directory, name)
                yield _Piece(path, found, read_attributes(file), file=file)
            elif stat.S_ISDIR(found.st_mode):
                with opened(open_child(directory, name)) as fd:
                    yield _Piece(path, found, read_attributes(fd))
            elif stat.S_ISLNK(found.st_mode):
                yield _Piece(path, found, {}, target=os.readlink(name, dir_fd=directory))
            else:
                yield _Piece(path, found, {})


def iter_below(reader: TreeReader) -> Iterator[tuple[bytes, os.stat_result]]:
    """Every path of a layer, a directory before what is in it."""
    for name in reader.names_in(b""):
        yield from reader.iter_stats_below(name)


def _put(writer: TreeWriter, piece: _Piece) -> None:
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
