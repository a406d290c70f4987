"""List the changes of an overlay checkout, by reading its upper layer. Sync; runs in workers.

A path that is not in the upper layer is unchanged. A directory there is either that of the layers
below with changes in it, or another one: new, made again, or renamed to here. Only CAP_SYS_ADMIN
may read the marks that tell, so its inode does: overlayfs shows that of the directory below. Costs
as much as was changed. Follows no link, enters no mount, and looks as the checkout's owner.
"""

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ...errors import CheckoutBusyError
from ...git.objects.repository import open_objects
from ...git.objects.trees import BaseTree
from ...host.credentials import ActingAs
from ...host.files import names_in, open_beneath, open_directory, opened
from ..files.reader import TreeReader
from ..files.scan import is_control
from ..patches.worktree import denials_named
from ..snapshots.content import is_whiteout, iter_below


def changed_paths(
    tree: Path,
    upper: Path,
    layer: Path | None,
    layers: Sequence[Path],
    mirror: Path,
    tree_id: str,
    owner: tuple[int, int],
) -> list[bytes]:
    """Every path that may differ from the tree `tree_id`: those in the upper layer, and those that
    they hide.
    """
    with ExitStack() as stack, denials_named(owner):
        tops = [open_tree(tree), *map(open_directory, (upper, *layers))]
        for top in tops:
            stack.enter_context(opened(top))
        own = read_layer(layer) if layer else {}  # which the owner may not read
        acting = stack.enter_context(ActingAs(owner))
        merged, written = (stack.enter_context(TreeReader(top, acting)) for top in tops[:2])
        below = [layer for layer in tops[2:] if names_in(layer) != [b".git"]]
        differing, replaced = _walk(written, merged, own, below)
        covered = set[bytes]()
        for path, found in own.items():
            if is_control(path):
                continue
            if path.rpartition(b"/")[0] in covered:
                covered.add(path)
                continue
            hidden = find_below(path, {}, below)
            if hidden is None or not stat.S_ISDIR(hidden.st_mode):
                differing.add(path)
                covered.add(path)
            elif not stat.S_ISDIR(found.st_mode):
                replaced.add(path)
        for path in replaced:
            differing |= {each for each, _ in merged.iter_below(path, lambda _path, _error: None)}
    if replaced:
        with open_objects(mirror) as objects:
            base = BaseTree(objects, tree_id)
            differing |= {entry.path for path in replaced for entry in base.iter_files(path)}
    return sorted(path for path in differing | replaced if not is_control(path))


def open_tree(tree: Path) -> int:
    """Open the mount of a checkout."""
    try:
        return open_directory(tree)
    except OSError as error:
        raise CheckoutBusyError(
            f"cannot open the checkout's directory: {error.strerror}", hint="reset the checkout"
        ) from error


def read_layer(layer: Path) -> dict[bytes, os.stat_result]:
    """The stat of each path in a layer of the daemon's."""
    with opened(open_directory(layer)) as root, TreeReader(root, ActingAs(None)) as reader:
        return dict(iter_below(reader))


def find_below(
    path: bytes, own: Mapping[bytes, os.stat_result], below: Sequence[int]
) -> os.stat_result | None:
    """What the upper layer hides at `path`: of the checkout's own layer, or of the template's."""
    found = own.get(path)
    for layer in below:
        found = found or look(layer, path)
    return None if found is None or is_whiteout(found) else found


def look(root: int, path: bytes) -> os.stat_result | None:
    """lstat of a path below an open directory, through no link; None where there is nothing."""
    try:
        place = open_beneath(root, path, os.O_PATH | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None
    with opened(place):
        return os.fstat(place)


def _walk(
    written: TreeReader,
    merged: TreeReader,
    own: Mapping[bytes, os.stat_result],
    below: Sequence[int],
) -> tuple[set[bytes], set[bytes]]:
    """The paths that the upper layer changes, and those that replace a directory of the layers."""
    differing: set[bytes] = set()
    replaced: set[bytes] = set()
    pending = [b""]
    while pending:
        above = pending.pop()
        inside = above + b"/" if above else b""
        try:
            entries = written.entries_in(above)
        except FileNotFoundError:  # removed meanwhile
            continue
        except PermissionError:
            merged.locate(inside)  # lets its owner in, in the upper layer too
            entries = written.entries_in(above)
        for name, kind in entries:
            path = inside + name
            if is_control(path):
                continue
            if kind != stat.S_IFDIR:
                differing.add(path)
                continue
            hidden = find_below(path, own, below)
            if hidden is None or not stat.S_ISDIR(hidden.st_mode):
                differing.add(path)
            elif (seen := merged.find_stat(path)) is None or seen.st_ino != hidden.st_ino:
                replaced.add(path)
            else:
                pending.append(path)
    return differing, replaced
