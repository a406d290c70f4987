"""A layer as files: written from memory, and laid on a plain tree."""

import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ..errors import full_disk_named
from ..git.modes import DIRECTORY, SUBMODULE, SYMLINK, file_mode
from ..host.files import (
    CREATE,
    list_attributes,
    make_whiteout,
    open_child,
    open_directory,
    open_regular,
    open_top,
    opened,
    write_all,
)
from ..host.processes import ActingAs
from ..host.trash import TrashDirectory
from .manifest import NO_OBJECT, Entry, Manifest, blob_id, clock_ns
from .reader import TreeReader, file_id, parents
from .relocation import Relocation
from .scan import is_control
from .writer import TreeWriter

# path, git's mode (None for a removed path), and the bytes as a work tree has them
LayerFile = tuple[bytes, int | None, bytes]


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
    # children before parents: a directory hidden here may be the last name of the one above
    for above in sorted({parent for path in hidden for parent in parents(path)}, reverse=True):
        inside = {above + b"/" + name for name in names_in(above)}
        if above not in directories and inside <= hidden:
            hidden = {*(hidden - inside), above}
    return hidden


# files held open at a time; the rights of the owner are taken once for all of them
_BATCH = 64


class _LayerPath(NamedTuple):
    """One path of a layer; `file` is the descriptor of a regular file."""

    path: bytes
    found: os.stat_result
    attributes: dict[str, bytes]
    target: bytes = b""
    file: int = -1


def _none(_path: bytes) -> bool:
    return False


def lay(
    layer: Path,
    tree: Path,
    owner: tuple[int, int],
    trash: TrashDirectory,
    *,
    skips: Callable[[bytes], bool] = _none,
    relocation: Relocation | None = None,
) -> None:
    """Write the content of a layer into a clean tree, as new files of the tree's owner."""
    with (
        opened(open_top(tree)) as root,
        TreeWriter(root, ActingAs(owner), mtime_ns=time.time_ns(), trash=trash) as writer,
    ):
        directories: list[_LayerPath] = []
        pieces = _iter_pieces(layer, skips, relocation)
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


def with_layers(
    clean: Manifest,
    layers: Iterable[Path],
    tree: Path,
    modules: Path | None = None,
    relocation: Relocation | None = None,
) -> Manifest:
    """Return the manifest of a clean tree on which layers were just laid, the lowest first; before
    them the submodules beside the `.git` of `modules`.
    """
    files, touched = clean.files.copy(), set[bytes]()
    for layer in (*filter(None, [modules]), *layers):
        for piece in _iter_pieces(layer, is_control if layer == modules else _none, relocation):
            try:
                entry = _entry_of(piece)
            finally:
                if piece.file >= 0:
                    os.close(piece.file)
            before = files.get(piece.path)
            if before and before.is_directory and not (entry and entry.is_directory):
                for path in [file for file in files if file.startswith(piece.path + b"/")]:
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
        mode = file_mode(piece.found.st_mode)
        content = file_id(piece.file)
    elif stat.S_ISLNK(piece.found.st_mode):
        mode, content = SYMLINK, blob_id(piece.target)
    return Entry(mode, NO_OBJECT, content)


def is_whiteout(st: os.stat_result) -> bool:
    """Return whether a path of a layer hides the one in the layers below."""
    return stat.S_ISCHR(st.st_mode) and st.st_rdev == 0


def read_attributes(file: int) -> dict[str, bytes]:
    """Return the extended attributes that a user may set; those of an overlay without root are
    the kernel's own.
    """
    return {
        name: os.getxattr(file, name)
        for name in list_attributes(file)
        if name.startswith("user.") and not name.startswith("user.overlay.")
    }


def _iter_pieces(
    layer: Path, skips: Callable[[bytes], bool], relocation: Relocation | None
) -> Iterator[_LayerPath]:
    with opened(open_directory(layer)) as root, TreeReader(root, ActingAs(None)) as reader:
        for path, piece in iter_below(reader):
            if skips(path):
                continue
            directory, name = reader.locate(path)
            if stat.S_ISREG(piece.st_mode):
                file = open_regular(directory, name)
                if relocation:
                    file = relocation.file(path, file)
                yield _LayerPath(path, piece, read_attributes(file), file=file)
            elif stat.S_ISDIR(piece.st_mode):
                with opened(open_child(directory, name)) as fd:
                    yield _LayerPath(path, piece, read_attributes(fd))
            elif stat.S_ISLNK(piece.st_mode):
                target = os.readlink(name, dir_fd=directory)
                yield _LayerPath(path, piece, {}, relocation.text(target) if relocation else target)
            else:
                yield _LayerPath(path, piece, {})


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
