"""A stack of layers as one tree: the manifest it shows, its index, and the proof by content.

A layer is proven before anybody gets it, after a reboot, and in a scrub. Sync; runs in workers.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ...errors import ProofFailedError
from ...host.credentials import ActingAs
from ...host.files import open_directory, opened, shown_path
from ..files.hashing import hash_tree, prove_files, tree_id
from ..files.index import index_bytes
from ..files.manifest import Manifest, Records
from ..files.reader import TreeReader, iter_files
from .layers import Layer, files_path, index_path

_HINT = "it will be built again"


def read_manifest(trees: Path, chain: Sequence[Layer]) -> Manifest:
    """The manifest of the tree that a chain of layers, top first, shows when mounted.

    Do not change it: it is kept for the next call.
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
    return laid_on(_read_manifest(trees, chain[1:], written[1:]), manifest, chain[0].whiteouts)


def laid_on(below: Manifest, delta: Manifest, removed: Sequence[bytes]) -> Manifest:
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


def write_index(manifest: Manifest, layer: Path) -> int:
    """Write the index of a stack into its top layer; answers its bytes."""
    data, above = index_bytes(manifest), index_path(layer)
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


def verify_layer(trees: Path, chain: Sequence[Layer]) -> None:
    """Read the top layer of a chain and compare it with its record; raises ProofFailedError."""
    layer = chain[0]
    files = files_path(trees, layer)
    try:
        manifest = Manifest.load(trees / layer.name / "manifest")
        if layer.base is None:
            whole = manifest
            prove_tree_id(hash_tree(files, manifest), layer.tree)
            prove_nothing_else(files, set(manifest.files))
        else:
            whole = laid_on(read_manifest(trees, chain[1:]), manifest, layer.whiteouts)
            prove_delta(files, manifest, [p for p in layer.whiteouts if p not in manifest.files])
            prove_tree_id(tree_id(whole), layer.tree)
        above = index_path(trees / layer.name)
        index = above / ".git" / "index"
        if set(above.rglob("*")) != {index.parent, index} or (
            index.read_bytes() != index_bytes(whole)
        ):
            raise ProofFailedError("cannot prove the index: its bytes changed", hint=_HINT)
    except OSError as error:
        raise ProofFailedError(
            f"cannot prove template layer {layer.name}: {error}", hint=_HINT
        ) from error


def prove_delta(files: Path, manifest: Manifest, whiteouts: Sequence[bytes]) -> None:
    """Its files by content, its directories and whiteouts by kind, and that it has nothing else."""
    plain = [path for path, entry in manifest.files.items() if not entry.is_directory]
    prove_files(files, manifest.owner, manifest.files, plain)
    with opened(open_directory(files)) as root, TreeReader(root, ActingAs(None)) as reader:
        for path in (path for path, entry in manifest.files.items() if entry.is_directory):
            found = reader.find_stat(path)
            if found is None or found.st_mode != stat.S_IFDIR | 0o755:
                raise ProofFailedError(
                    f"cannot prove {shown_path(path)}: it is no directory", hint=_HINT
                )
        for path in whiteouts:  # overlayfs: a character device 0/0
            found = reader.find_stat(path)
            if found is None or not stat.S_ISCHR(found.st_mode) or found.st_rdev != 0:
                raise ProofFailedError(
                    f"cannot prove {shown_path(path)}: its whiteout is missing", hint=_HINT
                )
    above = {parent for path in (*manifest.files, *whiteouts) for parent in parents(path)}
    prove_nothing_else(files, {*manifest.files, *whiteouts, *above})


def prove_nothing_else(files: Path, expected: set[bytes]) -> None:
    for name in os.listdir(os.fsencode(files)):
        for path in iter_files(files, name):
            if path not in expected:
                raise ProofFailedError(
                    f"cannot prove {shown_path(path)}: it does not belong there", hint=_HINT
                )


def prove_tree_id(found: str, expected: str) -> None:
    if found != expected:
        raise ProofFailedError(
            f"cannot prove tree {expected}: what was written hashes to {found}", hint=_HINT
        )
