"""The layers of overlay templates: their records, which ones a mirror has, and their proof.

A layer is `trees/<tree>` (a keyframe: a whole tree) or `trees/<tree>@<base tree>` (a delta), with
`layer.json`, `files` and `index` for overlayfs, and the private manifest. The daemon keeps the
records in memory; workers build and prove the layers.
"""

import heapq
import json
import os
import stat
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from ...errors import ProofFailedError
from ...host.credentials import ActingAs
from ...host.files import open_directory, opened, shown_path
from ...host.processes import boot_id
from ..files.index import index_bytes
from ..files.manifest import Manifest, Records
from ..files.reader import TreeReader, iter_files
from ..files.scan import hash_tree, prove_files, tree_id


@dataclass(frozen=True, slots=True)
class Layer:
    """`base` is the tree that a delta lies on; `depth` counts layers down to the keyframe, itself
    included. `time` is the commit's. `size_bytes` are the layer's own, `shared_bytes` those of the
    shared files that it was the first to have, `whole_bytes` those of its keyframe.
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
        """The paths that a delta hides; recorded as latin-1 text, which holds any bytes."""
        return [path.encode("latin-1") for path in self.removed]


def chain_of(layer: Layer, layers: Mapping[str, Layer]) -> list[Layer]:
    """The layer and those below it, top first; KeyError where one is gone."""
    chain = [layer]
    while (base := chain[-1].base) is not None:
        chain.append(layers[base])
    return chain


def blobs_path(trees: Path) -> Path:
    """The files that layers share."""
    return trees.parent / "blobs"


RECORD = "layer.json"


def write_record(directory: Path, layer: Layer) -> None:
    """Write `layer.json`, with the boot in which the layer was proven.

    Nothing is flushed, so a power failure may tear a layer: after a boot it is proven again.
    """
    temporary = directory / f"{RECORD}.new"
    temporary.write_text(json.dumps({**asdict(layer), "boot": boot_id()}), encoding="utf-8")
    temporary.rename(directory / RECORD)


def read_record(directory: Path) -> tuple[Layer, bool] | None:
    """The layer of a directory, and whether it was proven in this boot; None without a record."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        proven = record.pop("boot") == boot_id()
        layer = Layer(**{**record, "removed": tuple(record["removed"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (layer, proven) if layer.name == directory.name else None


# -- the layers there are --------------------------------------------------------------------------

NEAR = 2


class LayerIndex(dict[str, Layer]):
    """Layers by tree, with thousands of which no question looks at all. Touches no disk.

    Change it by `add` and `remove` only. `size_bytes` is the sum of their own bytes.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._above: defaultdict[str, set[str]] = defaultdict(set)
        self._times: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)

    def add(self, layer: Layer) -> None:
        """Add a layer, in place of the former one of its tree."""
        if layer.tree in self:
            self.remove(layer.tree)
        self[layer.tree] = layer
        self.size_bytes += layer.size_bytes
        insort(self._times[layer.depth], (layer.time, layer.tree))
        if layer.base is not None:
            self._above[layer.base].add(layer.tree)

    def remove(self, tree: str) -> Layer:
        """Remove a layer; those above it stay."""
        layer = self.pop(tree)
        self.size_bytes -= layer.size_bytes
        times = self._times[layer.depth]
        del times[bisect_left(times, (layer.time, tree))]
        if layer.base is not None:
            self._above[layer.base].discard(tree)
            if not self._above[layer.base]:
                del self._above[layer.base]
        return layer

    def above(self, tree: str) -> set[str]:
        """A tree and all whose layers lie on it, however high."""
        found, left = {tree}, [tree]
        while left:
            more = self._above.get(left.pop(), set()) - found
            found |= more
            left += more
        return found

    def carries(self, tree: str) -> bool:
        """Whether another layer lies on this one."""
        return tree in self._above

    def is_whole(self, tree: str, unproven: Container[str] = ()) -> bool:
        """Whether a layer and all below it exist and are proven."""
        try:
            chain = chain_of(self[tree], self)
        except KeyError:
            return False
        return all(layer.tree not in unproven for layer in chain)

    def near(self, time: int, unproven: Container[str] = ()) -> list[Layer]:
        """The layers to build on: of each depth the nearest NEAR in time that are whole, each with
        those below it.
        """
        found: dict[str, Layer] = {}
        for times in self._times.values():
            at = bisect_left(times, (time, ""))
            nearest = heapq.merge(
                reversed(times[:at]), times[at:], key=lambda each: abs(each[0] - time)
            )
            whole = (tree for _, tree in nearest if self.is_whole(tree, unproven))
            for tree in islice(whole, NEAR):
                found |= {each.tree: each for each in chain_of(self[tree], self)}
        return list(found.values())


# -- a stack of layers as one tree -----------------------------------------------------------------


def read_manifest(trees: Path, chain: Sequence[Layer]) -> Manifest:
    """The manifest of the tree that a chain of layers, top first, shows when mounted.

    Do not change it: it is kept for the next call.
    """
    # tells a layer from one that was built again in its place
    found = ((trees / layer.name / "manifest").stat() for layer in chain)
    return _read_manifest(trees, tuple(chain), tuple((s.st_ino, s.st_mtime_ns) for s in found))


@lru_cache(maxsize=4)
def _read_manifest(
    trees: Path, chain: tuple[Layer, ...], written: tuple[tuple[int, int], ...]
) -> Manifest:
    manifest = Manifest.load(trees / chain[0].name / "manifest")
    if len(chain) == 1:
        return manifest
    return _laid_on(_read_manifest(trees, chain[1:], written[1:]), manifest, chain[0].whiteouts)


def _laid_on(below: Manifest, delta: Manifest, removed: Sequence[bytes]) -> Manifest:
    """The manifest of a delta over that of its base, without the `removed` paths of that."""
    files, gone = below.files, set(removed)
    if gone:
        inside = tuple(path + b"/" for path in gone)
        files = Records(
            {
                path: entry
                for path, entry in files.items()
                if path not in gone and not path.startswith(inside)
            }
        )
    return Manifest(delta.commit, delta.tree, delta.recorded_ns, files | delta.files)


def parents(path: bytes) -> list[bytes]:
    """The directories above a path, top first, without the root."""
    parts = path.split(b"/")[:-1]
    return [b"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def verify_layer(trees: Path, chain: Sequence[Layer]) -> None:
    """Read the top layer of a chain and compare it with its record; raises ProofFailedError."""
    layer, directory = chain[0], trees / chain[0].name
    try:
        manifest = Manifest.load(directory / "manifest")
        below = read_manifest(trees, chain[1:]) if layer.base else None
        whole = prove_files_of(directory, manifest, layer.tree, below, layer.whiteouts)
        above = directory / "index"
        index = above / ".git" / "index"
        is_alone = set(above.rglob("*")) == {index.parent, index}
        if not is_alone or index.read_bytes() != index_bytes(whole):
            raise _unproven("the index", "its bytes changed")
    except OSError as error:
        raise _unproven(f"template layer {layer.name}", f"{error}") from error


def prove_files_of(
    layer: Path, manifest: Manifest, tree: str, below: Manifest | None, removed: Sequence[bytes]
) -> Manifest:
    """Prove that a layer's directory has what its manifest says and nothing else, and that it shows
    `tree` on what is `below`; answers the manifest of both. Raises ProofFailedError.
    """
    files, expected = layer / "files", set(manifest.files)
    if below is None:
        whole, found_tree = manifest, hash_tree(files, manifest)
    else:
        whole = _laid_on(below, manifest, removed)
        found_tree = tree_id(whole)
        directories = [path for path, entry in manifest.files.items() if entry.is_directory]
        whiteouts = [path for path in removed if path not in expected]
        prove_files(files, manifest.owner, manifest.files, expected.difference(directories))
        with opened(open_directory(files)) as root, TreeReader(root, ActingAs(None)) as reader:
            for path in directories:
                found = reader.find_stat(path)
                if found is None or found.st_mode != stat.S_IFDIR | 0o755:
                    raise _unproven(shown_path(path), "it is no directory")
            for path in whiteouts:  # overlayfs: a character device 0/0
                found = reader.find_stat(path)
                if found is None or not stat.S_ISCHR(found.st_mode) or found.st_rdev != 0:
                    raise _unproven(shown_path(path), "its whiteout is missing")
        expected.update(whiteouts)
        expected.update({parent for path in expected for parent in parents(path)})
    if found_tree != tree:
        raise _unproven(f"tree {tree}", f"what was written hashes to {found_tree}")
    for name in os.listdir(os.fsencode(files)):
        for path in iter_files(files, name):
            if path not in expected:
                raise _unproven(shown_path(path), "it does not belong there")
    return whole


def _unproven(subject: str, fact: str) -> ProofFailedError:
    return ProofFailedError(f"cannot prove {subject}: {fact}", hint="it will be built again")
