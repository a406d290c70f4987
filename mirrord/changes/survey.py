"""What an overlay has over its base, listed or copied; runs in workers, as the checkout's owner.

It is read from the upper layer, no link is followed and no mount entered. Listing costs as much as
was changed.
"""

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckoutBusyError
from ..git.objects.repository import open_objects
from ..git.objects.trees import BaseTree
from ..host.files import find_stat, names_in, open_beneath, open_directory, opened
from ..host.processes import ActingAs, Owner
from ..patches.worktree import denials_named
from ..trees.layer import is_whiteout, iter_below
from ..trees.reader import TreeReader, parents
from ..trees.scan import is_control
from .copying import copy_layer
from .pieces import HIDDEN, CopyRule, Piece, Pieces, Taken, Where, hidden_by

#
# A path that is not in the upper layer is unchanged. A directory there is either the one of the
# layers below, with changes in it, or another one: new, made again, or renamed. Only CAP_SYS_ADMIN
# may read overlayfs's marks, but the inode number tells: for the former, the mount shows that of
# the directory below.


class OverlayPaths(NamedTuple):
    """One overlay of a checkout: its mount, its upper layer, the checkout's own `layer`, and the
    layers `below`, top first. Texts, because a worker would parse each path anew.
    """

    mount: str
    upper: str
    layer: Path | None
    below: tuple[str, ...]
    owner: Owner


class _Opened(NamedTuple):
    """An overlay with its directories open; `own` has the stats of the checkout's own layer."""

    mount: int
    merged: TreeReader
    written: TreeReader
    own: dict[bytes, os.stat_result]
    below: list[int]


@contextmanager
def _opened(paths: OverlayPaths, acting: ActingAs) -> Iterator[_Opened]:
    with ExitStack() as stack:
        tops = [open_tree(paths.mount), *map(open_directory, (paths.upper, *paths.below))]
        for top in tops:
            stack.enter_context(opened(top))
        own = read_layer(paths.layer) if paths.layer else {}  # which the owner may not read
        merged, written = (stack.enter_context(TreeReader(top, acting)) for top in tops[:2])
        yield _Opened(tops[0], merged, written, own, tops[2:])


def overlay_changes(paths: OverlayPaths, mirror: Path, tree_id: str) -> list[bytes]:
    """List the paths that may differ from git's tree `tree_id`: those in the upper layer and in the
    checkout's own one, and those that they hide.
    """
    acting = ActingAs(paths.owner)
    with denials_named(paths.owner), _opened(paths, acting) as overlay, acting:
        _, merged, written, own, all_below = overlay
        # the index and the store of a template have a `.git` alone, which is no change
        below = [layer for layer in all_below if names_in(layer) != [b".git"]]
        differing, replaced = _walk(written, merged, own, below)
        covered = set[bytes]()
        for path, st in own.items():
            if is_control(path):
                continue
            if path.rpartition(b"/")[0] in covered:
                covered.add(path)
                continue
            hidden = find_below(path, {}, below)
            if hidden is None or not stat.S_ISDIR(hidden.st_mode):
                differing.add(path)
                covered.add(path)
            elif not stat.S_ISDIR(st.st_mode):
                replaced.add(path)
        for path in replaced:
            differing |= {
                inside for inside, _ in merged.iter_below(path, lambda _path, _error: None)
            }
    if replaced:
        with open_objects(mirror) as objects:
            base = BaseTree(objects, tree_id)
            differing |= {entry.path for path in replaced for entry in base.iter_files(path)}
    return sorted(path for path in differing | replaced if not is_control(path))


def open_tree(tree: str | Path) -> int:
    """Open the mount of a checkout."""
    try:
        return open_directory(tree)
    except OSError as error:
        raise CheckoutBusyError(
            f"cannot open the checkout's directory: {error.strerror}", hint="reset the checkout"
        ) from error


def read_layer(layer: Path) -> dict[bytes, os.stat_result]:
    """Return the stats of all paths in a layer of the daemon."""
    with opened(open_directory(layer)) as root, TreeReader(root, ActingAs(None)) as reader:
        return dict(iter_below(reader))


def find_below(
    path: bytes, own: Mapping[bytes, os.stat_result], below: Sequence[int]
) -> os.stat_result | None:
    """Return the stat of what the upper layer hides at `path`, if anything."""
    st = own.get(path)
    for layer in below:
        st = st or find_in(layer, path)
    return None if st is None or is_whiteout(st) else st


def find_in(root: int, path: bytes) -> os.stat_result | None:
    """lstat a path below an open directory, following no link; None if it does not exist."""
    try:
        # lstat of the path would follow links in the directories above, which are the client's
        place = open_beneath(root, path, os.O_PATH | os.O_NOFOLLOW)
    except OSError as error:
        # the last two: a file or a link in place of a directory above it
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
    """Return the paths that the upper layer changes, and those that replace a directory below."""
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
            merged.locate(inside)  # makes it readable, in the upper layer too
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


def copy_overlay(
    directory: Path, paths: OverlayPaths, earlier: Path | None, what: CopyRule
) -> Taken:
    """Copy what a checkout has over the layers below into the new layer `directory`.

    `earlier` and `what` are as for `copy_layer`. What the client left alone of the checkout's own
    layer is linked from there. A directory that is new, replaced or renamed is copied whole.
    """
    acting = ActingAs(paths.owner)
    with _opened(paths, acting) as overlay:
        surveyor = _Surveyor(overlay)

        def survey() -> Pieces:
            with acting:
                return surveyor.survey()

        return copy_layer(
            directory, survey, overlay.merged, acting, what,
            upper=overlay.written, own=paths.layer, earlier=earlier,
        )  # fmt: skip


