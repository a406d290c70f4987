"""What a client changed in an overlay checkout: read from its upper layer. Sync; runs in workers.

Owns how an upper layer is understood. It holds whatever was written, and whiteouts; what is not in it is unchanged. A directory
there is either the one of the layers below, with something changed in it, or another one: new, made anew, or renamed to here. The
marks that say which are for CAP_SYS_ADMIN only, so it is told by its inode: overlayfs shows that of the directory below. Costs as
much as was changed. Follows no link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ..errors import CheckoutBusyError
from ..git.objects import tree_entries
from ..host.files import find_stat, names_in, open_child, open_directory, opened
from .scan import is_control, iter_extra


def changed_paths(tree: Path, upper: Path, layers: Sequence[Path], mirror: Path, tree_id: str) -> list[bytes]:
    """Every path that may differ from the tree `tree_id`: those in the upper layer, and what they hide."""
    with ExitStack() as stack:
        merged = stack.enter_context(opened(_open_tree(tree)))
        written = stack.enter_context(opened(open_directory(upper)))
        below = [stack.enter_context(opened(open_directory(layer))) for layer in layers]
        differing, replaced = set[bytes](), set[bytes]()
        for path, is_replaced in _walk(b"", written, merged, below):
            (replaced if is_replaced else differing).add(path)
    for path in replaced:
        differing |= {each for each, _ in iter_extra(tree, path)}
    if replaced:
        differing |= {entry.path for entry in tree_entries(mirror, tree_id) if _is_within(entry.path, replaced)}
    return sorted(path for path in differing | replaced if not is_control(path))


def _walk(above: bytes, written: int, merged: int, below: Sequence[int]) -> Iterator[tuple[bytes, bool]]:
    """The paths that the upper layer has an opinion on; True with those that hide whatever is below them."""
    for name in names_in(written):
        path = above + name
        if is_control(path):
            continue
        found = find_stat(written, name)
        seen = find_stat(merged, name)
        hidden = _first(below, name)
        if found is None or hidden is None or not stat.S_ISDIR(hidden.st_mode):
            yield path, False
        elif seen is None or not stat.S_ISDIR(found.st_mode) or seen.st_ino != hidden.st_ino:
            yield path, True
        else:
            yield from _enter(path, name, written, merged, below)


def _enter(path: bytes, name: bytes, written: int, merged: int, below: Sequence[int]) -> Iterator[tuple[bytes, bool]]:
    with ExitStack() as stack:

        def child(directory: int) -> int:
            return stack.enter_context(opened(open_child(directory, name)))

        try:
            into, through = child(written), child(merged)
        except (FileNotFoundError, NotADirectoryError):  # its owner was quicker
            return
        yield from _walk(path + b"/", into, through, [child(each) for each in below if _is_directory(each, name)])


def _first(layers: Sequence[int], name: bytes) -> os.stat_result | None:
    """What the layers, top first, have under a name; None for a whiteout too."""
    for layer in layers:
        if found := find_stat(layer, name):
            return None if stat.S_ISCHR(found.st_mode) else found
    return None


def _is_directory(layer: int, name: bytes) -> bool:
    found = find_stat(layer, name)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _is_within(path: bytes, tops: set[bytes]) -> bool:
    parts = path.split(b"/")
    return any(b"/".join(parts[:depth]) in tops for depth in range(1, len(parts) + 1))


def _open_tree(tree: Path) -> int:
    try:
        return open_directory(tree)
    except OSError as error:
        raise CheckoutBusyError(f"cannot open the checkout's directory: {error.strerror}", hint="reset the checkout") from error
