"""Proof that a layer holds what its record says, by content, whiteouts included.

Owns the comparison that is made before anybody gets a layer, after a reboot, and in a scrub. Sync; runs in workers; never mends.
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
from ..files.descent import Descent
from ..files.hashing import hash_tree, prove_files, tree_id
from ..files.index import index_bytes
from ..files.manifest import Manifest
from ..files.records import Records
from ..files.scan import iter_files
from .layers import Layer, files_path, index_path


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


_HINT = "it will be built again"


def verify_layer(trees: Path, chain: Sequence[Layer]) -> None:
    """Read the top layer of a chain again and compare it with its record; raises ProofFailedError."""
    layer = chain[0]
    files = files_path(trees, layer)
    try:
        manifest = Manifest.load(trees / layer.name / "manifest")
        if layer.base is None:
            whole = manifest
            prove_tree_id(hash_tree(files, manifest), layer.tree)
            prove_nothing_else(files, set(manifest.files))
        else:
            whole = laid_on(read_manifest(trees, chain[1:]), manifest, layer)
            prove_delta(files, manifest, [p for p in layer.whiteouts if p not in manifest.files])
            prove_tree_id(tree_id(whole), layer.tree)
        _prove_index(index_path(trees / layer.name), whole)
    except OSError as error:
        raise ProofFailedError(
            f"cannot prove template layer {layer.name}: {error}", hint=_HINT
        ) from error


def _prove_index(directory: Path, manifest: Manifest) -> None:
    """The index is what is written of the manifest, and nothing lies beside it."""
    found = {path.relative_to(directory) for path in directory.rglob("*")}
    if found != {Path(".git"), Path(".git/index")} or (
        directory / ".git/index"
    ).read_bytes() != index_bytes(manifest):
        raise ProofFailedError("cannot prove the index: it is not what was written", hint=_HINT)


def prove_delta(files: Path, manifest: Manifest, whiteouts: Sequence[bytes]) -> None:
    prove_files(
        files,
        manifest.owner,
        manifest.files,
        (path for path, entry in manifest.files.items() if not entry.is_directory),
    )
    _prove_directories(
        files, [path for path, entry in manifest.files.items() if entry.is_directory]
    )
    with opened(open_directory(files)) as root, Descent(root, ActingAs(None)) as reader:
        for path in whiteouts:
            found = reader.find_stat(path)
            if found is None or not stat.S_ISCHR(found.st_mode) or found.st_rdev != 0:
                raise ProofFailedError(
                    f"cannot prove {shown_path(path)}: its whiteout is missing", hint=_HINT
                )
    above = {parent for path in (*manifest.files, *whiteouts) for parent in parents(path)}
    prove_nothing_else(files, {*manifest.files, *whiteouts, *above})


def _prove_directories(files: Path, paths: Sequence[bytes]) -> None:
    """A directory of a delta is a directory; what is in it was, or will be, looked at by name."""
    with opened(open_directory(files)) as root, Descent(root, ActingAs(None)) as reader:
        for path in paths:
            found = reader.find_stat(path)
            if (
                found is None
                or stat.S_IFMT(found.st_mode) != stat.S_IFDIR
                or stat.S_IMODE(found.st_mode) != 0o755
            ):
                raise ProofFailedError(
                    f"cannot prove {shown_path(path)}: it is no directory", hint=_HINT
                )


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