# of a directory: to list its names, and to stat them
_TO_LOOK = stat.S_IRUSR | stat.S_IXUSR


class _Surveyor:
    """Surveys an overlay repeatedly; caches what the layers below show, which never changes."""

    def __init__(self, overlay: _Opened) -> None:
        self._merged, self._reader, self._written, self._own, below = overlay
        self._below = [(layer, set(names_in(layer))) for layer in below]
        self._names: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for path in self._own:
            self._names[path.rpartition(b"/")[0]].append(path)
        self._known: dict[tuple[bytes, int], bool] = {}

    def survey(self) -> Pieces:
        pieces: Pieces = {}
        pending: list[tuple[bytes, os.stat_result | None]] = [(b"", None)]
        while pending:
            above, itself = pending.pop()
            try:
                seen = self._stats_in(above, itself)
            except FileNotFoundError:  # removed meanwhile
                continue
            for path, st in seen.items():
                if not stat.S_ISDIR(st.st_mode):
                    self._add(Where.UPPER, path, st, pieces)
                elif self._is_upper(path, st):
                    pieces[path] = Piece.of(Where.UPPER, st)
                    pending.append((path, st))
                else:
                    self._add_whole(path, pieces)
            for path in self._names[above]:
                if path not in seen:
                    self._add_own(path, pieces)
        return pieces

    def _stats_in(self, path: bytes, itself: os.stat_result | None) -> dict[bytes, os.stat_result]:
        """Return the stats of what the upper layer has in a directory, of which `itself` is one."""
        inside = path + b"/" if path else b""
        if itself is not None and itself.st_mode & _TO_LOOK != _TO_LOOK:
            self._reader.locate(inside)  # makes it readable, in the upper layer too
        return {inside + name: st for name, st in self._written.stats_in(path)}

    def _is_upper(self, path: bytes, st: os.stat_result) -> bool:
        """Return whether the changes of a directory are all in the upper layer: it is the one
        below with changes in it, or new, and not renamed to here.
        """
        # by the inode too: a directory that was removed and made again is another one
        key = path, st.st_ino
        if (is_upper := self._known.get(key)) is None:
            shown, own = find_in(self._merged, path), self._own.get(path)
            template = next((seen for _, seen in self._stack(path)), None)
            expected = st.st_ino
            if own is not None and stat.S_ISDIR(own.st_mode):
                expected = own.st_ino
            elif template is not None and stat.S_ISDIR(template.st_mode):
                # 0, of no inode: a whiteout or file of the own layer hides the template's directory
                expected = template.st_ino if own is None else 0
            is_upper = self._known[key] = shown is not None and shown.st_ino == expected
        return is_upper

    def _add(self, where: Where, path: bytes, st: os.stat_result, pieces: Pieces) -> None:
        """Add a file or link, or hide the template's path where something else is there."""
        if stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode):
            pieces[path] = Piece.of(where, st)
        elif any(self._stack(path)):
            pieces[path] = hidden_by(st)
        elif not is_whiteout(st):
            pieces[path] = Piece.of(where, st)

    def _add_own(self, path: bytes, pieces: Pieces) -> None:
        """Add what the checkout's own layer has at and below a path that the client left alone."""
        pending = [path]
        while pending:
            path = pending.pop()
            st = self._own[path]
            pieces[path] = HIDDEN if is_whiteout(st) else Piece.of(Where.OWN, st)
            pending += self._names[path]

    def _add_whole(self, path: bytes, pieces: Pieces) -> None:
        """Add a directory as the mount shows it, and hide what only the template has in it."""
        directories: Pieces = {}
        for below, seen in self._reader.iter_stats_below(path):
            if stat.S_ISDIR(seen.st_mode):
                directories[below] = Piece.of(Where.CLIENT, seen)
            else:
                self._add(Where.CLIENT, below, seen, pieces)
        pieces |= directories
        shown = {path}
        for below in directories:
            if below in shown:
                inside = {below + b"/" + name for name in self._template_names(below)}
                shown |= inside
                pieces |= dict.fromkeys(inside - pieces.keys(), HIDDEN)

    def _template_names(self, path: bytes) -> set[bytes]:
        """Return the names that the template shows in a directory."""
        names: set[bytes] = set()
        hidden: set[bytes] = set()
        for layer, st in self._stack(path):
            if stat.S_ISDIR(st.st_mode):
                with opened(open_beneath(layer, path)) as directory:
                    for name in set(names_in(directory)) - names - hidden:
                        seen = find_stat(directory, name)
                        (hidden if seen and is_whiteout(seen) else names).add(name)
        return names

    def _stack(self, path: bytes) -> Iterator[tuple[int, os.stat_result]]:
        """Iterate over the template's layers at a path, top first, as far as they show through."""
        top = path.partition(b"/")[0]
        for layer in (layer for layer, names in self._below if top in names):
            st = find_in(layer, path)
            if st is not None:
                # what the layers below have there does not show
                if is_whiteout(st):
                    return
                yield layer, st
                if not stat.S_ISDIR(st.st_mode):
                    return
                continue
            # a layer that has a file above the path hides all that lower ones have below it
            above = (find_in(layer, parent) for parent in reversed(parents(path)))
            nearest = next(filter(None, above), None)
            if nearest is not None and not stat.S_ISDIR(nearest.st_mode):
                return
