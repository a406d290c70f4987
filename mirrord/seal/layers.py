"""Scan the layers of an environment for content, objects and packs beyond a base commit.

A layer never changes, so it is read once: what is in it is kept in a file, whatever mirror it is
compared with later (`read_layer`). A comparison is for one commit of a mirror (`scan_layers`).
Repositories are judged by the names of their objects; `verify.py` reads every object, which takes
minutes.
"""

import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CorruptObjectError
from ..git.packs import PackIndex, loose_digest, pack_trailer
from ..host.files import read_plain
from ..jsontext import loads
from ..model import CommitId
from ..presence import exists
from ..protocol import RootLeak
from .contents import Contents, Inside, ScannedTree, read_directory
from .future import Future
from .images import RootFilesystem
from .leads import find_leads
from .repository import read_closure
from .scan import Scan, is_licence, project_of


class ScannedLayer(NamedTuple):
    """A layer's directory, and the file with what is in it, which `read_layer` writes."""

    path: Path
    listed: Path


class LayerScan(NamedTuple):
    """The result of a comparison: `inside` are the raw ids, joined, that the commit reaches; None
    where its closure could not be read to the end.
    """

    leaks: list[RootLeak]
    notes: list[str]
    inside: bytes | None


def read_layer(layer: ScannedLayer) -> None:
    """List what a layer has, unless it was done before. Runs in a worker."""
    if exists(layer.listed):
        return
    contents = read_directory(layer.path)
    tree = contents.trees[""]
    text = json.dumps({
        "files": {path: oid and oid.hex() for path, oid in tree.files.items()},
        "inside": [(inside.archive, inside.member, inside.oid.hex()) for inside in tree.inside],
        "packs": sorted(tree.packs),
        # every byte as one character: these files need not be UTF-8
        "texts": {path: content.decode("latin-1") for path, content in tree.texts.items()},
        "leaks": [(leak.path, leak.detail) for leak in contents.leaks],
        "notes": contents.notes,
    })  # fmt: skip
    new = layer.listed.with_name(f".building-{layer.listed.name}")
    new.write_text(text)
    new.rename(layer.listed)


def _listed(layer: ScannedLayer) -> tuple[ScannedTree, dict[str, Any]]:
    listed = loads(read_plain(layer.listed))
    tree = ScannedTree(
        files={path: oid and bytes.fromhex(oid) for path, oid in listed["files"].items()},
        inside=[Inside(path, member, bytes.fromhex(oid)) for path, member, oid in listed["inside"]],
        packs=set(listed["packs"]),
        texts={path: content.encode("latin-1") for path, content in listed["texts"].items()},
    )
    return tree, listed


def scan_layers(
    layers: Sequence[ScannedLayer], mirror: Path, commit: CommitId, inside: bytes | None
) -> LayerScan:
    """Judge a stack of listed layers, the top first, against `commit`.

    `inside` is the result of an earlier comparison for the same commit. Starts git; runs in a
    worker. Raises CommitNotFoundError.
    """
    with tempfile.TemporaryDirectory(prefix="mirrord-scan-") as directory:
        future = _KnownFuture(mirror, commit, Path(directory) / "mirror", inside)
        contents, lowest_first = Contents(), list(reversed(layers))
        view, unreadable = RootFilesystem([]), list[tuple[int, str, str]]()
        for number, layer in enumerate(lowest_first):
            tree, listed = _listed(layer)
            view.layers.append((str(number), tree))
            unreadable += [(number, path, fact) for path, fact in listed["leaks"]]
            contents.notes += listed["notes"]
        scan = _LayersScan(contents, view, future, [layer.path for layer in lowest_first])
        leaks = [
            RootLeak(kind="unreadable", path=path, detail=fact, hidden=not view.shows(number, path))
            for number, path, fact in unreadable
        ]
        leaks += [*scan.files(), *scan.packs(), *scan.installed(), *scan.repositories()]
        return LayerScan([leak for leak in leaks if not leak.hidden], contents.notes, future.known)


class _KnownFuture(Future):
    """The future of a commit, of which it is known what was `inside` its closure before."""

    def __init__(self, mirror: Path, base: CommitId, scratch: Path, inside: bytes | None) -> None:
        super().__init__(mirror, base, scratch)
        self._inside: set[bytes] | None = None
        if inside is not None:
            self._inside = {inside[start : start + 20] for start in range(0, len(inside), 20)}
        self._is_whole, self._found = True, set[bytes]()

    def outside(self, ids: Iterable[bytes]) -> dict[bytes, str]:
        objects = self.candidates(ids)
        # what the mirror gets later is outside of this closure: a comparison then needs these ids
        # alone
        if objects and self._inside is None:
            self._inside, self._is_whole = read_closure(self.mirror, self.base, self._scratch)
        inside = objects.keys() & (self._inside or set())
        self._found |= inside
        return {oid: kind for oid, kind in objects.items() if oid not in inside}

    def unknown(self, ids: Iterable[bytes]) -> set[bytes]:
        """Return those of `ids` that the mirror does not have."""
        return set(ids).difference(self.look_up(oid.hex() for oid in ids))

    @property
    def known(self) -> bytes | None:
        """The ids that were asked for and are inside, joined."""
        return b"".join(sorted(self._found)) if self._is_whole else None


