"""List the changes of an overlay checkout, by reading its upper layer. Sync; runs in workers.

A path that is not in the upper layer is unchanged. A directory there is either that of the layers
below with changes in it, or another one: new, made again, or renamed to here. Only CAP_SYS_ADMIN
may read the marks that tell, so its inode does: overlayfs shows that of the directory below. Costs
as much as was changed. Follows no link, enters no mount, and looks as the checkout's owner.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ...errors import CheckoutBusyError
from ...git.objects.trees import tree_entries
from ...host.credentials import ActingAs
from ...host.files import open_directory, opened
from ..files.reader import TreeReader
from ..files.scan import is_control
from ..patches.diff import denials_named
from ..templates.layers import parents


def changed_paths(
    tree: Path,
    upper: Path,
    layers: Sequence[Path],
    mirror: Path,
    tree_id: str,
    owner: tuple[int, int],
) -> list[bytes]:
    """Every path that may differ from the tree `tree_id`: those in the upper layer, and those that
    they hide.
    """
    with ExitStack() as stack, denials_named(owner):
        try:
            tops = [open_directory(tree)]
        except OSError as error:
            raise CheckoutBusyError(
                f"cannot open the checkout's directory: {error.strerror}", hint="reset the checkout"
            ) from error
        tops += [open_directory(layer) for layer in (upper, *layers)]
        for top in tops:
            stack.enter_context(opened(top))
        acting = stack.enter_context(ActingAs(owner))
        merged, written, *below = (stack.enter_context(TreeReader(top, acting)) for top in tops)
        differing, replaced = _walk(written, merged, below)
        for path in replaced:
            differing |= {each for each, _ in merged.iter_below(path, lambda _path, _error: None)}
    if replaced:
        for entry in tree_entries(mirror, tree_id):
            if not replaced.isdisjoint(parents(entry.path + b"/")):
                differing.add(entry.path)
    return sorted(path for path in differing | replaced if not is_control(path))


def _walk(
    written: TreeReader, merged: TreeReader, below: Sequence[TreeReader]
) -> tuple[set[bytes], set[bytes]]:
    """The paths that the upper layer changes, and those that replace a directory of the layers."""
    differing: set[bytes] = set()
    replaced: set[bytes] = set()
    pending = [b""]
    while pending:
        above = pending.pop()
        inside = above + b"/" if above else b""
        try:
            merged.locate(inside)  # first: lets its owner in, in the upper layer too
            names = written.names_in(above)
        except FileNotFoundError:  # removed meanwhile
            continue
        for path in (inside + name for name in names):
            if is_control(path):
                continue
            found, seen = written.find_stat(path), merged.find_stat(path)
            hidden = next(filter(None, (layer.find_stat(path) for layer in below)), None)
            if hidden is not None and stat.S_ISCHR(hidden.st_mode):  # a whiteout
                hidden = None
            if found is None or hidden is None or not stat.S_ISDIR(hidden.st_mode):
                differing.add(path)
            elif seen is None or not stat.S_ISDIR(found.st_mode) or seen.st_ino != hidden.st_ino:
                replaced.add(path)
            else:
                pending.append(path)
    return differing, replaced
