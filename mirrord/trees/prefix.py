"""The environment of a pool tree, in a worker: a copy of the layers that an overlay would show.

Where nothing can be mounted it is not at the path that it was built for. So in its scripts and path
files this path is that of the copy, and /testbed that of the tree; in layers they are as built.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ..errors import ProofFailedError, full_disk_named
from ..host.files import open_directory, open_top, opened
from ..host.processes import Owner
from ..host.trash import TrashDirectory
from ..places import ENVIRONMENT, TESTBED
from .layer import lay, with_layers
from .manifest import DIRECTORY, NO_OBJECT, Entries, Entry, Manifest
from .pooled import has_top
from .relocation import Relocation
from .scan import scan


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
    def relocation(self) -> Relocation:
        return Relocation({ENVIRONMENT: self.path, TESTBED: self.tree})

    @property
    def as_built(self) -> Relocation:
        return Relocation({str(self.path): ENVIRONMENT, str(self.tree): TESTBED})


def make_prefix(prefix: Prefix) -> None:
    """Have the copy as its layers say. One in which nothing changed is kept."""
    made_of = ":".join(map(str, prefix.layers))
    if prefix.own is None and _is_clean(prefix, made_of):
        return
    with full_disk_named("an environment"), closing(TrashDirectory(prefix.trash)) as trash:
        with opened(open_directory(prefix.path.parent)) as above:
            name = os.fsencode(prefix.path.name)
            trash.discard(above, name)
            os.mkdir(name, 0o755, dir_fd=above)
        with opened(open_top(prefix.path)) as top:
            os.fchown(top, *prefix.owner)
            entry = Entry(DIRECTORY, NO_OBJECT, NO_OBJECT).with_stat(os.fstat(top))
        for layer in prefix.layers:
            lay(layer, prefix.path, prefix.owner, trash, relocation=prefix.relocation)
        empty = Manifest("", made_of, 0, Entries({b"": entry}))
        laid = with_layers(empty, prefix.layers, prefix.path, relocation=prefix.relocation)
        laid.save(prefix.manifest)
        if prefix.own is not None:
            lay(prefix.own, prefix.path, prefix.owner, trash, relocation=prefix.relocation)


def _is_clean(prefix: Prefix, made_of: str) -> bool:
    if not has_top(prefix.path, prefix.owner):
        return False
    try:
        manifest = Manifest.load(prefix.manifest)
    except (FileNotFoundError, ProofFailedError):
        return False
    is_same = (manifest.tree, manifest.owner) == (made_of, prefix.owner)
    return is_same and scan(prefix.path, manifest).is_empty
