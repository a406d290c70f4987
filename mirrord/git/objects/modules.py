"""Submodules and LFS pointers of commits, and trees that have their files.

A composed tree is a commit's tree in which the tree of a submodule's commit stands in place of the
submodule, and an LFS object in place of its pointer. A mirror has one repository for all of them,
which borrows from the mirrors. Runs in workers.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import CorruptObjectError, GitFailedError
from ...model import TREE_DEPTH_LIMIT
from ...quoting import decode_name, encode_name
from ..command import run_git_sync
from ..lfs import POINTER_BYTES, Pointer, parse_pointer, read_object
from ..modes import DIRECTORY, FILE, KIND, SUBMODULE
from ..patterns import Attributes
from .repository import Objects, open_objects, read_commit
from .scratch import ScratchObjects, make_repository
from .text import is_of_lfs
from .trees import BaseTree


class Link(NamedTuple):
    """A submodule in a tree; `name` and `url` are those of `.gitmodules`, None without an entry."""

    path: str
    commit: str
    name: str | None
    url: str | None


class PointerFile(NamedTuple):
    path: bytes
    mode: int
    pointer: Pointer


class Needs(NamedTuple):
    """What a commit's tree needs from elsewhere: submodules, and LFS objects, from `lfs_url` where
    its `.lfsconfig` says so.
    """

    tree: str
    links: tuple[Link, ...] = ()
    pointers: tuple[PointerFile, ...] = ()
    lfs_url: str | None = None

    @property
    def objects(self) -> frozenset[Pointer]:
        return frozenset(file.pointer for file in self.pointers)


class _Below(NamedTuple):
    """What is below a directory, by path from there."""

    links: tuple[tuple[bytes, str], ...] = ()
    attributes: tuple[tuple[bytes, str], ...] = ()


_NOTHING = _Below()
_PointerFiles = tuple[PointerFile, ...]
_Files = tuple[tuple[bytes, int, Pointer], ...]


def read_needs(git_dir: Path, commits: Iterable[str]) -> dict[str, Needs]:
    """Return what commits need; each distinct directory and file is read once for all of them."""
    with open_objects(git_dir) as objects, objects.reading_many():
        reader = _Reader(objects)
        trees = {commit: read_commit(objects, commit).tree for commit in commits}
        reader.read_ahead(trees.values())
        return {commit: reader.needs(tree) for commit, tree in trees.items()}


def read_all_needs(wanted: Iterable[tuple[Path, Iterable[str]]]) -> list[dict[str, Needs]]:
    """Return what commits of many repositories need."""
    return [read_needs(git_dir, commits) for git_dir, commits in wanted]


class _Reader:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._below: dict[str, _Below] = {}
        self._files: dict[str, _Files] = {}  # pointers below a directory
        self._pointers: dict[str, Pointer | None] = {}
        self._needs: dict[str, Needs] = {}
        self._configs: dict[str, dict[str, str]] = {}
        self._filtered: dict[tuple[_Files, tuple[tuple[bytes, str], ...]], _PointerFiles] = {}
        self._blobs: dict[str, bytes] = {}
        self._names: dict[str, dict[bytes, tuple[int, str]]] = {}

    def needs(self, tree: str) -> Needs:
        if tree not in self._needs:
            below = self._read(tree, 0)
            pointers, url = self._pointer_files(tree, below), None
            if pointers and (named := self._names_in(tree).get(b".lfsconfig")):
                url = self._config(named).get("lfs.url")
            links = tuple(self._links(tree, below.links))
            self._needs[tree] = Needs(tree, links, pointers, url)
        return self._needs[tree]

    def read_ahead(self, trees: Iterable[str]) -> None:
        """Read the `.gitmodules` of all trees that have submodules."""
        linked = (self._names_in(tree) for tree in trees if self._read(tree, 0).links)
        named = (names.get(b".gitmodules", (0, "")) for names in linked)
        self.read_configs(blob for mode, blob in named if mode & KIND == FILE)

    def _names_in(self, tree: str) -> dict[bytes, tuple[int, str]]:
        if tree not in self._names:
            self._names[tree] = BaseTree(self._objects, tree).names_in(b"")
        return self._names[tree]

    def _read(self, tree: str, depth: int) -> _Below:
        if (below := self._below.get(tree)) is not None:
            return below
        links, attributes = list[tuple[bytes, str]](), list[tuple[bytes, str]]()
        for name, (mode, oid) in self._names_in(tree).items():
            if mode == DIRECTORY and depth < TREE_DEPTH_LIMIT:
                inner = self._read(oid, depth + 1)
                if inner is not _NOTHING:
                    start = name + b"/"
                    links += ((start + path, commit) for path, commit in inner.links)
                    attributes += ((start + path, blob) for path, blob in inner.attributes)
            elif mode == SUBMODULE:
                links.append((name, oid))
            elif name == b".gitattributes" and mode & KIND == FILE:
                attributes.append((name, oid))
        result = _Below(tuple(links), tuple(attributes)) if links or attributes else _NOTHING
        self._below[tree] = result
        return result

    def _pointer_files(self, tree: str, below: _Below) -> _PointerFiles:
        """Return the pointers that the attributes filter; the same ones for equal trees."""
        if not any(b"filter=lfs" in self._blob(oid) for _, oid in below.attributes):
            return ()
        key = self._files_below(tree), below.attributes
        if key not in self._filtered:
            files = {path.rpartition(b"/")[0]: self._blob(oid) for path, oid in below.attributes}
            attributes = Attributes(files.get)
            self._filtered[key] = tuple(
                PointerFile(path, mode, pointer)
                for path, mode, pointer in key[0]
                if is_of_lfs(attributes, path)
            )
        return self._filtered[key]

    def _files_below(self, tree: str) -> _Files:
        if (cached := self._files.get(tree)) is not None:
            return cached
        listed = list[tuple[bytes, int, Pointer]]()
        for name, (mode, oid) in self._names_in(tree).items():
            # looked up here: each file of each tree comes by, and most are known and no pointers
            if mode == DIRECTORY:
                inner = self._files[oid] if oid in self._files else self._files_below(oid)
                if inner:
                    listed += ((name + b"/" + path, mode, pointer) for path, mode, pointer in inner)
            elif mode & KIND == FILE:
                is_known = oid in self._pointers
                pointer = self._pointers[oid] if is_known else self._pointer(oid)
                if pointer:
                    listed.append((name, mode, pointer))
        self._files[tree] = files = tuple(listed)
        return files

    def _pointer(self, blob: str) -> Pointer | None:
        if blob not in self._pointers:
            small = self._objects.blob_size(blob) < POINTER_BYTES
            data = self._objects.read_blob(blob) if small else b""
            self._pointers[blob] = parse_pointer(data)
        return self._pointers[blob]

    def _blob(self, oid: str) -> bytes:
        if oid not in self._blobs:
            self._blobs[oid] = self._objects.read_blob(oid)
        return self._blobs[oid]

    def _links(self, tree: str, links: Sequence[tuple[bytes, str]]) -> Iterable[Link]:
        if not links:
            return
        named = self._names_in(tree).get(b".gitmodules")
        sections: dict[str, dict[str, str]] = {}
        for key, value in (self._config(named) if named else {}).items():
            name, _, variable = key.removeprefix("submodule.").rpartition(".")
            if key.startswith("submodule.") and name:
                sections.setdefault(name, {})[variable] = value
        by_path = {
            section.get("path"): (name, section.get("url")) for name, section in sections.items()
        }
        for path, commit in sorted(links):
            text = decode_name(path)
            yield Link(text, commit, *by_path.get(text, (None, None)))

    def _config(self, named: tuple[int, str]) -> dict[str, str]:
        """Return the keys of a configuration file; none where git cannot read it."""
        mode, blob = named
        if mode & KIND != FILE:
            return {}
        return self.read_configs([blob]).get(blob, {})

    def read_configs(self, blobs: Iterable[str]) -> dict[str, dict[str, str]]:
        """Read configuration files by one git; by one each, where one of them is malformed."""
        wanted = [blob for blob in dict.fromkeys(blobs) if blob not in self._configs]
        if not wanted:
            return self._configs
        text = b"".join(
            b'[mirrord-file "%s"]\n\tbegins\n%s\n\n' % (blob.encode(), self._blob(blob))
            for blob in wanted
        )
        try:
            listed = run_git_sync(
                "config", "-z", "--no-includes", "--list", "--file=-",
                git_dir=self._objects.git_dir, stdin=text, doing="read .gitmodules",
            ).stdout  # fmt: skip
        except (CorruptObjectError, GitFailedError):
            if len(wanted) > 1:
                for blob in wanted:
                    self.read_configs([blob])
                return self._configs
            listed = b""
        self._configs |= {blob: {} for blob in wanted}
        keys = dict[str, str]()
        for item in decode_name(listed).split("\0"):
            key, _, value = item.partition("\n")
            if key.startswith("mirrord-file.") and key.endswith(".begins"):
                blob = key.removeprefix("mirrord-file.").removesuffix(".begins")
                keys = self._configs[blob] if blob in wanted else {}
            elif key:
                keys.setdefault(key, value)
        return self._configs


class Part(NamedTuple):
    """A submodule to compose: its path from the top, its mirror and its commit."""

    path: str
    mirror: Path
    commit: str


class Whole(NamedTuple):
    """A commit of a mirror to compose, with its submodules."""

    mirror: Path
    commit: str
    parts: tuple[Part, ...]


def compose(target: Path, wholes: Sequence[Whole]) -> list[str]:
    """Write composed trees into the repository `target`, which may exist; return their ids.

    Its own objects are trees and LFS objects; it borrows all others from the mirrors.
    """
    lenders = dict.fromkeys(
        path for whole in wholes for path in (whole.mirror, *(part.mirror for part in whole.parts))
    )
    scratch = ScratchObjects(target / "objects")
    make_repository(target, borrows_from=tuple(lenders))
    with open_objects(target) as objects:
        composer = _Composer(objects, scratch)
        return [composer.compose(whole) for whole in wholes]


class _Composer:
    def __init__(self, objects: Objects, scratch: ScratchObjects) -> None:
        self._objects, self._scratch = objects, scratch
        self._reader = _Reader(objects)
        self._blobs: dict[tuple[Path, Pointer], str | None] = {}
        self._written: dict[tuple[Path, str, tuple[tuple[str, str], ...]], str] = {}

    def compose(self, whole: Whole) -> str:
        own: dict[str, str] = {}
        for part in sorted(whole.parts, key=lambda part: part.path.count("/"), reverse=True):
            inside = _below(part.path, own)
            own[part.path] = self._write(part.mirror, part.commit, inside)
        return self._write(whole.mirror, whole.commit, own)

    def _write(self, mirror: Path, commit: str, below: Mapping[str, str]) -> str:
        key = mirror, commit, tuple(sorted(below.items()))
        if key not in self._written:
            needs = self._reader.needs(read_commit(self._objects, commit).tree)
            edits: dict[bytes, tuple[int, str] | None] = {
                file.path: (file.mode, blob)
                for file in needs.pointers
                if (blob := self._blob(mirror, file.pointer))
            }
            edits |= {encode_name(path): (DIRECTORY, inner) for path, inner in below.items()}
            base = BaseTree(self._objects, needs.tree)
            self._written[key] = self._scratch.write_tree(base, edits) if edits else needs.tree
        return self._written[key]

    def _blob(self, mirror: Path, pointer: Pointer) -> str | None:
        """Write an LFS object as a blob; None where the mirror does not have it."""
        key = mirror, pointer
        if key not in self._blobs:
            data = read_object(mirror, pointer)
            self._blobs[key] = None if data is None else self._scratch.write_blob(data)
        return self._blobs[key]


def _below(path: str, trees: dict[str, str]) -> dict[str, str]:
    """Take out the trees below a path, keyed from there."""
    start = f"{path}/"
    below = {key: trees.pop(key) for key in list(trees) if key.startswith(start)}
    return {key.removeprefix(start): tree for key, tree in below.items()}
