"""Survey a pooled checkout for the layer that a fork or a snapshot gets. Sync; runs in workers."""

import stat
from pathlib import Path

from ...errors import CheckoutBusyError
from ...host.credentials import ActingAs
from ...host.files import opened
from ..backend import CopyRule, Taken
from ..files.manifest import Manifest
from ..files.reader import TreeReader, open_top, parents
from ..files.scan import is_control, scan
from ..snapshots.copy import copy_layer
from ..snapshots.pieces import HIDDEN, Piece, Pieces, Where, hidden_by
from .worktree import PoolPaths, has_top


def copy_checkout(paths: PoolPaths, directory: Path, earlier: Path | None, what: CopyRule) -> Taken:
    """Write into the new `directory` what a checkout has over its clean state; `earlier` and `what`
    are as for `copy_layer`.

    Of a linked one without its `.git`, which is a part of the mirror.
    """
    if not has_top(paths.tree, paths.owner):
        raise CheckoutBusyError(
            "cannot copy the checkout: its top directory was replaced", hint="reset the checkout"
        )
    manifest, acting = Manifest.load(paths.base_manifest), ActingAs(paths.owner)
    is_linked = paths.store is None

    def survey() -> Pieces:
        found = scan(paths.tree, manifest)
        pieces: Pieces = {}
        with acting:
            _add_known(reader, manifest, {*found.modified, *found.missing} - {b""}, pieces)
            for path in found.extra:
                _add_whole(reader, path, pieces)
            for above in {above for path in pieces for above in parents(path)} - pieces.keys():
                if (seen := reader.find_stat(above)) is not None:
                    pieces[above] = Piece.of(Where.CLIENT, seen)
        if is_linked:
            return {path: piece for path, piece in pieces.items() if not is_control(path)}
        return pieces

    with opened(open_top(paths.tree)) as root, TreeReader(root, acting) as reader:
        taken = copy_layer(directory, survey, reader, acting, what, earlier=earlier)
    return taken._replace(git=taken.git and not is_linked)


def _add_known(
    reader: TreeReader, manifest: Manifest, differing: set[bytes], pieces: Pieces
) -> None:
    """Add what became of paths that the manifest has; all that is lost below one with it."""
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
