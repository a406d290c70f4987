"""What a client changed in an overlay checkout: read from its upper layer. Sync; runs in workers.

Owns how an upper layer is understood. It holds whatever was written, and whiteouts; what is not in it is unchanged. A directory
there is either the one of the layers below, with something changed in it, or another one: new, made anew, or renamed to here. The
marks that say which are for CAP_SYS_ADMIN only, so it is told by its inode: overlayfs shows that of the directory below. Costs as
much as was changed. Follows no link, enters no mount, and looks as the checkout's owner.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ...errors import CheckoutBusyError
from ...git.objects import tree_entries
from ...host.credentials import ActingAs
from ...host.files import open_directory, opened
from ..files.reader import Descent
from ..files.scan import is_control
from ..patches.diff import denials_named


def changed_paths(
    tree: Path,
    upper: Path,
    layers: Sequence[Path],
    mirror: Path,
    tree_id: str,
    owner: tuple[int, int],
) -> list[bytes]:
    """Every path that may differ from the tree `tree_id`: those in the upper layer, and what they hide."""
    with ExitStack() as stack, denials_named(owner):
        tops = [
            _open_tree(tree),
            open_directory(upper),
            *(open_directory(layer) for layer in layers),
        ]
        for top in tops:
            stack.enter_context(opened(top))
        acting = stack.enter_context(ActingAs(owner))
        merged, written, *below = (stack.enter_context(Descent(top, acting)) for top in tops)
        differing, replaced = _walk(written, merged, below)
        for path in replaced:
            differing |= {each for each, _ in merged.iter_below(path, lambda _path, _error: None)}
    if replaced:
        differing |= {
            entry.path
            for entry in tree_entries(mirror, tree_id)
            if _is_within(entry.path, replaced)
        }
    return sorted(path for path in differing | replaced if not is_control(path))


def _walk(
    written: Descent, merged: Descent, below: Sequence[Descent]
) -> tuple[set[bytes], set[bytes]]:
    """The paths that the upper layer has an opinion on; apart from them those that hide whatever is below them."""
    differing: set[bytes] = set()
    replaced: set[bytes] = set()
    pending = [b""]
    while pending:
        above = pending.pop()
        try:
            merged.locate(
                above + b"/" if above else b""
            )  # first: lets its owner in, in the upper layer too
            names = written.names_in(above)
        except FileNotFoundError:  # its owner was quicker
            continue
        for path in (above + b"/" + name if above else name for name in names):
            if is_control(path):
                continue
            found, seen, hidden = (
                written.find_stat(path),
                merged.find_stat(path),
                _first(below, path),
            )
            if found is None or hidden is None or not stat.S_ISDIR(hidden.st_mode):
                differing.add(path)
            elif seen is None or not stat.S_ISDIR(found.st_mode) or seen.st_ino != hidden.st_ino:
                replaced.add(path)
            else:
                pending.append(path)
    return differing, replaced


def _first(layers: Sequence[Descent], path: bytes) -> os.stat_result | None:
    """What the layers, top first, have at a path; None for a whiteout too."""
    for layer in layers:
        if found := layer.find_stat(path):
            return None if stat.S_ISCHR(found.st_mode) else found
    return None


def _is_within(path: bytes, tops: set[bytes]) -> bool:
    parts = path.split(b"/")
    return any(b"/".join(parts[:depth]) in tops for depth in range(1, len(parts) + 1))


def _open_tree(tree: Path) -> int:
    try:
        return open_directory(tree)
    except OSError as error:
        raise CheckoutBusyError(
            f"cannot open the checkout's directory: {error.strerror}", hint="reset the checkout"
        ) from error