_INDEX = re.compile(r"pack/pack-[0-9a-f]{40}\.idx")
_LOOSE = re.compile(r"([0-9a-f]{2})/([0-9a-f]{38})")


class _LayersScan(Scan):
    """Layers by their directories; leads out of an image lead nowhere."""

    def __init__(
        self, contents: Contents, view: RootFilesystem, future: _KnownFuture, paths: list[Path]
    ) -> None:
        super().__init__(contents, [view], future)
        self._known, self._view, self._paths = future, view, paths

    def installed(self) -> Iterator[RootLeak]:
        """Find installations of the project from its repository, at another commit."""
        project = project_of(self._future.mirror)
        for number, (_, tree) in enumerate(self._view.layers):
            for path, text in tree.texts.items():
                if not path.endswith("direct_url.json"):
                    continue
                for lead in find_leads(path, text, project):
                    oid = bytes.fromhex(lead.commit or "")
                    if lead.kind != "direct-url" or oid in self._future.past:
                        continue
                    if lead.is_own or self._future.outside([oid] if oid else []):
                        hidden = not self._view.shows(number, path)
                        yield RootLeak(kind=lead.kind, path=path, detail=lead.fact, hidden=hidden)

    def repositories(self) -> Iterator[RootLeak]:
        """Judge each repository by its visible objects; of other projects' report only damage."""
        for store in self.stores[0]:
            ids = set[bytes]()
            yield from self._read_store(store, ids)
            if ids:
                yield from self._judge(store or ".", ids)

    def _read_store(self, store: str, ids: set[bytes]) -> Iterator[RootLeak]:
        """Collect the ids of a repository's objects; yield what cannot be known."""
        objects = f"{store}/objects/" if store else "objects/"
        shown = {
            path.removeprefix(objects): directory / path
            for number, directory in enumerate(self._paths)
            for path in self._view.layers[number][1].files
            if path.startswith(objects) and self._view.shows(number, path)
        }
        for name, path in shown.items():
            fact = None
            try:
                if _INDEX.fullmatch(name):
                    index, pack = PackIndex(path), shown.get(f"{name[:-4]}.pack")
                    ids.update(index)
                    if pack is not None and pack_trailer(pack) != index.pack_checksum:
                        fact = "it is of another pack"
                elif name.endswith(".pack") and f"{name[:-5]}.idx" not in shown:
                    fact = "a pack without an index, whose objects are not known"
                elif loose := _LOOSE.fullmatch(name):
                    ids.add(bytes.fromhex(loose[1] + loose[2]))
                    if loose_digest(path) != loose[1] + loose[2]:
                        fact = "a loose object does not match its id"
            except (CorruptObjectError, OSError) as error:
                fact = f"it cannot be read: {error}"
            if fact:
                # of the repository: what is left of it could be indexed again
                yield RootLeak(kind="unreadable", path=store or ".", detail=f"{name}: {fact}")

    def _judge(self, path: str, ids: Collection[bytes]) -> Iterator[RootLeak]:
        outside = self._future.outside(ids)
        commits = sorted(oid.hex() for oid, kind in outside.items() if kind == "commit")
        if commits or set(outside.values()) - {"blob"}:
            example = f", such as commit {commits[0]}" if commits else ""
            fact = f"has {len(outside):,} objects outside of the base commit{example}"
            yield RootLeak(kind="repository", path=path, detail=fact)
        elif self._future.past.isdisjoint(ids):
            places = self._future.places(outside).items() if outside else ()
            named = [place for _, place in places if not is_licence("licence", place)]
            if named:
                fact = f"has the content of {named[0].name} of {named[0].commit}"
                yield RootLeak(kind="repository", path=path, detail=fact)
            else:
                self._contents.note(path, "a repository of another project")
        elif outside or (unknown := self._known.unknown(ids)):
            fact = f"has {len(outside or unknown):,} objects that the base commit does not reach"
            yield RootLeak(kind="repository", path=path, detail=fact)
        else:
            self._contents.note(path, "a repository with nothing but the past of the base commit")


def as_paths(leaks: Iterable[RootLeak]) -> list[str]:
    """Return the paths to hide, of files and of git directories, without those within others.

    A `!` is before the member of an archive, or in a name: both are named.
    """
    parts = [leak.path.split("!") for leak in leaks]
    paths = {"!".join(names[:end]) for names in parts for end in range(1, len(names) + 1)}
    if "." in paths:  # a root that is a repository: without objects it is none
        paths = paths - {"."} | {"objects"}
    return sorted(path for path in paths if not any(above in paths for above in _above(path)))


def _above(path: str) -> Iterator[str]:
    while path := os.path.dirname(path):
        yield path
