"""Read the object stores of a repository: their objects, and what in them is no part of a store.

Allowed are loose objects, packs with their index and reverse index, a commit-graph, `info/packs`.
Each is believed only after it was checked to the last byte: a name is not a proof, and bytes after
the end of an object are hidden there.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..git.packs import (
    PackIndex,
    graph_commits,
    graph_has_known_chunks_only,
    loose_digest,
    pack_is_whole,
)
from ..protocol import SealLeak
from .repository import ForeignFile, ForeignRepository, read_bytes, walk

TIMEOUT = timedelta(hours=1)
_LOOSE = re.compile(r"([0-9a-f]{2})/([0-9a-f]{38})")
_PACKED = re.compile(r"pack/pack-[0-9a-f]{40}\.(pack|idx|rev|keep)")
_GRAPH = re.compile(r"info/commit-graph|info/commit-graphs/graph-[0-9a-f]{40}\.graph")
_LISTS = {  # with their form, and the leak where it differs
    "info/commit-graphs/commit-graph-chain": (
        re.compile(rb"([0-9a-f]{40}\n)+"), "commit-graph", "commit-graphs",
    ),
    "info/packs": (re.compile(rb"(P pack-[0-9a-f]{40}\.pack\n)*\n?"), "stray-file", "packs"),
}  # fmt: skip
_ALTERNATES = {"info/alternates", "info/http-alternates"}  # judged by where they lead
_REV = b"RIDX\0\0\0\1\0\0\0\1"  # version 1, SHA-1


@dataclass(slots=True)
class StoreContents:
    """`ids` are raw; `graphed` are the commits that each commit-graph names."""

    ids: set[bytes] = field(default_factory=set)
    leaks: list[SealLeak] = field(default_factory=list)
    packs: list[Path] = field(default_factory=list)
    graphed: dict[str, list[bytes]] = field(default_factory=dict)

    def leak(self, kind: str, detail: str) -> None:
        self.leaks.append(SealLeak(kind=kind, detail=detail))


def read_contents(repository: ForeignRepository, private: Path) -> StoreContents:
    """Every object in every store; `storeN` in `private`, a git directory of ours, lead there."""
    contents = StoreContents()
    for number, store in enumerate(repository.stores):
        files = {found.where: found for found in walk(store)}
        for found in files.values():
            _read_file(found, files.keys(), contents)
        if contents.leaks or not contents.graphed:
            continue
        directory = private / f"store{number}"
        command = ("commit-graph", "verify", f"--object-dir={directory}")
        try:  # git holds the graph's parents, trees and dates against the commits
            run_git_sync(
                *command, git_dir=private, timeout=TIMEOUT, doing="verify the commit-graph"
            )
        except (CorruptObjectError, GitFailedError) as error:
            fact = f"a commit-graph does not say what its commits say: {error.message}"
            contents.leak("commit-graph", fact)
    if contents.packs:
        try:
            _verify_packs(contents.packs, private)
        except (CorruptObjectError, GitFailedError):
            for index in contents.packs:
                try:
                    _verify_packs([index], private)
                except (CorruptObjectError, GitFailedError) as error:
                    fact = f"{index.name} does not say what is in its pack: {error.message}"
                    contents.leak("damaged", fact)
    return contents


def _verify_packs(indexes: Sequence[Path], private: Path) -> None:
    """git hashes every object of a pack, so its index says what is in it."""
    command = ("verify-pack", *map(str, indexes))
    run_git_sync(*command, git_dir=private, timeout=TIMEOUT, doing="verify packs")


def _read_file(found: ForeignFile, names: Collection[str], contents: StoreContents) -> None:
    where, path = f"objects/{found.where}", found.path
    if found.kind != "file":
        contents.leak("stray-file", f"{where} is not a regular file")
    elif loose := _LOOSE.fullmatch(found.where):
        oid = loose[1] + loose[2]
        contents.ids.add(bytes.fromhex(oid))
        if loose_digest(path) != oid:
            contents.leak("damaged", f"the bytes of loose object {oid} are not what its name says")
    elif packed := _PACKED.fullmatch(found.where):
        _read_packed(packed[1], found, names, contents)
    elif _GRAPH.fullmatch(found.where):
        try:  # a graph ends in its checksum as a pack does
            contents.graphed[where] = graph_commits(path)
            is_exact = graph_has_known_chunks_only(path) and pack_is_whole(path)
        except (CorruptObjectError, OSError):
            is_exact = False
        if not is_exact:
            contents.graphed[where] = []
            contents.leak("commit-graph", f"{where} is not exactly a commit-graph")
    elif found.where in _LISTS:
        form, kind, listed = _LISTS[found.where]
        if not form.fullmatch(read_bytes(path) or b"-"):
            contents.leak(kind, f"{where} is not a list of {listed}")
    elif found.where not in _ALTERNATES:
        contents.leak("stray-file", f"{where} is no part of a sealed object store")


def _read_packed(
    part: str, found: ForeignFile, names: Collection[str], contents: StoreContents
) -> None:
    where, path = f"objects/{found.where}", found.path
    if part == "pack":
        if found.where.removesuffix("pack") + "idx" not in names:
            fact = "has no index: git does not see its objects, but anybody can index it"
            contents.leak("stray-file", f"{where} {fact}")
    elif found.where.removesuffix(part) + "pack" not in names:
        contents.leak("stray-file", f"{where} has no pack")
    elif part == "keep":
        if path.stat().st_size:
            contents.leak("stray-file", f"{where} is not empty")
    elif part == "rev":
        if not _is_reverse_index(path):
            contents.leak("damaged", f"{where} is not the reverse index of its pack")
    else:
        try:
            contents.ids.update(PackIndex(path))
            contents.packs.append(path)
        except (CorruptObjectError, OSError) as error:
            contents.leak("damaged", f"{path.name} cannot be read: {error}")


def _is_reverse_index(path: Path) -> bool:
    """Whether a .rev holds just the positions in the index, in the order of the pack."""
    try:
        index, data = PackIndex(path.with_suffix(".idx")), read_bytes(path)
    except (CorruptObjectError, OSError):
        return False
    offsets = list(index.offsets())
    order = sorted(range(index.count), key=offsets.__getitem__)
    made = _REV + struct.pack(f">{index.count}I", *order) + index.pack_checksum
    return data == made + hashlib.sha1(made, usedforsecurity=False).digest()
