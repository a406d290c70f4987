"""Stacks of layers as one tree: the manifest that a mounted stack shows, and its index.

Owns what must hold of a stack and not of one layer. Sync; runs in workers, reads only what was proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ..files.index import index_bytes
from ..files.manifest import Manifest
from ..files.records import Records
from .layer import Layer, index_path


def read_manifest(trees: Path, chain: Sequence[Layer]) -> Manifest:
    """The manifest of the tree that a chain of layers, top first, shows when mounted.

    Not to be changed: it is kept for the next call.
    """
    written = tuple((trees / layer.name / "manifest").stat() for layer in chain)
    return _read_manifest(
        trees, tuple(chain), tuple((found.st_ino, found.st_mtime_ns) for found in written)
    )


@lru_cache(maxsize=4)
def _read_manifest(
    trees: Path, chain: tuple[Layer, ...], written: tuple[tuple[int, int], ...]
) -> Manifest:
    """`written` tells a layer from one that was built again in its place."""
    manifest = Manifest.load(trees / chain[0].name / "manifest")
    if len(chain) == 1:
        return manifest
    return laid_on(_read_manifest(trees, chain[1:], written[1:]), manifest, chain[0])


def laid_on(below: Manifest, delta: Manifest, layer: Layer) -> Manifest:
    """The manifest of a delta over that of its base."""
    gone = set(layer.whiteouts)
    if not gone:
        return Manifest(delta.commit, delta.tree, delta.recorded_ns, below.files | delta.files)
    inside = tuple(path + b"/" for path in gone)
    files = {
        path: entry
        for path, entry in below.files.items()
        if path not in gone and not path.startswith(inside)
    }
    return Manifest(delta.commit, delta.tree, delta.recorded_ns, Records(files) | delta.files)


def write_index(manifest: Manifest, layer: Path) -> int:
    """Give a layer its directory with `.git/index`, which all who mount the stack see; its size in bytes."""
    data = index_bytes(manifest)
    above = index_path(layer)
    file = above / ".git" / "index"
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    for path, mode in ((above, 0o755), (file.parent, 0o755), (file, 0o644)):
        path.chmod(mode)
    return len(data)


def parents(path: bytes) -> list[bytes]:
    """The directories above a path, top first, without the root."""
    parts = path.split(b"/")[:-1]
    return [b"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
