"""What a pool tree has over its base, listed or copied; runs in workers, as the tree's owner.

It is found by comparison with the manifest: an lstat of every path.
"""

import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckoutBusyError
from ..host.files import open_top, opened
from ..host.processes import ActingAs, Owner
from ..trees.manifest import Manifest
from ..trees.pooled import has_top
from ..trees.reader import TreeReader, parents
from ..trees.relocation import Relocation
from ..trees.scan import is_control, scan
from .copying import copy_layer
from .pieces import HIDDEN, CopyRule, Piece, Pieces, Taken, Where, hidden_by


class PoolTree(NamedTuple):
    """A pool tree, or the prefix beside it, with the manifest of its base.

    A linked tree has its objects in the mirror. A layer of a prefix has its paths by `relocation`.
    """

    tree: Path
    manifest: Path
    owner: Owner
    is_linked: bool = False
    relocation: Relocation | None = None


def pool_changes(source: PoolTree) -> list[bytes]:
    """List the paths that may differ from the manifest; all, if the top directory was replaced."""
    tree, manifest = source.tree, Manifest.load(source.manifest)
    if not has_top(tree, manifest.owner):
        return sorted(filter(None, manifest.files))
    changed = {path for path in scan(tree, manifest).in_tree() if path}
    directories = [
        path for path in changed if path in manifest.files and manifest.files[path].is_directory
    ]
    if directories:
        # a directory that changed its owner counts as changed; look for what is new in it
        with (
            opened(open_top(tree)) as root,
            ActingAs(manifest.owner) as owner,
            TreeReader(root, owner) as reader,
        ):
            for directory in sorted(directories):
                st = reader.find_stat(directory)
                if st is not None and stat.S_ISDIR(st.st_mode):
                    # locked or removed meanwhile: the directory itself is in the list
                    with suppress(PermissionError, FileNotFoundError):
                        inside = (directory + b"/" + name for name in reader.names_in(directory))
                        changed |= {path for path in inside if path not in manifest.files}
    return sorted(changed)


def copy_pool(directory: Path, source: PoolTree, earlier: Path | None, what: CopyRule) -> Taken:
    """Copy what a checkout has over its base into the new layer `directory`; see `copy_layer`.

    The `.git` of a linked checkout belongs to the mirror and is not copied.
    """
    if not has_top(source.tree, source.owner):
        raise CheckoutBusyError(
            "cannot copy the checkout: its top directory was replaced", hint="reset the checkout"
        )
    manifest, acting = Manifest.load(source.manifest), ActingAs(source.owner)

    def survey() -> Pieces:
        differences = scan(source.tree, manifest)
        pieces: Pieces = {}
        with acting:
            # without the top, which a layer does not have
            _add_known(
                reader, manifest, {*differences.modified, *differences.missing} - {b""}, pieces
            )
            for path in differences.extra:
                _add_whole(reader, path, pieces)
            for above in {above for path in pieces for above in parents(path)} - pieces.keys():
                if (seen := reader.find_stat(above)) is not None:
                    pieces[above] = Piece.of(Where.CLIENT, seen)
        if source.is_linked:
            return {path: piece for path, piece in pieces.items() if not is_control(path)}
        return pieces

    with opened(open_top(source.tree)) as root, TreeReader(root, acting) as reader:
        taken = copy_layer(
            directory, survey, reader, acting, what,
            earlier=earlier, relocation=source.relocation,
        )  # fmt: skip
    return taken._replace(git=taken.git and not source.is_linked)


def _add_known(
    reader: TreeReader, manifest: Manifest, differing: set[bytes], pieces: Pieces
) -> None:
    """Add the present state of paths of the manifest; below a lost one all are lost."""
    entries = manifest.files | manifest.control
    lost = set[bytes]()
    for path in sorted(differing):
        if path.rpartition(b"/")[0] in lost:
            lost.add(path)
            continue
        seen = reader.find_stat(path)
        if seen is None:
            pieces[path] = HIDDEN
        elif stat.S_IFMT(seen.st_mode) in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            pieces[path] = Piece.of(Where.CLIENT, seen)
        else:
            pieces[path] = hidden_by(seen)
        if seen is None or not stat.S_ISDIR(seen.st_mode):
            lost.add(path)
            continue
        for name in reader.names_in(path):
            if path + b"/" + name not in entries:
                _add_whole(reader, path + b"/" + name, pieces)


def _add_whole(reader: TreeReader, path: bytes, pieces: Pieces) -> None:
    for below, seen in reader.iter_stats_below(path):
        pieces[below] = Piece.of(Where.CLIENT, seen)
