"""Read the object stores of a repository: which objects they hold, and what in them is no part of a store.

A list says what may be there: loose objects, packs with their index and reverse index, a commit-graph, `info/packs`. Each is
believed only after it was checked to the last byte: a name is not a proof, and what follows the end of an object hides there.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
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
_CHAIN = "info/commit-graphs/commit-graph-chain"
_ALTERNATES = {"info/alternates", "info/http-alternates"}  # judged by where they lead
_REV = b"RIDX\0\0\0\1\0\0\0\1"  # version 1, SHA-1


@dataclass(slots=True)
class StoreContents:
    """`ids` are raw. `graphed` are the commits that each commit-graph names. `leaks` tell of what must not be there."""

    ids: set[bytes] = field(default_factory=set)
    leaks: list[SealLeak] = field(default_factory=list)
    packs: list[Path] = field(default_factory=list)
    graphed: dict[str, list[bytes]] = field(default_factory=dict)

    def leak(self, kind: str, detail: str) -> None:
        self.leaks.append(SealLeak(kind=kind, detail=detail))


def read_contents(repository: ForeignRepository, private: Path) -> StoreContents:
    """Every object in every store. `private` is a git directory of ours whose `storeN` lead to them."""
    contents = StoreContents()
    for number, store in enumerate(repository.stores):
        files = {found.where: found for found in walk(store)}
        for found in files.values():
            _read_file(found, files.keys(), contents)
        if not contents.leaks:
            _verify_graphs(contents, private, private / f"store{number}")
    _verify_packs(contents, private)
    return contents


def _read_file(found: ForeignFile, names: Iterable[str], contents: StoreContents) -> None:
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
        contents.graphed[where] = _graphed(path, where, contents)
    elif found.where == _CHAIN:
        if not re.fullmatch(rb"([0-9a-f]{40}\n)+", read_bytes(path) or b""):
            contents.leak("commit-graph", f"{where} is not a list of commit-graphs")
    elif found.where == "info/packs":
        if not re.fullmatch(rb"(P pack-[0-9a-f]{40}\.pack\n)*\n?", read_bytes(path) or b"-"):
            contents.leak("stray-file", f"{where} is not a list of packs")
    elif found.where not in _ALTERNATES:
        contents.leak("stray-file", f"{where} is no part of a sealed object store")


def _read_packed(
    part: str, found: ForeignFile, names: Iterable[str], contents: StoreContents
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
    """Whether a .rev holds just what it must: the positions in the index, in the order of the pack."""
    try:
        index, data = PackIndex(path.with_suffix(".idx")), read_bytes(path)
    except (CorruptObjectError, OSError):
        return False
    offsets = list(index.offsets())
    order = sorted(range(index.count), key=offsets.__getitem__)
    made = _REV + struct.pack(f">{index.count}I", *order) + index.pack_checksum
    return data == made + hashlib.sha1(made, usedforsecurity=False).digest()


def _graphed(path: Path, where: str, contents: StoreContents) -> list[bytes]:
    try:
        ids = graph_commits(path)
        if graph_has_known_chunks_only(path) and pack_is_whole(
            path
        ):  # a graph ends in its checksum as a pack does
            return ids
    except (CorruptObjectError, OSError):
        pass
    contents.leak("commit-graph", f"{where} is not exactly a commit-graph")
    return []


def _verify_graphs(contents: StoreContents, private: Path, store: Path) -> None:
    """Let git hold the graph's parents, trees and dates against the commits."""
    if not contents.graphed:
        return
    try:
        run_git_sync(
            "commit-graph",
            "verify",
            f"--object-dir={store}",
            git_dir=private,
            timeout=TIMEOUT,
            doing="verify the commit-graph",
        )
    except (CorruptObjectError, GitFailedError) as error:
        contents.leak(
            "commit-graph", f"a commit-graph does not say what its commits say: {error.message}"
        )


def _verify_packs(contents: StoreContents, private: Path) -> None:
    """Let git hash every pack; its index then says what is in it."""
    if not contents.packs:
        return
    try:
        _verify(contents.packs, private)
    except (CorruptObjectError, GitFailedError):
        for index in contents.packs:
            try:
                _verify([index], private)
            except (CorruptObjectError, GitFailedError) as error:
                contents.leak(
                    "damaged", f"{index.name} does not say what is in its pack: {error.message}"
                )


def _verify(indexes: list[Path], private: Path) -> None:
    run_git_sync(
        "verify-pack", *map(str, indexes), git_dir=private, timeout=TIMEOUT, doing="verify packs"
    )
