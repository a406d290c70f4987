"""A mirror to be damaged, every kind of donor beside it, and the truth about both: which objects, which refs, who has what.

All of it lives in this process: real gits, workers, catalog and files; only the socket is left out, because a heal is to be
tried a thousand times. The mirror is there twice, packed and with every object loose; each round begins with one as it was.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gitrepos import Upstream, git
from heal_parts import House, refs_of

from mirrord.config import UpstreamSettings
from mirrord.model import CommitId, MirrorName

from .objects import links_of, objects_in, objects_of_bundle

_FORK = MirrorName("fork", "name")
_DONORS = (
    "upstream",
    "fallback",
    "fork",
    "closure packs",
    "bundle",
    "incremental bundle",
    "bundle of a fork",
)


@dataclass
class Truth:
    """`links` is object to the objects it names, `donors` who has which; `bases` are what the incremental bundle builds on."""

    refs: dict[str, str] = field(default_factory=dict)
    head: str = ""
    links: dict[str, frozenset[str]] = field(default_factory=dict)
    recorded: dict[str, str] = field(default_factory=dict)
    donors: dict[str, set[str]] = field(default_factory=dict)
    bases: set[str] = field(default_factory=set)

    def closure(self, start: str) -> set[str]:
        found: set[str] = set()
        pending = [start]
        while pending:
            oid = pending.pop()
            if oid not in found:
                found.add(oid)
                pending += self.links[oid]
        return found


class DamagedMirror(House):
    """What is to be healed; `pristine` has the two shapes of its mirror."""

    def __init__(self, root: Path) -> None:
        self.truth = Truth()
        self._all = root / "donors"
        self._pristine = root / "pristine"
        super().__init__(root, Upstream(root / "name"))

    # -- a beginning --------------------------------------------------------------------------------------------------

    async def furnish(self) -> None:
        """Three syncs, among them a force push and a deleted branch; pins of a dataset and a person; several packs."""
        self._write_upstream()
        await self.mirrors.add(self.name.repo)
        await self.mirrors.sync(self.name)
        self.upstream.git("branch", "-D", "doomed")
        self.upstream.git("reset", "--hard", "--quiet", "HEAD~1")
        self.upstream.history(2)
        await self.mirrors.sync(self.name)
        await self.mirrors.maintain(self.name)
        first = (await self.mirrors.refs_log(self.name))[-1].id
        self.upstream.commit({"late": "late\n"})
        await self._pin()
        await self._make_donors(first)
        self._keep_pristine()

    def _write_upstream(self) -> None:
        self.upstream.history(6)
        self.upstream.git("tag", "light")
        self.upstream.git("checkout", "--quiet", "-b", "side", "HEAD~2")
        self.upstream.commit({"src/side.py": "side\n", "big": random.Random(0).randbytes(20_000)})
        self.upstream.git("tag", "-a", "-m", "a tag", "v1")
        self.upstream.git("checkout", "--quiet", "-b", "doomed")
        self.upstream.commit({"doomed": "doomed\n"})
        self.upstream.git("checkout", "--quiet", "main")
        self.upstream.git("merge", "--quiet", "--no-edit", "side")
        (self.upstream.path / "link").symlink_to("README")
        self.upstream.commit({"deep/er/and/deeper": "deep\n"})

    async def _pin(self) -> None:
        revs = ("main", "main~1", "main~3", "side", "main~4")
        commits = {
            f"owner__name-{n}": CommitId(self.upstream.git("rev-parse", rev))
            for n, rev in enumerate(revs)
        }
        await self.mirror_and_pin(commits)
        self.truth.recorded = {instance: str(commit) for instance, commit in commits.items()}
        kept = next(oid for ref, oid in refs_of(self.mirror).items() if "/kept/" in ref)
        assert (
            await self.mirrors.pin(self.name, [CommitId(kept)], owner="person/7", reason="paper")
            == {}
        )

    async def _make_donors(self, first_record: str) -> None:
        git(
            self.root, "clone", "-q", "--mirror", str(self.upstream.path), str(self.root / "name-b")
        )
        git(
            self.root,
            "clone",
            "-q",
            "--bare",
            "--single-branch",
            str(self.upstream.path),
            str(self.root / "fork.git"),
        )
        await self.mirrors.add(_FORK.repo, f"file://{self.root / 'fork.git'}")
        await self.mirrors.sync(_FORK)
        self._make_closure_packs()
        await self.bundle(self._all / "bundle")
        await self.bundle(self._all / "incremental bundle", since=first_record)
        git(
            self.root / "fork.git",
            "bundle",
            "create",
            "-q",
            str(self._all / "bundle of a fork"),
            "main",
        )
        (self.state_dir / "mirrors" / str(_FORK)).rename(self._all / "fork")
        self.dropped.mkdir(exist_ok=True)

    def _make_closure_packs(self) -> None:
        for rev in ("main~1", "side"):
            layer = (
                self._all / "closure packs/owner__name/packs" / git(self.mirror, "rev-parse", rev)
            )
            layer.mkdir(parents=True)
            listing = git(self.mirror, "rev-list", "--objects", "--no-object-names", rev)
            git(
                self.mirror,
                "pack-objects",
                "-q",
                str(layer / "pack"),
                stdin=f"{listing}\n".encode(),
            )

    def _keep_pristine(self) -> None:
        truth = self.truth
        truth.refs, truth.head = refs_of(self.mirror), (self.mirror / "HEAD").read_text()
        truth.links = links_of(self.mirror)
        packs = [
            git(pack.parent, "show-index", stdin=pack.read_bytes())
            for pack in self._all.rglob("*.idx")
            if "closure" in str(pack)
        ]
        bundle = objects_of_bundle(self._all / "incremental bundle", self.mirror)
        truth.bases = bundle.bases
        truth.donors = {
            "upstream": objects_in(self.upstream.path),
            "fallback": objects_in(self.root / "name-b"),
            "fork": objects_in(self._all / "fork"),
            "closure packs": {
                line.split()[1] for listing in packs for line in listing.splitlines()
            },
            "bundle": objects_of_bundle(self._all / "bundle", self.mirror).own,
            "incremental bundle": bundle.own,
            "bundle of a fork": objects_of_bundle(self._all / "bundle of a fork", self.mirror).own,
        }
        shutil.copytree(self.mirror, self._pristine / "packed")
        shutil.copytree(self.mirror, self._pristine / "loose")
        explode(self._pristine / "loose")

    @property
    def pristine(self) -> Path:
        """The mirror as it was, in one of its shapes."""
        return self._pristine / "packed"

    # -- a round ------------------------------------------------------------------------------------------------------

    def restore(self, shape: str) -> None:
        """The mirror as it was. Nothing writes into a file of a mirror, so links to it are enough."""
        for directory in (self.mirror, self.damaged):
            shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self._pristine / shape, self.mirror, copy_function=os.link)

    @contextmanager
    def with_donors(self, names: Collection[str]) -> Iterator[None]:
        """Only these are there meanwhile."""
        fallbacks = (f"file://{self.root}/{{name}}-b",) if "fallback" in names else ()
        moved = [
            (self._all / name, self._place(name))
            for name in names
            if name not in {"upstream", "fallback"}
        ]
        if "upstream" not in names:
            moved.append((self.upstream.path, self.upstream.path.with_name("away")))
        before = self.settings
        upstream = UpstreamSettings(url=before.upstream.url, fallbacks=fallbacks)
        self.settings = before.model_copy(update={"upstream": upstream})
        for here, there in moved:
            here.rename(there)
        try:
            yield
        finally:
            for here, there in moved:
                there.rename(here)
            self.settings = before

    def _place(self, donor: str) -> Path:
        if donor == "fork":
            return self.state_dir / "mirrors" / str(_FORK)
        return self.state_dir / "templates" if donor == "closure packs" else self.dropped / donor


def some_donors(chance: random.Random) -> list[str]:
    """Mostly one or a few, seldom nobody."""
    return sorted(chance.sample(_DONORS, chance.choice((0, 1, 1, 1, 1, 2, 2, 3, 4))))


ALL_DONORS = sorted(_DONORS)


def explode(mirror: Path) -> None:
    """Every object loose, and nothing derived from packs."""
    packs = mirror / "objects/pack"
    streams = [pack.read_bytes() for pack in packs.glob("*.pack")]
    shutil.rmtree(packs)
    shutil.rmtree(mirror / "objects/info")
    packs.mkdir()
    for stream in streams:
        git(mirror, "unpack-objects", "-q", stdin=stream)
