"""One layer of overlay templates, as it is recorded beside its files.

Owns `layer.json` in `trees/<tree>` (a keyframe: a whole tree) and `trees/<tree>@<base tree>` (a
delta), beside `files`, `index` and the private manifest. Loads no libgit2: the daemon keeps these
records in memory, workers build what they describe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ...host.processes import boot_id


@dataclass(frozen=True, slots=True)
class Layer:
    """`base` is the tree that a delta lies on. `depth` counts layers down to the keyframe, itself included. `time` is the
    commit's. `size_bytes` goes with the layer, `shared_bytes` are of files that it was the first to have (`blobs.py`).
    """

    tree: str
    base: str | None
    commit: str
    time: int
    depth: int
    size_bytes: int
    shared_bytes: int
    whole_bytes: int
    removed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.tree}@{self.base}" if self.base else self.tree

    @property
    def whiteouts(self) -> list[bytes]:
        """The paths that a delta hides; kept as latin-1 text, which holds any bytes."""
        return [path.encode("latin-1") for path in self.removed]


def files_path(trees: Path, layer: Layer) -> Path:
    """The directory that overlayfs gets."""
    return trees / layer.name / "files"


def index_path(layer: Path) -> Path:
    """The directory of a layer with `.git/index`, which overlayfs gets as one more, on top."""
    return layer / "index"


def blobs_path(trees: Path) -> Path:
    """Where the files are that layers share."""
    return trees.parent / "blobs"


def chain_of(layer: Layer, layers: Mapping[str, Layer]) -> list[Layer]:
    """The layer and those it lies on, top first, out of `layers` by tree; KeyError where one is gone."""
    chain = [layer]
    while (base := chain[-1].base) is not None:
        chain.append(layers[base])
    return chain


def write_record(directory: Path, layer: Layer) -> None:
    """Write `layer.json`. The boot id says when it was proven: what a power failure may have torn is proven again."""
    record = {**asdict(layer), "boot": boot_id()}
    temporary = directory / "layer.json.new"
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.rename(directory / "layer.json")


def read_record(directory: Path) -> tuple[Layer, bool] | None:
    """The layer in a directory, and whether it was proven since this boot; None where there is no sound record."""
    try:
        record = json.loads((directory / "layer.json").read_text(encoding="utf-8"))
        proven = record.pop("boot") == boot_id()
        layer = Layer(**{**record, "removed": tuple(record["removed"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (layer, proven) if layer.name == directory.name else None
