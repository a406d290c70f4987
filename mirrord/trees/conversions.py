"""What .gitattributes makes of a file's bytes, and which files a change of them concerns."""

import stat
from collections.abc import Iterable

from ..git.objects.repository import Objects
from ..git.objects.text import Conversions
from ..git.objects.trees import TreeEntry
from .manifest import Entries, Manifest

_ATTRIBUTES = b".gitattributes"


def conversions_for(objects: Objects, files: Entries | Iterable[TreeEntry]) -> Conversions:
    """Return the conversions of a commit, whose attribute files are among `files`."""
    if isinstance(files, Entries):
        files = tree_entries(files, filter(is_attributes, files))
    attributes = [
        entry for entry in files if is_attributes(entry.path) and stat.S_ISREG(entry.mode)
    ]
    return Conversions(objects, attributes)


def is_attributes(path: bytes) -> bool:
    return path.endswith(_ATTRIBUTES) and path.rpartition(b"/")[2] == _ATTRIBUTES


def reconverted(
    objects: Objects, manifest: Manifest, after: Conversions, kept: Entries
) -> list[TreeEntry]:
    """Return the unchanged files that a changed `.gitattributes` converts differently."""
    before = conversions_for(objects, manifest.files)
    regular = [path for path, entry in kept.items() if stat.S_ISREG(entry.mode)]
    return tree_entries(kept, [path for path in regular if before.find(path) != after.find(path)])


def tree_entries(files: Entries, paths: Iterable[bytes]) -> list[TreeEntry]:
    """Return git's entries of those paths that are in the tree."""
    pairs = ((path, files.get(path)) for path in paths)
    return [TreeEntry(path, entry.mode, entry.oid.hex()) for path, entry in pairs if entry]
