"""The layers there are: what forks, snapshots, grades and prepared layers have over their commits.

A layer is a directory `templates/.layers/<id>` in the form of overlayfs's upper layers: changed
files as they are, directories, and a whiteout (a character device 0/0) for each path that the base
has and the layer has not. Its files belong to the daemon, and nobody changes them. It lives while a
lease or the record of a prepared layer refers to it; else it is removed, by the next start too.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ...host.trash import Trash, new_trash
from ...model import LayerId, new_layer_id
from ..leases import Leases, SavedLayer

DIRECTORY = ".layers"
"""Below `templates`, which the mounter shows to other owners as theirs."""


def layer_path(state_dir: Path, layer: LayerId) -> Path:
    return state_dir / "templates" / DIRECTORY / layer


def objects_path(state_dir: Path, mirror: Path, tree: str, saved: SavedLayer | None) -> Path:
    """A repository with the objects that a checkout's changes are relative to: its mirror, or that
    of its prepared layer, which borrows from the mirror.
    """
    if saved is None or saved.tree == tree:
        return mirror
    return layer_path(state_dir, saved.id).with_suffix(".git")


class NewLayer(NamedTuple):
    """A layer to be written: `path` does not exist yet."""

    id: LayerId
    path: Path


class Layers:
    """The layers of a state directory, counted by its `leases`. Belongs to the event loop."""

    def __init__(self, state_dir: Path, leases: Leases, trash: Trash) -> None:
        self.directory = state_dir / "templates" / DIRECTORY
        self._state = state_dir
        self._leases = leases
        self._trash = trash

    def open(self) -> None:
        """Remove what nothing refers to; call once, when leases and prepared layers were read."""
        with suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                if not self._leases.layers[LayerId(path.name.partition(".")[0])]:
                    self._trash.add(path)

    def path(self, layer: LayerId) -> Path:
        return layer_path(self._state, layer)

    @contextmanager
    def making(self) -> Iterator[NewLayer]:
        """A new layer, removed at the end unless a lease refers to it by then."""
        layer = new_layer_id()
        # not at the start, which needs no room on a full disk
        self.directory.mkdir(mode=0o700, exist_ok=True)
        try:
            yield NewLayer(layer, self.path(layer))
        finally:
            self.drop_unused([layer])

    @contextmanager
    def held(self, layer: LayerId | None) -> Iterator[Path | None]:
        """Keep a layer for a while; its path, or None where no lease refers to it any more."""
        if layer is None or self._leases.layers[layer] <= 0:
            yield None
            return
        self._leases.layers[layer] += 1
        try:
            yield self.path(layer)
        finally:
            self._leases.layers[layer] -= 1
            self.drop_unused([layer])

    def drop_unused(self, layers: Iterable[LayerId]) -> None:
        """Remove those of the layers that no lease refers to any more."""
        for layer in layers:
            if self._leases.layers[layer] <= 0:
                del self._leases.layers[layer]
                path = self.path(layer)
                for each in (path, path.with_suffix(".git")):
                    gone = new_trash(path.parent)
                    with suppress(FileNotFoundError):
                        each.rename(gone)
                        self._trash.add(gone)
                self._trash.remove(path.with_suffix(".stats"))
