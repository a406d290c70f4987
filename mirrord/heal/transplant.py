"""Taking from a donor exactly what is missing: listed there, packed there, hashed anew here.

What arrives is in a view until all is proven; `index-pack` computes every id from the bytes, so a donor that lies gives something
that nobody asked for, and the pack is thrown away. Never writes to a mirror.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..audit.content import unreadable
from ..audit.graph import TIMEOUT
from ..audit.past import kinds_of
from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of
from ..git.command import Git
from ..git.environment import STRICT
from ..git.packfile import PackIndex
from ..git.workers import Workers
from .missing import Missing


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
        kinds = await self.workers.call(kinds_of, donor, sorted(oids), timeout=TIMEOUT)
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
            bad = await self.workers.call(unreadable, donor, list(oids), timeout=TIMEOUT)
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
