"""The changes of an overlay checkout, listed or copied by reading its upper layer. In workers.

A path that is not in the upper layer is unchanged. A directory there is either that of the layers
below with changes in it, or another one: new, made again, or renamed to here. Only CAP_SYS_ADMIN
may read the marks that tell, so its inode does: overlayfs shows that of the directory below. Costs
as much as was changed. Follows no link, enters no mount, and looks as the checkout's owner.
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
from .backend import CopyRule, Taken
from .copying import HIDDEN, Piece, Pieces, Where, copy_layer, hidden_by
from .files.reader import TreeReader, parents
from .files.scan import is_control
from .patches.worktree import denials_named
from .snapshots import is_whiteout, iter_below


class OverlayParts(NamedTuple):
    """One overlay of a checkout: where it is mounted, its upper layer, the checkout's own `layer`,
    and those `below`, top first.
    """

    mount: Path
    upper: Path
    layer: Path | None
    below: tuple[Path, ...]
    owner: Owner


class _Opened(NamedTuple):
    """`own` has the stat of each path of the checkout's own layer."""

    mount: int
    merged: TreeReader
    written: TreeReader
    own: dict[bytes, os.stat_result]
    below: list[int]


@contextmanager
def _opened_parts(parts: OverlayParts, acting: ActingAs) -> Iterator[_Opened]:
    with ExitStack() as stack:
        tops = [open_tree(parts.mount), *map(open_directory, (parts.upper, *parts.below))]
        for top in tops:
            stack.enter_context(opened(top))
        own = read_layer(parts.layer) if parts.layer else {}  # which the owner may not read
        merged, written = (stack.enter_context(TreeReader(top, acting)) for top in tops[:2])
        yield _Opened(tops[0], merged, written, own, tops[2:])


def changed_paths(parts: OverlayParts, mirror: Path, tree_id: str) -> list[bytes]:
    """Every path that may differ from the tree `tree_id`: those in the upper layer, and those that
    they hide.
    """
    acting = ActingAs(parts.owner)
    with denials_named(parts.owner), _opened_parts(parts, acting) as found_in, acting:
        _, merged, written, own, all_below = found_in
        below = [layer for layer in all_below if names_in(layer) != [b".git"]]
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


# -- copied for a fork or a snapshot ---------------------------------------------------------------
#
# What the client did not change of the checkout's own layer is taken from there. A directory that
# is new, replaced or renamed to here is taken whole, as the mount shows it.


def copy_checkout(
    directory: Path, parts: OverlayParts, earlier: Path | None, what: CopyRule
) -> Taken:
    """Write into the new `directory` what a checkout has over the layers below; `earlier` and
    `what` are as for `copy_layer`.
    """
    acting = ActingAs(parts.owner)
    with _opened_parts(parts, acting) as found_in:
        survey, (_, merged, written, _, _) = _Survey(found_in), found_in

        def look() -> Pieces:
            with acting:
                return survey.take()

        return copy_layer(
            directory, look, merged, acting, what, upper=written, own=parts.layer, earlier=earlier
        )


_TO_LOOK = stat.S_IRUSR | stat.S_IXUSR


