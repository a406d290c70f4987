"""The transfer of objects into a heal's stand-in.

A donor's repository packs exactly the missing objects that it has, and `index-pack` hashes each
again. A pack with any other object is discarded.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..audit.connectivity import MissingObjects
from ..audit.damage import unreadable
from ..audit.defects import TIMEOUT
from ..audit.reading import object_kinds
from ..errors import CorruptObjectError, GitFailedError
from ..git.command import Git, GitResult, lines_of
from ..git.fsck import STRICT
from ..git.packs import PackIndex
from ..presence import matching
from ..workers.pool import Workers


@dataclass(slots=True)
class Transfer:
    """The packs in `stand_in` that came from donors, and the count of objects from each donor."""

    git: Git
    workers: Workers
    stand_in: Path
    work: Path
    packs: list[Path] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    async def take_missing(self, name: str, donor: Path, missing: MissingObjects) -> int:
        """Take the missing objects that the donor has, and what they reach; return the count."""
        wanted = await self._find_present(donor, missing.all)
        if not wanted:
            return 0
        whole = await self._find_present(donor, missing.whole) if missing.whole else set()
        tips = lines_of([*sorted(wanted), *(f"^{oid}" for oid in sorted(whole))])
        # with a commit-graph git (2.39) does not notice that a commit is missing
        walk = ("-c", "core.commitGraph=false", "rev-list", "--objects", "--no-object-names")
        try:
            walked = await self._git(donor, "walk a donor", *walk, "--stdin", stdin=tips)
            wanted.update(walked.lines)
        except (CorruptObjectError, GitFailedError):
            pass  # the donor lacks objects itself
        return await self._take(name, donor, wanted)

    async def take_all(self, name: str, donor: Path, bad: Collection[str]) -> int:
        """Take every object of the donor that the stand-in lacks, but for the `bad` ones."""
        command = ("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered")
        listing = await self._git(donor, "list intact objects", *command, "--buffer")
        return await self._take(name, donor, set(listing.lines) - set(bad))

    async def _git(self, git_dir: Path, doing: str, *args: str, **more: Any) -> GitResult:
        return await self.git.run(*args, git_dir=git_dir, timeout=TIMEOUT, doing=doing, **more)

    async def _find_present(self, repository: Path, oids: Iterable[str]) -> set[str]:
        kinds = await self.workers.run(object_kinds, repository, sorted(oids), timeout=TIMEOUT)
        return {oid for oid, kind in kinds.items() if kind}

    async def _take(self, name: str, donor: Path, wanted: set[str]) -> int:
        oids = sorted(wanted - await self._find_present(self.stand_in, wanted))
        if not oids:
            return 0
        try:
            taken = await self._pack(donor, oids)
        except (CorruptObjectError, GitFailedError):
            bad = await self.workers.run(unreadable, donor, oids, timeout=TIMEOUT)
            oids = [oid for oid in oids if oid not in bad]
            if not oids:
                raise
            # git (2.39) copies packed objects unchecked to --stdout; with --no-reuse-object it
            # checks them, and uses a good copy elsewhere
            taken = await self._pack(donor, oids, *(() if bad else ("--no-reuse-object",)))
        self.packs.append(taken)
        self.counts[name] = self.counts.get(name, 0) + len(oids)
        return len(oids)

    async def _pack(self, donor: Path, oids: Collection[str], *options: str) -> Path:
        """Add a pack of exactly `oids` to the stand-in; raises CorruptObjectError for others."""
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
            for file in matching(pack.parent, f"{pack.stem}.*"):
                file.unlink()
            raise CorruptObjectError("cannot take objects from a donor: their ids do not match")
        return pack

    async def prove(self, final: Path, *, whole: bool) -> None:
        """Index every pack that was taken into `final`, which borrows from the stand-in.

        With `whole`, nothing is missing any more, so fsck checks each object and its references.
        """
        command = ("index-pack", *((STRICT,) if whole else ()), "--stdin")
        for pack in self.packs:
            await self._git(final, "check what donors gave", *command, stdin=pack)
