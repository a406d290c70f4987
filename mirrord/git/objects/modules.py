"""Submodules and LFS pointers of commits, and trees that have the files of submodules.

A composed tree is a commit's tree in which the tree of a submodule's commit stands in place of the
submodule. It is in a repository of its own, which borrows from the mirrors. Runs in workers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import CorruptObjectError, GitFailedError
from ...quoting import decode_name
from ..command import run_git_sync
from .repository import Objects, open_objects, read_commit
from .trees import BaseTree, ScratchObjects, TreeEntry, make_repository

POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:ext-[^\n]{1,200}\n)*"
    rb"oid sha256:([0-9a-f]{64})\nsize (\d{1,18})\n"
)
POINTER_BYTES = 1024
"""git-lfs takes longer files for no pointer."""
_TREE = 0o040000


class Link(NamedTuple):
    """A submodule in a tree; `name` and `url` are those of `.gitmodules`, None without an entry."""

    path: str
    commit: str
    name: str | None
    url: str | None


class Needs(NamedTuple):
    """What a commit's tree needs from elsewhere: submodules, and LFS objects with their sizes."""

    tree: str
    links: tuple[Link, ...] = ()
    pointers: tuple[tuple[str, int], ...] = ()


class _Below(NamedTuple):
    links: tuple[tuple[bytes, str], ...] = ()
    has_lfs: bool = False


def read_needs(git_dir: Path, commits: Iterable[str]) -> dict[str, Needs]:
    """Return what commits need; each distinct directory and file is read once for all of them."""
    found = {}
    with open_objects(git_dir) as objects:
        reader = _Reader(objects)
        for commit in commits:
            tree = read_commit(objects, commit).tree
            found[commit] = reader.needs(tree)
    return found


class _Reader:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._below: dict[str, _Below] = {}
        self._pointers: dict[str, tuple[tuple[str, int], ...]] = {}  # of files and directories
        self._sections: dict[str, dict[str, dict[str, str]]] = {}
        self._attributes: dict[str, bool] = {}

    def needs(self, tree: str) -> Needs:
        below = self._read(tree, 0)
        pointers: tuple[tuple[str, int], ...] = ()
        if below.has_lfs:
            pointers = tuple(dict.fromkeys(self._pointers_below(tree)))
        return Needs(tree, tuple(self._links(tree, below.links)), pointers)

    def _read(self, tree: str, depth: int) -> _Below:
        if (known := self._below.get(tree)) is not None:
            return known
        links, has_lfs = list[tuple[bytes, str]](), False
        names = BaseTree(self._objects, tree).names_in(b"")
        for name, (mode, oid) in names.items():
            if mode == _TREE and depth < _DEPTH:
                inner = self._read(oid, depth + 1)
                links += ((name + b"/" + path, commit) for path, commit in inner.links)
                has_lfs |= inner.has_lfs
            elif mode == 0o160000:
                links.append((name, oid))
            elif name == b".gitattributes":
                has_lfs |= self._asks_for_lfs(oid)
        self._below[tree] = found = _Below(tuple(links), has_lfs)
        return found

    def _asks_for_lfs(self, oid: str) -> bool:
        if oid not in self._attributes:
            self._attributes[oid] = b"filter=lfs" in self._objects.read_blob(oid)
        return self._attributes[oid]

    def _pointers_below(self, tree: str) -> tuple[tuple[str, int], ...]:
        if (known := self._pointers.get(tree)) is not None:
            return known
        found = list[tuple[str, int]]()
        for mode, oid in BaseTree(self._objects, tree).names_in(b"").values():
            if mode == _TREE:
                found += self._pointers_below(oid)
            elif mode & 0o170000 == 0o100000:
                found += self._pointer(oid)
        self._pointers[tree] = unique = tuple(dict.fromkeys(found))
        return unique

    def _pointer(self, blob: str) -> tuple[tuple[str, int], ...]:
        if blob not in self._pointers:
            small = self._objects.blob_size(blob) < POINTER_BYTES
            found = POINTER.fullmatch(self._objects.read_blob(blob)) if small else None
            self._pointers[blob] = ((found[1].decode(), int(found[2])),) if found else ()
        return self._pointers[blob]

    def _links(self, tree: str, links: Sequence[tuple[bytes, str]]) -> Iterable[Link]:
        if not links:
            return
        named = BaseTree(self._objects, tree).find(b".gitmodules")
        sections = self._read_sections(named.oid) if named and _is_file(named) else {}
        by_path = {each.get("path"): (name, each.get("url")) for name, each in sections.items()}
        for path, commit in sorted(links):
            text = decode_name(path)
            name, url = by_path.get(text, (None, None))
            yield Link(text, commit, name, url)

    def _read_sections(self, blob: str) -> dict[str, dict[str, str]]:
        """Read a `.gitmodules` by git, which follows no include in a blob."""
        if blob not in self._sections:
            sections: dict[str, dict[str, str]] = {}
            try:
                listed = run_git_sync(
                    "config", "-z", "--no-includes", "--list", "--blob", blob,
                    git_dir=self._objects.git_dir, doing="read .gitmodules",
                ).stdout  # fmt: skip
            except (CorruptObjectError, GitFailedError):
                listed = b""
            for item in decode_name(listed).split("\0"):
                key, _, value = item.partition("\n")
                name, _, variable = key.removeprefix("submodule.").rpartition(".")
                if key.startswith("submodule.") and name:
                    sections.setdefault(name, {}).setdefault(variable, value)
            self._sections[blob] = sections
        return self._sections[blob]


_DEPTH = 200


def _is_file(entry: TreeEntry) -> bool:
    return not (entry.is_tree or entry.is_submodule or entry.is_symlink)


class Part(NamedTuple):
    """A submodule to compose: its path from the top, its mirror and its commit."""

    path: str
    mirror: Path
    commit: str


def compose(target: Path, mirror: Path, tree: str, parts: Sequence[Part]) -> str:
    """Write the repository `target` with the composed tree; return the tree's id.

    Its objects are trees; it borrows all others from the mirrors.
    """
    scratch = ScratchObjects(target / "objects")
    lenders = dict.fromkeys((mirror, *(part.mirror for part in parts)))
    make_repository(target, borrows_from=tuple(lenders))
    with open_objects(target) as objects:
        own: dict[str, str] = {}
        for part in sorted(parts, key=lambda part: part.path.count("/"), reverse=True):
            inner = read_commit(objects, part.commit).tree
            own[part.path] = _with_trees(objects, scratch, inner, _below(part.path, own))
        return _with_trees(objects, scratch, tree, _below("", own))


def _below(path: str, trees: dict[str, str]) -> dict[str, str]:
    """Take out the trees below a path, keyed from there."""
    start = f"{path}/" if path else ""
    below = {each: trees.pop(each) for each in list(trees) if each.startswith(start)}
    return {each.removeprefix(start): tree for each, tree in below.items()}


def _with_trees(
    objects: Objects, scratch: ScratchObjects, tree: str, below: Mapping[str, str]
) -> str:
    if not below:
        return tree
    edits: dict[bytes, tuple[int, str] | None] = {
        path.encode("utf-8", "surrogateescape"): (_TREE, inner) for path, inner in below.items()
    }
    return scratch.write_tree(BaseTree(objects, tree), edits)
