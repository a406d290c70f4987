"""Container images: their layers, what is visible through them, extraction of repositories.

Reads the formats of `docker save` and `podman save` (manifest.json), the OCI image layout
(index.json), and any other tar as one root file system. A whiteout is `.wh.NAME`, or `.wh..wh..opq`
for everything below a directory.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..jsontext import loads
from ..protocol import RootLeak
from .contents import (
    BLOCK_BYTES,
    DAMAGED,
    Contents,
    Inside,
    Member,
    ScannedTree,
    TooMuchError,
    iter_tar,
    open_tar,
)

_OPAQUE = ".wh..wh..opq"


class RootFilesystem(NamedTuple):
    """One root file system: named layers, the lowest first."""

    layers: list[tuple[str, ScannedTree]]

    def shows(self, number: int, path: str) -> bool:
        """Return whether a path of a layer is visible through those above."""
        name = path.rpartition("/")[2]
        if name.startswith(".wh.") and len(self.layers) > 1:
            return False
        return not any(_covers(tree, path) for _, tree in self.layers[number + 1 :])

    def has(self, path: str) -> bool:
        """Return whether a file or directory exists in any layer."""
        below = f"{path}/"
        trees = [tree for _, tree in self.layers]
        if path == "" or any(path in tree.files or path in tree.directories for tree in trees):
            return True
        return any(name.startswith(below) for tree in trees for name in tree.files)

    def git_directories(self) -> dict[str, bool]:
        """Return every directory with HEAD and objects, and whether its HEAD is visible."""
        stores = {
            store for _, tree in self.layers for path in tree.files for store in _stores_of(path)
        }
        directories = dict[str, bool]()
        for number, (_, tree) in enumerate(self.layers):
            for store in stores:
                head = f"{store}/HEAD" if store else "HEAD"
                if head in tree.files or head in tree.links:
                    directories[store] = directories.get(store, False) or self.shows(number, head)
        return directories


def _covers(above: ScannedTree, path: str) -> bool:
    if path in above.files or path in above.directories:
        return True
    while path:
        directory, _, name = path.rpartition("/")
        start = f"{directory}/" if directory else ""
        if f"{start}.wh.{name}" in above.files or f"{start}{_OPAQUE}" in above.files:
            return True
        if directory in above.files:  # a file or link replaces the directory
            return True
        path = directory
    return False


def _stores_of(path: str) -> Iterator[str]:
    start = path.find("objects/")
    while start >= 0:
        if start == 0 or path[start - 1] == "/":
            yield path[: max(0, start - 1)]
        start = path.find("objects/", start + 1)


# -- finding the layers ----------------------------------------------------------------------------


def views_of(contents: Contents) -> list[RootFilesystem]:
    """Return a view for each image that an archive describes; else one of everything in it."""
    views = list[RootFilesystem]()
    for image in _saved(contents) or _laid_out(contents):
        layers = list[tuple[str, ScannedTree]]()
        for named in image:
            member = contents.trees[""].links.get(named, named)
            if member in contents.trees:
                layers.append((member, contents.trees[member]))
            else:
                contents.unreadable(
                    named, "the image names this layer, but it is not a tar archive"
                )
        views.append(RootFilesystem(layers))
    if not views:
        views = [RootFilesystem([("", _merged(contents))])]
    return views


def _merged(contents: Contents) -> ScannedTree:
    """Merge the trees of nested archives into the outer one."""
    top = contents.trees[""]
    for name in [name for name in contents.trees if name]:
        tree = contents.trees.pop(name)
        inside = [Inside(name, path, oid) for path, oid in tree.files.items() if oid]
        inside += [Inside(f"{name}!{archive}", path, oid) for archive, path, oid in tree.inside]
        top.inside += inside
        top.packs |= {f"{name}!{path}" for path in tree.packs}
    return top


def _saved(contents: Contents) -> list[list[str]]:
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        images = _document(contents, "manifest.json")
        return [[str(layer) for layer in image["Layers"]] for image in images]
    return []


_NESTED_LIMIT = 4  # an index of indexes


def _laid_out(contents: Contents) -> list[list[str]]:
    pending, images = [("index.json", 0)], list[list[str]]()
    while pending:
        name, depth = pending.pop()
        with suppress(KeyError, TypeError, ValueError, RecursionError, AttributeError):
            document = _document(contents, name)
            if depth < _NESTED_LIMIT:
                pending += [
                    (_blob(manifest), depth + 1) for manifest in document.get("manifests", [])
                ]
            if "layers" in document:
                # beside an image buildx puts attestations, whose layers are JSON (in-toto)
                tars = [layer for layer in document["layers"] if ".tar" in layer["mediaType"]]
                images.append([_blob(layer) for layer in tars])
    return images


def _document(contents: Contents, name: str) -> Any:
    return loads(contents.documents[name])


def _blob(described: Mapping[str, Any]) -> str:
    return "blobs/" + str(described["digest"]).replace(":", "/", 1)


# -- extracting repositories -----------------------------------------------------------------------


# of repositories that are taken out of an image to be judged
_COPY_LIMIT_BYTES = 16 << 30


def take_out(
    archive: Path, view: RootFilesystem, directories: Iterable[str], into: Path
) -> Iterator[RootLeak]:
    """Extract what a container sees below `directories`; yields a leak for each failure.

    No link is made, so no name leads out of `into`.
    """
    wanted = dict[tuple[str, str], list[str]]()
    starts = tuple(f"{directory}/" if directory else "" for directory in directories)
    for number, (key, tree) in enumerate(view.layers):
        for path in (*tree.files, *tree.links):
            if path.startswith(starts) and view.shows(number, path):
                wanted.setdefault((key, tree.links.get(path, path)), []).append(path)
    left = _COPY_LIMIT_BYTES
    with suppress(*DAMAGED):  # reported when the archive was read
        for key, member in _members_of(archive, {key for key, _ in wanted}):
            paths = wanted.get((key, member.path), [])
            left -= member.info.size * len(paths)
            for path in paths:
                try:
                    if left < 0:
                        limit = f"{_COPY_LIMIT_BYTES >> 30} GiB"
                        raise TooMuchError(f"the repositories have more than {limit}")
                    _copy(member, into / path, into / paths[0])
                except (OSError, ValueError) as error:
                    fact = f"it cannot be copied: {error}"
                    yield RootLeak(kind="unreadable", path=path, detail=fact)


def _members_of(archive: Path, keys: set[str]) -> Iterator[tuple[str, Member]]:
    """Iterate the members of some trees; each is readable until the next."""
    with archive.open("rb", buffering=0) as file:
        outer = open_tar(file, archive.stat().st_size)
        for member in iter_tar(outer) if outer else ():
            if isinstance(member, str):
                continue
            yield "", member
            if member.path in keys and member.source:
                inner = open_tar(member.source, member.info.size)
                members = iter_tar(inner) if inner else ()
                yield from ((member.path, item) for item in members if isinstance(item, Member))


def _copy(member: Member, target: Path, first: Path) -> None:
    """Write a member as a regular file. It is read for `first`, and copied from there."""
    if not member.source:
        raise ValueError("it is not a regular file")
    target.parent.mkdir(parents=True, exist_ok=True)
    if target != first:
        shutil.copyfile(first, target)
        return
    with target.open("wb") as file:
        while block := member.source.read(BLOCK_BYTES):
            file.write(block)
