"""Taking from a donor exactly what is missing: listed there, packed there, hashed anew here.

What arrives is in a view until all is proven; `index-pack` computes every id from the bytes, so a donor that lies gives something
that nobody asked for, and the pack is thrown away. Never writes to a mirror.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..audit.connectivity import Missing, kinds_of
from ..audit.fsck import unreadable
from ..audit.object_files import TIMEOUT
from ..audit.stand_in import make_repository
from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of
from ..git.command import Git, run_git_sync
from ..git.environment import STRICT
from ..git.packs import PackIndex
from ..git.workers import Workers


@dataclass(slots=True)
class Transplant:
    """Packs in `view` that came from donors, and how many objects from whom. `work` is for what comes and goes."""

    git: Git
    workers: Workers
    view: Path
    work: Path
    packs: list[Path] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    async def take_missing(self, name: str, donor: Path, missing: Missing) -> int:
        """Take what the donor has of what is missing, and what lies behind that; answers how many objects came."""
        there = await self._there(donor, missing.all)
        if not there:
            return 0
        reached = await self._reached(donor, there, missing.whole)
        return await self._take(name, donor, await self._not_here(reached | there))

    async def take_all(self, name: str, donor: Path, bad: Collection[str]) -> int:
        """Take every object of the donor that is not here but for the `bad` ones."""
        listing = await self.git.run(
            "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered", "--buffer",
            git_dir=donor,
            timeout=TIMEOUT,
            doing="list intact objects",
        )  # fmt: skip
        return await self._take(name, donor, await self._not_here(set(listing.lines) - set(bad)))

    async def _there(self, donor: Path, oids: Iterable[str]) -> set[str]:
        kinds = await self.workers.run(kinds_of, donor, sorted(oids), timeout=TIMEOUT)
        return {oid for oid, kind in kinds.items() if kind}

    async def _not_here(self, oids: Collection[str]) -> list[str]:
        return sorted(set(oids) - await self._there(self.view, oids))

    async def _reached(
        self, donor: Path, starts: Collection[str], whole: Collection[str]
    ) -> set[str]:
        """What `starts` lead to in the donor and our whole commits do not; nothing where the donor has holes itself."""
        known = await self._there(donor, whole) if whole else set()
        try:
            walked = await self.git.run(
                "-c", "core.commitGraph=false", "rev-list", "--objects", "--no-object-names", "--stdin",
                git_dir=donor,
                stdin=lines_of([*sorted(starts), *(f"^{oid}" for oid in sorted(known))]),
                timeout=TIMEOUT,
                doing="walk a donor",
            )  # fmt: skip
        except (CorruptObjectError, GitFailedError):
            return set()
        return set(walked.lines)

    async def _take(self, name: str, donor: Path, oids: Collection[str]) -> int:
        if not oids:
            return 0
        try:
            taken = await self._pack(donor, oids)
        except (CorruptObjectError, GitFailedError):
            bad = await self.workers.run(unreadable, donor, list(oids), timeout=TIMEOUT)
            oids = [oid for oid in oids if oid not in bad]
            if not oids:
                raise
            taken = await self._pack(donor, oids, *(() if bad else ("--no-reuse-object",)))
        self.packs.append(taken)
        self.counts[name] = self.counts.get(name, 0) + len(oids)
        return len(oids)

    async def _pack(self, donor: Path, oids: Collection[str], *how: str) -> Path:
        """Have exactly `oids` as a pack in the view; raises CorruptObjectError when other bytes come.

        With `--stdout` git copies what is packed and checks nothing of it (2.39), but with `--no-reuse-object`: then a good copy
        elsewhere is used.
        """
        stream = self.work / "stream.pack"
        await self.git.run(
            "pack-objects", "--stdout", "--delta-base-offset", "-q", *how,
            git_dir=donor,
            stdin=lines_of(oids),
            stdout_path=stream,
            timeout=TIMEOUT,
            doing="pack what is missing",
        )  # fmt: skip
        done = await self.git.run(
            "index-pack",
            "--stdin",
            git_dir=self.view,
            stdin=stream,
            timeout=TIMEOUT,
            doing="index what a donor gave",
        )
        stream.unlink()
        pack = self.view / "objects/pack" / f"pack-{done.lines[-1].split()[-1]}.pack"
        if {oid.hex() for oid in PackIndex(pack.with_suffix(".idx"))} != set(oids):
            for file in pack.parent.glob(f"{pack.stem}.*"):
                file.unlink()
            raise CorruptObjectError(
                "cannot take objects from a donor: they are not what it calls them"
            )
        return pack

    async def prove(self, final: Path, *, whole: bool) -> None:
        """Index every pack that was taken once more into the repository `final`, which borrows from the view.

        `whole`: nothing is missing any more, so each object is checked by fsck and must find all that it names.
        """
        for pack in self.packs:
            strict = (STRICT,) if whole else ()
            await self.git.run(
                "index-pack",
                *strict,
                "--stdin",
                git_dir=final,
                stdin=pack,
                timeout=TIMEOUT,
                doing="check what donors gave",
            )


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
