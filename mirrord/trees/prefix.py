"""The environment of a pool tree, in a worker: a copy of the layers that an overlay would show.

Where nothing can be mounted it is not at the path that it was built for. So in its scripts and path
files this path is that of the copy, and /testbed that of the tree; in layers they are as built.
"""

import os
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import ProofFailedError, full_disk_named
from ..git.modes import DIRECTORY
from ..host.files import open_directory, open_top, opened
from ..host.processes import ActingAs, Owner
from ..host.trash import TrashDirectory
from ..places import ENVIRONMENT, TESTBED
from .layer import lay, with_layers
from .manifest import NO_OBJECT, Entries, Entry, Manifest
from .pooled import has_top
from .reader import TreeReader
from .relocation import Relocation
from .scan import scan
from .writer import TreeWriter


class Prefix(NamedTuple):
    """A copy at `path` of `layers`, the lowest first, and of a checkout's `own` layer on them.

    `manifest` is the record of what the layers have, to which its changes are relative; `tree` is
    beside it. What is taken away goes to `trash`, which the caller removes.
    """

    path: Path
    tree: Path
    manifest: Path
    layers: tuple[Path, ...]
    own: Path | None
    owner: Owner
    trash: Path

    @property
    def made_of(self) -> str:
        return ":".join(map(str, self.layers))

    @property
    def relocation(self) -> Relocation:
        return Relocation({ENVIRONMENT: self.path, TESTBED: self.tree})

    @property
    def as_built(self) -> Relocation:
        return Relocation({str(self.path): ENVIRONMENT, str(self.tree): TESTBED})


def make_prefix(prefix: Prefix) -> None:
    """Have the copy as its layers say: what changed in it is restored, else it is made anew."""
    with full_disk_named("an environment"), closing(TrashDirectory(prefix.trash)) as trash:
        if not _restore(prefix, trash):
            _copy(prefix, trash)
        if prefix.own is not None:
            lay(prefix.own, prefix.path, prefix.owner, trash, relocation=prefix.relocation)


def _copy(prefix: Prefix, trash: TrashDirectory) -> None:
    with opened(open_directory(prefix.path.parent)) as above:
        name = os.fsencode(prefix.path.name)
        trash.discard(above, name)
        os.mkdir(name, 0o755, dir_fd=above)
    with opened(open_top(prefix.path)) as top:
        os.fchown(top, *prefix.owner)
        entry = Entry(DIRECTORY, NO_OBJECT, NO_OBJECT).with_stat(os.fstat(top))
    for layer in prefix.layers:
        lay(layer, prefix.path, prefix.owner, trash, relocation=prefix.relocation)
    empty = Manifest("", prefix.made_of, 0, Entries({b"": entry}))
    laid = with_layers(empty, prefix.layers, prefix.path, relocation=prefix.relocation)
    laid.save(prefix.manifest)


def _restore(prefix: Prefix, trash: TrashDirectory) -> bool:
    """Undo what was changed in the copy; return False if there is none that can be used."""
    if not has_top(prefix.path, prefix.owner):
        return False
    try:
        manifest = Manifest.load(prefix.manifest)
    except (FileNotFoundError, ProofFailedError):
        return False
    if (manifest.tree, manifest.owner) != (prefix.made_of, prefix.owner):
        return False
    scanned = scan(prefix.path, manifest)
    if scanned.is_empty:
        return True
    lost = {*scanned.modified, *scanned.missing}
    acting = ActingAs(prefix.owner)
    with (
        opened(open_top(prefix.path)) as top,
        TreeWriter(top, acting, mtime_ns=time.time_ns(), trash=trash) as writer,
    ):
        for path in scanned.extra:
            writer.remove(path)
    for layer in prefix.layers:
        skips = partial(_is_not_in, lost)
        lay(layer, prefix.path, prefix.owner, trash, skips=skips, relocation=prefix.relocation)
    with opened(open_top(prefix.path)) as top, acting, TreeReader(top, acting) as reader:
        stats = {path: seen for path in lost if (seen := reader.find_stat(path)) is not None}
    manifest = manifest.with_stats(scanned.proven | stats).settled(scanned.began_ns)
    left = scan(prefix.path, manifest)
    manifest.with_stats(left.proven).save(prefix.manifest)
    return left.is_empty


def _is_not_in(paths: set[bytes], path: bytes) -> bool:
    return path not in paths