class _Survey:
    """Looks at a checkout.

    What the layers below show does not change, and neither does what a directory of the upper
    layer hides there: later looks remember it.
    """

    def __init__(self, parts: _Opened) -> None:
        self._merged, self._reader, self._written, self._own, below = parts
        self._below = [(layer, set(names_in(layer))) for layer in below]
        self._names: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for path in self._own:
            self._names[path.rpartition(b"/")[0]].append(path)
        self._known: dict[tuple[bytes, int], bool] = {}
        self._listed: dict[bytes, tuple[tuple[int, int, int] | None, list[bytes]]] = {}

    def take(self) -> Pieces:
        pieces: Pieces = {}
        pending: list[tuple[bytes, os.stat_result | None]] = [(b"", None)]
        while pending:
            above, itself = pending.pop()
            try:
                seen = self._look_into(above, itself)
            except FileNotFoundError:  # removed meanwhile
                continue
            for path, found in seen.items():
                if not stat.S_ISDIR(found.st_mode):
                    self._add(Where.UPPER, path, found, pieces)
                elif self._is_upper(path, found):
                    pieces[path] = Piece.of(Where.UPPER, found)
                    pending.append((path, found))
                else:
                    self._add_whole(path, pieces)
            for path in self._names[above]:
                if path not in seen:
                    self._add_own(path, pieces)
        return pieces

    def _look_into(self, path: bytes, itself: os.stat_result | None) -> dict[bytes, os.stat_result]:
        """What the upper layer has in a directory, whose own stat, but for the top's, is `itself`:
        no name comes or goes without changing it.
        """
        inside = path + b"/" if path else b""
        if itself is not None and itself.st_mode & _TO_LOOK != _TO_LOOK:
            self._reader.locate(inside)  # lets its owner in, in the upper layer too
        state = itself and (itself.st_ino, itself.st_mtime_ns, itself.st_ctime_ns)
        before, names = self._listed.get(path, (None, []))
        is_known = state is not None and state == before
        found = self._written.stats_in(path, names if is_known else None)
        if not is_known:
            self._listed[path] = state, [name for name, _ in found]
        return {inside + name: each for name, each in found}

    def _is_upper(self, path: bytes, found: os.stat_result) -> bool:
        """Whether the upper layer has all that makes a directory other than those below: it is
        theirs with changes in it, or nothing is there and it was not renamed from elsewhere.
        """
        key = path, found.st_ino
        if (known := self._known.get(key)) is None:
            shown, own = look(self._merged, path), self._own.get(path)
            template = next((seen for _, seen in self._stack(path)), None)
            expected = found.st_ino
            if own is not None and stat.S_ISDIR(own.st_mode):
                expected = own.st_ino
            elif template is not None and stat.S_ISDIR(template.st_mode):
                expected = template.st_ino if own is None else 0
            known = self._known[key] = shown is not None and shown.st_ino == expected
        return known

    def _add(self, where: Where, path: bytes, found: os.stat_result, pieces: Pieces) -> None:
        """Add what is no directory. What no layer takes still hides what the template has."""
        if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
            pieces[path] = Piece.of(where, found)
        elif any(self._stack(path)):
            pieces[path] = hidden_by(found)
        elif not is_whiteout(found):
            pieces[path] = Piece.of(where, found)

    def _add_own(self, path: bytes, pieces: Pieces) -> None:
        """Add what the checkout's own layer has at and below a path that its client left alone."""
        pending = [path]
        while pending:
            path = pending.pop()
            found = self._own[path]
            pieces[path] = HIDDEN if is_whiteout(found) else Piece.of(Where.OWN, found)
            pending += self._names[path]

    def _add_whole(self, path: bytes, pieces: Pieces) -> None:
        """Add a directory as the mount shows it, and what the template has there and it has not."""
        directories: Pieces = {}
        for below, seen in self._reader.iter_stats_below(path):
            if stat.S_ISDIR(seen.st_mode):
                directories[below] = Piece.of(Where.CLIENT, seen)
            else:
                self._add(Where.CLIENT, below, seen, pieces)
        pieces |= directories
        known = {path}
        for below in directories:
            if below in known:
                inside = {below + b"/" + name for name in self._template_names(below)}
                known |= inside
                pieces |= dict.fromkeys(inside - pieces.keys(), HIDDEN)

    def _template_names(self, path: bytes) -> set[bytes]:
        """The names that the template shows in a directory."""
        names: set[bytes] = set()
        hidden: set[bytes] = set()
        for layer, found in self._stack(path):
            if stat.S_ISDIR(found.st_mode):
                with opened(open_beneath(layer, path)) as directory:
                    for name in set(names_in(directory)) - names - hidden:
                        seen = find_stat(directory, name)
                        (hidden if seen and is_whiteout(seen) else names).add(name)
        return names

    def _stack(self, path: bytes) -> Iterator[tuple[int, os.stat_result]]:
        """What the template has at a path, top layer first, as far down as it shows through."""
        top = path.partition(b"/")[0]
        for layer in (layer for layer, names in self._below if top in names):
            found = look(layer, path)
            if found is not None:
                if is_whiteout(found):
                    return
                yield layer, found
                if not stat.S_ISDIR(found.st_mode):
                    return
                continue
            above = (look(layer, each) for each in reversed(parents(path)))
            nearest = next(filter(None, above), None)
            if nearest is not None and not stat.S_ISDIR(nearest.st_mode):
                return
