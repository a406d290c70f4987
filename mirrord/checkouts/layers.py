"""Layers: what forks, snapshots, grades and prepared layers have over their commits.

A layer is a directory `templates/.layers/<id>` in the form of overlayfs's upper layers: changed
files, directories, and a whiteout (a character device 0/0) for each path that the layer removes.
The daemon owns its files, which never change. It is kept while a lease or the record of a prepared
layer refers to it.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..host.trash import Trash, new_trash
from ..model import LayerId, new_layer_id
from ..places import whole_path
from ..presence import lexists
from .lease import Base
from .leases import Leases

_BESIDE = ("", ".git", ".stats")
_LAYERS = ".layers"  # below `templates`, which the mounter shows to each owner as its own


def layer_path(state_dir: Path, layer: LayerId) -> Path:
    return state_dir / "templates" / _LAYERS / layer


def objects_path(state_dir: Path, mirror: Path, base: Base) -> Path:
    """Return the repository with the base objects of a checkout: its mirror, that of its composed
    tree, or that of its prepared layer, which borrow from the mirror.
    """
    if base.saved and base.saved.tree != base.plain_tree:
        return layer_path(state_dir, base.saved.id).with_suffix(".git")
    if base.whole:
        return whole_path(state_dir / "templates", mirror.name)
    return mirror


class Layers:
    """The layers of a state directory, counted by its `leases`. Belongs to the event loop."""

    def __init__(self, state_dir: Path, leases: Leases, trash: Trash) -> None:
        self.directory = state_dir / "templates" / _LAYERS
        self._leases = leases
        self._trash = trash

    def open(self) -> None:
        """Remove unused layers; call once, after leases and prepared layers were read.

        Where one could not be read, the layers that it needs are unknown, and all stay.
        """
        if not self._leases.knows_all:
            return
        with suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                # beside a layer `<id>` are `<id>.git`, `<id>.json` and `<id>.stats`
                if not self._leases.layers[LayerId(path.name.partition(".")[0])]:
                    self._trash.add(path)

    def path(self, layer: LayerId) -> Path:
        return self.directory / layer

    @contextmanager
    def making(self) -> Iterator[Path]:
        """Yield a path to make a new layer at. At the end it is removed unless a lease refers to
        it; until then it is kept, also where a backend that failed cleans up before the next one.
        """
        layer = new_layer_id()
        self.directory.mkdir(mode=0o700, exist_ok=True)  # not in `open`: a start needs no room
        self._leases.layers[layer] += 1
        try:
            yield self.path(layer)
        finally:
            self._leases.layers[layer] -= 1
            self.drop_unused([layer])

    def is_used(self, layer: LayerId) -> bool:
        """Return whether a lease refers to a layer, or it is held."""
        return self._leases.layers[layer] > 0

    @contextmanager
    def held(self, layer: LayerId | None) -> Iterator[Path | None]:
        """Keep a layer meanwhile; yield its path, or None if no lease refers to it."""
        if layer is None or not self.is_used(layer):
            yield None
            return
        self._leases.layers[layer] += 1
        try:
            yield self.path(layer)
        finally:
            self._leases.layers[layer] -= 1
            self.drop_unused([layer])

    def drop_unused(self, layers: Iterable[LayerId]) -> None:
        """Remove those of the layers that no lease refers to; the next start removes the others."""
        if not self._leases.knows_all:
            return
        for layer in layers:
            if self._leases.layers[layer] <= 0:
                del self._leases.layers[layer]
                # `<id>.git` is there only where tracked files changed, `<id>.stats` for a fork
                for path in (f"{self.directory}/{layer}{suffix}" for suffix in _BESIDE):
                    if lexists(path):
                        os.rename(path, gone := new_trash(self.directory))
                        self._trash.add(gone)
