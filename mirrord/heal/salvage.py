"""The intact objects of a damaged pack, made available as a repository of their own. The damaged pack is only read.

With an index, a copy of the pack gets both its ends right, so that git opens it, and fsck names every object in it that is not
what its name says, and those are blotted out; without one, what git can unpack from the front is taken. Runs in a worker.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..audit.content import unreadable
from ..audit.graph import TIMEOUT
from ..audit.view import make_repository
from ..errors import CorruptObjectError
from ..git.command import run_git_sync
from ..git.packfile import PackIndex

SALVAGED = "the intact part of "

_OID = re.compile(r"\b[0-9a-f]{40}\b")
_SLACK_BYTES = 4096
_HEADER = struct.Struct(">4sII")
_WHOLE = range(1, 5)  # commit, tree, blob, tag: no deltas
_NO_OBJECT = b"\0"


@dataclass(frozen=True, slots=True)
class Salvage:
    """A repository at `path`; `bad` are objects in it that are not what they are named."""

    path: Path
    bad: frozenset[str] = frozenset()


def salvage(pack: Path, into: Path) -> Salvage:
    """Make `into` a repository of what can be read of `pack`."""
    make_repository(into)
    if _index_again(pack, into):
        return Salvage(into)
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        _unpack_front(pack, into)
        return Salvage(into)
    copy = into / "objects/pack" / pack.name
    _copy_with_right_ends(pack, index, copy)
    shutil.copyfile(index.path, into / "objects/pack" / index.path.name)
    bad = frozenset(unreadable(into, sorted(_named_bad(into))))
    _blot_out(copy, index, bad)
    return Salvage(into, bad)


def may_hold(pack: Path, oids: Collection[str]) -> bool:
    """Whether one of `oids` is in a pack as far as its index tells; without one, anything may be."""
    if pack.is_dir():
        return False
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        return True
    return any(bytes.fromhex(oid) in index for oid in oids)


def _index_again(pack: Path, into: Path) -> bool:
    """Whether the pack is whole: then its index was the damage."""
    done = run_git_sync(
        "index-pack",
        "--stdin",
        git_dir=into,
        stdin=pack,
        ok=range(-64, 256),
        timeout=TIMEOUT,
        doing="index a pack again",
    )
    return done.status == 0


def _unpack_front(pack: Path, into: Path) -> None:
    run_git_sync(
        "unpack-objects",
        "-r",
        "-q",
        git_dir=into,
        stdin=pack,
        ok=range(-64, 256),
        timeout=TIMEOUT,
        doing="unpack a damaged pack",
    )


def _copy_with_right_ends(pack: Path, index: PackIndex, target: Path) -> None:
    """git refuses a pack whose header or trailer is not its index's, and dies where an object should be behind the end."""
    shutil.copyfile(pack, target)
    with target.open("r+b") as file:
        file.write(_HEADER.pack(b"PACK", 2, index.count))
        end, last = pack.stat().st_size - len(index.pack_checksum), max(index.offsets(), default=0)
        file.truncate(file.seek(end if last < end else last + _SLACK_BYTES))
        file.write(index.pack_checksum)


def _blot_out(copy: Path, index: PackIndex, bad: Collection[str]) -> None:
    """Have git see what is bad by itself but unpacks: deltas would build on that, and not on a good copy elsewhere."""
    with copy.open("r+b") as file:
        for place in _places_of(bad, index):
            file.seek(place)
            kind = int.from_bytes(file.read(1)) >> 4 & 7
            if kind in _WHOLE:
                file.seek(place)
                file.write(_NO_OBJECT)


def _places_of(bad: Collection[str], index: PackIndex) -> set[int]:
    """Where only bad objects are: a damaged index may give the place of a good one to others too."""
    ids = {bytes.fromhex(oid) for oid in bad}
    places = {place for oid, place in zip(index, index.offsets(), strict=True) if oid in ids}
    return places - {
        place
        for oid, place in zip(index, index.offsets(), strict=True)
        if place in places and oid not in ids
    }


def _named_bad(repository: Path) -> set[str]:
    """Every object that fsck complains of: also where packed bytes changed and still unpack to what they were."""
    done = run_git_sync(
        "fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs",
        git_dir=repository,
        ok=range(-64, 256),
        timeout=TIMEOUT,
        doing="look for intact objects",
    )  # fmt: skip
    return {oid for line in done.stderr.splitlines() for oid in _OID.findall(line)}
