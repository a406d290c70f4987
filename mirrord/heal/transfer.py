"""Move objects into a heal's stand-in: from donors what is missing, from damaged packs the rest.

A donor lists and packs exactly what is missing, and `index-pack` hashes every object again: a pack
with any other object than those asked for is thrown away. Never writes to a mirror, and only reads
damaged packs.
"""

import shutil
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..audit.connectivity import OBJECT_ID, Missing, object_kinds, unreadable
from ..audit.examine import make_repository
from ..audit.object_files import TIMEOUT
from ..errors import CorruptObjectError, GitFailedError
from ..git.command import Git, GitResult, lines_of, run_git_sync
from ..git.packs import PackIndex
from ..git.process import STRICT
from ..git.workers import Workers

SALVAGED = "the intact part of "


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
        tips = lines_of([*sorted(wanted), *(f"^{oid}" for oid in sorted(whole))])
        walk = ("-c", "core.commitGraph=false", "rev-list", "--objects", "--no-object-names")
        try:
            walked = await self._git(donor, "walk a donor", *walk, "--stdin", stdin=tips)
            wanted.update(walked.lines)
        except (CorruptObjectError, GitFailedError):
            pass  # the donor has holes itself
        return await self._take(name, donor, wanted)

    async def take_all(self, name: str, donor: Path, bad: Collection[str]) -> int:
        """Take every object of the donor that is not here but for the `bad` ones."""
        command = ("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered")
        listing = await self._git(donor, "list intact objects", *command, "--buffer")
        return await self._take(name, donor, set(listing.lines) - set(bad))

    async def _git(self, git_dir: Path, doing: str, *args: str, **more: Any) -> GitResult:
        return await self.git.run(*args, git_dir=git_dir, timeout=TIMEOUT, doing=doing, **more)

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
        await self._git(
            donor, "pack what is missing",
            "pack-objects", "--stdout", "--delta-base-offset", "-q", *options,
            stdin=lines_of(oids), stdout_path=stream,
        )  # fmt: skip
        index = ("index-pack", "--stdin")
        done = await self._git(self.stand_in, "index what a donor gave", *index, stdin=stream)
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
        command = ("index-pack", *((STRICT,) if whole else ()), "--stdin")
        for pack in self.packs:
            await self._git(final, "check what donors gave", *command, stdin=pack)


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

    def git(doing: str, *args: str, stdin: Path | None = None) -> GitResult:
        any_status = range(-64, 256)
        return run_git_sync(
            *args, git_dir=into, stdin=stdin, ok=any_status, timeout=TIMEOUT, doing=doing
        )

    if git("index a pack again", "index-pack", "--stdin", stdin=pack).status == 0:
        return set()  # the pack is whole, its index was the damage
    try:
        index = PackIndex(pack.with_suffix(".idx"))
    except (CorruptObjectError, OSError):
        git("unpack a damaged pack", "unpack-objects", "-r", "-q", stdin=pack)
        return set()
    copy = into / "objects/pack" / pack.name
    shutil.copyfile(pack, copy)
    shutil.copyfile(index.path, copy.with_suffix(".idx"))
    # git refuses a pack with another header or trailer than its index names, and dies where an
    # object would begin behind the end
    end, last = pack.stat().st_size - len(index.pack_checksum), max(index.offsets(), default=0)
    with copy.open("r+b") as file:
        file.write(struct.pack(">4sII", b"PACK", 2, index.count))
        file.truncate(file.seek(end if last < end else last + 4096))
        file.write(index.pack_checksum)
    # it names objects, too, whose packed bytes changed and still unpack to what they were
    fsck = ("fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs")
    named = OBJECT_ID.findall(git("look for intact objects", *fsck).stderr)
    bad = unreadable(into, sorted(set(named)))
    # Break bad objects that unpack by themselves: deltas would build on them, not on a good copy.
    # A damaged index may give the place of a good object to a bad one, too: that place stays.
    ids = {bytes.fromhex(oid) for oid in bad}
    places = list(zip(index, index.offsets(), strict=True))
    good = {place for oid, place in places if oid not in ids}
    with copy.open("r+b") as file:
        for place in {place for oid, place in places if oid in ids} - good:
            file.seek(place)
            if 1 <= int.from_bytes(file.read(1)) >> 4 & 7 <= 4:  # a whole object, no delta
                file.seek(place)
                file.write(b"\0")
    return bad
