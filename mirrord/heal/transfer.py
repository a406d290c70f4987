"""Move objects into a heal's stand-in: from donors what is missing, from damaged packs the rest.

A donor lists and packs exactly what is missing, and `index-pack` hashes every object again: a pack
with any other object than those asked for is thrown away. Never writes to a mirror, and only reads
damaged packs.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..audit.connectivity import OBJECT_ID, Missing, object_kinds, unreadable
from ..audit.object_files import TIMEOUT
from ..audit.stand_in import make_repository
from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of
from ..git.command import Git, run_git_sync
from ..git.environment import STRICT
from ..git.packs import PackIndex
from ..git.workers import Workers

SALVAGED = "the intact part of "

_ANY_STATUS = range(-64, 256)
_SLACK_BYTES = 4096
_HEADER = struct.Struct(">4sII")
_WHOLE_KINDS = range(1, 5)  # commit, tree, blob, tag: no deltas
_NO_OBJECT = b"\0"


@dataclass(slots=True)
class Transfer:
    """Packs in `stand_in` that came from donors, and how many objects from each."""

    git: Git
    workers: Workers
    stand_in: Path
    work: Path
    packs: list[Path] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    async def take_missing(self, name: str, donor: Path, missing: Missing) -> int:
        """Take what the donor has of what is missing, and all behind that; answers the count."""
        wanted = await self._there(donor, missing.all)
        if not wanted:
            return 0
        whole = await self._there(donor, missing.whole) if missing.whole else set()
        try:
            walked = await self.git.run(
                "-c", "core.commitGraph=false",
                "rev-list", "--objects", "--no-object-names", "--stdin",
                git_dir=donor,
                stdin=lines_of([*sorted(wanted), *(f"^{oid}" for oid in sorted(whole))]),
                timeout=TIMEOUT,
                doing="walk a donor",
            )  # fmt: skip
            wanted.update(walked.lines)
        except (CorruptObjectError, GitFailedError):
            pass  # the donor has holes itself
        return await self._take(name, donor, wanted)

    async def take_all(self, name: str, donor: Path, bad: Collection[str]) -> int:
        """Take every object of the donor that is not here but for the `bad` ones."""
        listing = await self.git.run(
            "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered",
            "--buffer", git_dir=donor, timeout=TIMEOUT, doing="list intact objects",
        )  # fmt: skip
        return await self._take(name, donor, set(listing.lines) - set(bad))

    async def _there(self, repository: Path, oids: Iterable[str]) -> set[str]:
        kinds = await self.workers.run(object_kinds, repository, sorted(oids), timeout=TIMEOUT)
        return {oid for oid, kind in kinds.items() if kind}

    async def _take(self, name: str, donor: Path, wanted: set[str]) -> int:
        oids = sorted(wanted - await self._there(self.stand_in, wanted))
        if not oids:
            return 0
        try:
            taken = await self._pack(donor, oids)
        except (CorruptObjectError, GitFailedError):
            bad = await self.workers.run(unreadable, donor, oids, timeout=TIMEOUT)
            oids = [oid for oid in oids if oid not in bad]
            if not oids:
                raise
            # with --stdout git (2.39) copies what is packed unchecked, but with --no-reuse-object:
            # then a good copy elsewhere is used
            taken = await self._pack(donor, oids, *(() if bad else ("--no-reuse-object",)))
        self.packs.append(taken)
        self.counts[name] = self.counts.get(name, 0) + len(oids)
        return len(oids)

    async def _pack(self, donor: Path, oids: Collection[str], *options: str) -> Path:
        """Have exactly `oids` as a pack in the stand-in; other bytes are a CorruptObjectError."""
        stream = self.work / "stream.pack"
        await self.git.run(
            "pack-objects", "--stdout", "--delta-base-offset", "-q", *options,
            git_dir=donor, stdin=lines_of(oids), stdout_path=stream, timeout=TIMEOUT,
            doing="pack what is missing",
        )  # fmt: skip
        done = await self.git.run(
            "index-pack", "--stdin", git_dir=self.stand_in, stdin=stream, timeout=TIMEOUT,
            doing="index what a donor gave",
        )  # fmt: skip
        stream.unlink()
        pack = self.stand_in / "objects/pack" / f"pack-{done.lines[-1].split()[-1]}.pack"
        if {oid.hex() for oid in PackIndex(pack.with_suffix(".idx"))} != set(oids):
            for file in pack.parent.glob(f"{pack.stem}.*"):
                file.unlink()
            raise CorruptObjectError(
                "cannot take objects from a donor: they are not what it calls them"
            )
        return pack

    async def prove(self, final: Path, *, whole: bool) -> None:
        """Index every taken pack once more, into `final`, which borrows from the stand-in.

        `whole`: nothing is missing any more, so fsck checks each object and all that it names.
        """
        strict = (STRICT,) if whole else ()
        for pack in self.packs:
            await self.git.run(
                "index-pack", *strict, "--stdin", git_dir=final, stdin=pack, timeout=TIMEOUT,
                doing="check what donors gave",
            )  # fmt: skip


# -- damaged packs, in a worker --------------------------------------------------------------------


def may_hold(pack: Path, oids: Collection[str]) -> bool:
    """Whether one of `oids` is in a pack by its index; without a good index, any may be."""
    if pack.is_dir():
        return False
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        return True
    return any(bytes.fromhex(oid) in index for oid in oids)


def salvage(pack: Path, into: Path) -> set[str]:
    """Make `into` a repository of what can be read of `pack`; answers the bad objects in it.

    With an index, a copy of the pack gets both its ends right, so that git opens it, fsck names
    every bad object in it, and those are blotted out. Without one, git unpacks it from the front.
    """
    make_repository(into)
    again = run_git_sync(
        "index-pack", "--stdin",
        git_dir=into, stdin=pack, ok=_ANY_STATUS, timeout=TIMEOUT, doing="index a pack again",
    )  # fmt: skip
    if again.status == 0:  # the pack is whole, its index was the damage
        return set()
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        run_git_sync(
            "unpack-objects", "-r", "-q",
            git_dir=into, stdin=pack, ok=_ANY_STATUS, timeout=TIMEOUT,
            doing="unpack a damaged pack",
        )  # fmt: skip
        return set()
    copy = into / "objects/pack" / pack.name
    shutil.copyfile(pack, copy)
    shutil.copyfile(index.path, copy.with_suffix(".idx"))
    # git refuses a pack with another header or trailer than its index names, and dies where an
    # object would begin behind the end
    end, last = pack.stat().st_size - len(index.pack_checksum), max(index.offsets(), default=0)
    with copy.open("r+b") as file:
        file.write(_HEADER.pack(b"PACK", 2, index.count))
        file.truncate(file.seek(end if last < end else last + _SLACK_BYTES))
        file.write(index.pack_checksum)
    # it names objects, too, whose packed bytes changed and still unpack to what they were
    done = run_git_sync(
        "fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs",
        git_dir=into, ok=_ANY_STATUS, timeout=TIMEOUT, doing="look for intact objects",
    )  # fmt: skip
    bad = unreadable(into, sorted(set(OBJECT_ID.findall(done.stderr))))
    _blot_out(copy, index, bad)
    return bad


def _blot_out(copy: Path, index: PackIndex, bad: Collection[str]) -> None:
    """Break bad objects that unpack by themselves: deltas would build on them, not on a good copy.

    A damaged index may give the place of a good object to a bad one, too: that place stays.
    """
    ids = {bytes.fromhex(oid) for oid in bad}
    places = list(zip(index, index.offsets(), strict=True))
    good = {place for oid, place in places if oid not in ids}
    with copy.open("r+b") as file:
        for place in {place for oid, place in places if oid in ids} - good:
            file.seek(place)
            if int.from_bytes(file.read(1)) >> 4 & 7 in _WHOLE_KINDS:
                file.seek(place)
                file.write(_NO_OBJECT)
