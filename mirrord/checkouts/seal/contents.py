"""Which objects a repository holds: packs, loose files, alternates; and what lies among them that should not.

An index is believed only after git hashed its pack, a loose file only after it was hashed here: a name is not a proof.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from ...errors import CorruptObjectError, GitFailedError
from ...git.command import run_git_sync
from ...git.packs import PackIndex
from ...protocol import SealLeak
from ..survey import loose_digest
from .repository import Repository

TIMEOUT = timedelta(hours=1)
_PACK_PARTS = {".pack", ".idx", ".rev", ".bitmap", ".keep", ".promisor", ".mtimes"}
_FAN = re.compile(r"[0-9a-f]{2}")
_REST = re.compile(r"[0-9a-f]{38}")


@dataclass(slots=True)
class Contents:
    """`ids` are raw. `leaks` tell of what cannot be judged."""

    ids: set[bytes] = field(default_factory=set)
    leaks: list[SealLeak] = field(default_factory=list)
    packs: list[Path] = field(default_factory=list)

    def leak(self, kind: str, detail: str) -> None:
        self.leaks.append(SealLeak(kind=kind, detail=detail))


def read_contents(repository: Repository, private: Path) -> Contents:
    """Every object in every store of the repository. `private` is a git directory of ours to run git in."""
    contents = Contents()
    for store in repository.stores:
        _read_store(store, contents)
    _verify(contents, private)
    return contents


def _read_store(store: Path, contents: Contents) -> None:
    for entry in sorted(store.iterdir()) if store.is_dir() else ():
        if _FAN.fullmatch(entry.name) and entry.is_dir():
            _read_loose(entry, contents)
        elif entry.name == "pack":
            _read_packs(entry, contents)
        elif entry.name != "info":
            contents.leak("stray-file", f"objects/{entry.name} is no part of an object store")


def _read_loose(directory: Path, contents: Contents) -> None:
    for file in directory.iterdir():
        oid = directory.name + file.name
        if not _REST.fullmatch(file.name) or not file.is_file():
            contents.leak("stray-file", f"objects/{directory.name}/{file.name} is not an object")
            continue
        contents.ids.add(bytes.fromhex(oid))
        if loose_digest(file) != oid:
            contents.leak("damaged", f"the bytes of loose object {oid} are not what its name says")


def _read_packs(directory: Path, contents: Contents) -> None:
    files = {file.name: file for file in directory.iterdir()}
    for name, file in sorted(files.items()):
        if name.startswith("multi-pack-index"):
            continue
        if file.suffix not in _PACK_PARTS or not name.startswith("pack-"):
            contents.leak("stray-file", f"objects/pack/{name} is no part of a pack")
        elif file.suffix == ".pack" and file.with_suffix(".idx").name not in files:
            contents.leak(
                "stray-file", f"objects/pack/{name} has no index: git does not see its objects, but anybody can index it"
            )
        elif not file.is_file():
            contents.leak("stray-file", f"objects/pack/{name} is not a regular file")
        elif file.suffix == ".idx" and file.with_suffix(".pack").name in files:
            _read_pack(file, contents)


def _read_pack(index: Path, contents: Contents) -> None:
    try:
        contents.ids.update(PackIndex(index))
    except (CorruptObjectError, OSError) as error:
        contents.leak("damaged", f"{index.name} cannot be read: {error}")
        return
    contents.packs.append(index)


def _verify(contents: Contents, private: Path) -> None:
    """Let git hash every pack; its index then says what is in it."""
    if not contents.packs:
        return
    try:
        _verify_packs(contents.packs, private)
    except (CorruptObjectError, GitFailedError):
        for index in contents.packs:
            try:
                _verify_packs([index], private)
            except (CorruptObjectError, GitFailedError) as error:
                contents.leak("damaged", f"{index.name} does not say what is in its pack: {error.message}")


def _verify_packs(indexes: list[Path], private: Path) -> None:
    run_git_sync("verify-pack", *map(str, indexes), git_dir=private, timeout=TIMEOUT, doing="verify packs")
