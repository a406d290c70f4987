"""Survey an overlay checkout for the layer that a fork or a snapshot gets. Sync; runs in workers.

Everything that its client changed is in the upper layer, and what it did not change of the
checkout's own layer is taken from there. Only CAP_SYS_ADMIN may read overlayfs's marks, so a
directory that is new, replaced or renamed to here is taken whole, as the mount shows it.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from ...host.credentials import ActingAs
from ...host.files import open_directory, opened
from ..backend import Taken
from ..files.reader import TreeReader
from ..snapshots.content import is_whiteout
from ..snapshots.copy import HIDDEN, Piece, Pieces, Where, copy_layer, hidden_by
from ..templates.layers import parents
from .changes import open_tree, read_layer


def copy_checkout(
    directory: Path,
    tree: Path,
    upper: Path,
    layer: Path | None,
    layers: Sequence[Path],
    owner: tuple[int, int],
) -> Taken:
    """Write into the new `directory` what a checkout has over its template's `layers`."""
    with ExitStack() as stack:
        tops = [open_tree(tree), *map(open_directory, (upper, *layers))]
        for top in tops:
            stack.enter_context(opened(top))
        own = read_layer(layer) if layer else {}
        acting = ActingAs(owner)
        merged, written, *below = (stack.enter_context(TreeReader(top, acting)) for top in tops)
        survey = _Survey(merged, written, own, below)

        def look() -> Pieces:
            with acting:
                return survey.take()

        return copy_layer(directory, look, merged, acting, layer)


class _Survey:
    """Looks at a checkout; `own` has the stat of each path of the layer that it has."""

    def __init__(
        self,
        merged: TreeReader,
        written: TreeReader,
        own: Mapping[bytes, os.stat_result],
        below: Sequence[TreeReader],
    ) -> None:
        self._merged = merged
        self._written = written
        self._own = own
        self._below = below
        self._names: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for path in own:
            self._names[path.rpartition(b"/")[0]].append(path)

    def take(self) -> Pieces:
        pieces: Pieces = {}
        pending = [b""]
        while pending:
            above = pending.pop()
            inside = above + b"/" if above else b""
            try:
                self._merged.locate(inside)  # first: lets its owner in, in the upper layer too
                names = self._written.names_in(above)
            except FileNotFoundError:  # removed meanwhile
                continue
            seen = {inside + name for name in names}
            for path in seen:
                pending += self._judge(path, pieces)
            for path in self._names[above]:
                if path not in seen:
                    pieces.update(self._of_own(path))
        return pieces

    def _judge(self, path: bytes, pieces: Pieces) -> Iterator[bytes]:
        """Add a path of the upper layer; answers it where more is to be seen in it."""
        found = self._written.find_stat(path)
        if found is None:
            return
        if not stat.S_ISDIR(found.st_mode):
            pieces.update(self._of_client(path, found))
            return
        shown, hidden = self._merged.find_stat(path), self._own.get(path)
        if hidden is None:
            _, hidden = next(self._stack(path), (None, None))
        is_merged = hidden and stat.S_ISDIR(hidden.st_mode)
        if is_merged and hidden and shown and shown.st_ino == hidden.st_ino:
            pieces[path] = Piece.of(Where.CLIENT, found)
            yield path
        else:
            self._take_whole(path, pieces)

    def _of_client(self, path: bytes, found: os.stat_result) -> Pieces:
        """A path that is no directory. What no layer takes still hides what the template has."""
        if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
            return {path: Piece.of(Where.CLIENT, found)}
        if any(self._stack(path)):
            return {path: hidden_by(found)}
        return {} if is_whiteout(found) else {path: Piece.of(Where.CLIENT, found)}

    def _of_own(self, path: bytes) -> Pieces:
        """What the checkout's own layer has at and below a path that its client did not touch."""
        pieces: Pieces = {}
        pending = [path]
        while pending:
            path = pending.pop()
            found = self._own[path]
            pieces[path] = HIDDEN if is_whiteout(found) else Piece.of(Where.OWN, found)
            pending += self._names[path]
        return pieces

    def _take_whole(self, path: bytes, pieces: Pieces) -> None:
        """Add a directory as the mount shows it, and what the template has there and it has not."""

        def refused(_path: bytes, error: Exception) -> NoReturn:
            raise error

        found: Pieces = {}
        for below, seen in self._merged.iter_below(path, refused):
            is_directory = stat.S_ISDIR(seen.st_mode)
            directory = {below: Piece.of(Where.CLIENT, seen)}
            found |= directory if is_directory else self._of_client(below, seen)
        pieces |= found
        known = {path}
        for below in (below for below, piece in found.items() if piece.is_directory):
            if below in known:
                inside = {below + b"/" + name for name in self._template_names(below)}
                known |= inside
                pieces |= dict.fromkeys(inside - found.keys(), HIDDEN)

    def _template_names(self, path: bytes) -> set[bytes]:
        """The names that the template shows in a directory."""
        names: set[bytes] = set()
        hidden: set[bytes] = set()
        for layer, found in self._stack(path):
            if stat.S_ISDIR(found.st_mode):
                for name in set(layer.names_in(path)) - names - hidden:
                    seen = layer.find_stat(path + b"/" + name)
                    (hidden if seen and is_whiteout(seen) else names).add(name)
        return names

    def _stack(self, path: bytes) -> Iterator[tuple[TreeReader, os.stat_result]]:
        """What the template has at a path, top layer first, as far down as it shows through."""
        for layer in self._below:
            found = layer.find_stat(path)
            if found is not None:
                if is_whiteout(found):
                    return
                yield layer, found
                if not stat.S_ISDIR(found.st_mode):
                    return
                continue
            above = filter(None, map(layer.find_stat, reversed(parents(path))))
            nearest = next(above, None)
            if nearest is not None and not stat.S_ISDIR(nearest.st_mode):
                return
