"""The parts of a daemon that audits and heals need, in this process; a mirror with something of everything; ways to damage it."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from anyio.from_thread import BlockingPortal
from gitrepos import Upstream, git

from mirrord.audit.service import Audits
from mirrord.bundles.service import Bundles
from mirrord.catalog import Catalog, DatasetHead, InstanceRow, encode_row
from mirrord.config import Settings, UpstreamSettings
from mirrord.git.command import Git
from mirrord.heal.service import Heals
from mirrord.host.trash import Trash
from mirrord.jobs.events import Events
from mirrord.mirrors.proofs import PROOF
from mirrord.mirrors.repository import HISTORY, PINS
from mirrord.mirrors.service import Mirrors
from mirrord.model import (
    AuditLevel,
    CommitId,
    CommitRole,
    DatasetName,
    Direction,
    MirrorName,
    utc_now,
)
from mirrord.protocol import Audit, StartAudit
from mirrord.workers.pool import Workers


class Daemon:
    """The parts of a daemon that an audit needs, on a fresh state directory, with one dataset recorded and pinned."""

    def __init__(self, root: Path, upstream: Upstream) -> None:
        self.state_dir = root / "state"
        self.state_dir.mkdir(exist_ok=True)
        self.settings = Settings(
            state_dir=self.state_dir,
            upstream=UpstreamSettings(url=f"file://{upstream.path.parent}/{{name}}"),
        )
        self.name = MirrorName("owner", "name")

    async def open(self) -> None:
        self.workers = Workers(size=1)
        self.catalog = await Catalog.open(self.state_dir / "catalog.sqlite3")
        self.events = Events()
        self.mirrors = Mirrors(
            settings=lambda: self.settings,
            git=Git(home=self.state_dir / "home"),
            workers=self.workers,
            catalog=self.catalog,
            events=self.events,
            trash=Trash(),
        )
        await self.mirrors.open()
        self.bundles = Bundles(self.mirrors)
        self.heals = self.make_heals()
        self.audits = Audits(self.mirrors, self.heals.repair)

    def make_heals(self) -> Heals:
        return Heals(self.mirrors)

    async def close(self) -> None:
        await self.mirrors.close()
        await self.workers.close()
        await self.catalog.close()

    async def record(self, name: MirrorName, commits: dict[str, CommitId]) -> None:
        """A dataset with one instance for each commit."""
        await self.record_rows(
            [
                InstanceRow(
                    identity,
                    "",
                    name,
                    oid,
                    Direction.FORWARD,
                    ((oid, CommitRole.BASE),),
                    None,
                    None,
                    (),
                    (),
                )
                for identity, oid in commits.items()
            ]
        )

    async def record_rows(self, rows: list[InstanceRow]) -> None:
        spool = self.state_dir / "spool.jsonl"
        spool.write_bytes(b"".join(encode_row(row) for row in rows))
        head = DatasetHead(
            DatasetName("lite"), "swe-bench", "lite.jsonl", "0" * 64, utc_now(), 0, [], {}, {}
        )
        await self.catalog.replace_dataset(head, spool)

    async def mirror_and_pin(self, commits: dict[str, CommitId]) -> None:
        await self.mirrors.add(self.name.repo)
        await self.mirrors.sync(self.name)
        await self.record(self.name, commits)
        assert (
            await self.mirrors.pin(
                self.name, list(commits.values()), owner="dataset/lite", reason="recorded"
            )
            == {}
        )


class House(Daemon):
    """A synced mirror with an old tip that upstream force-pushed away, three recorded commits, and a person's pin."""

    def __init__(self, root: Path, upstream: Upstream) -> None:
        super().__init__(root, upstream)
        self.root = root
        self.upstream = upstream

    @property
    def mirror(self) -> Path:
        return self.state_dir / "mirrors/owner__name"

    @property
    def damaged(self) -> Path:
        return self.state_dir / "quarantine/damaged/owner__name"

    @property
    def dropped(self) -> Path:
        """Where operators put bundles."""
        return self.state_dir / "bundles"

    async def furnish(self) -> None:
        await self.mirrors.add(self.name.repo)
        await self.mirrors.sync(self.name)
        self.upstream.git("reset", "--hard", "--quiet", "HEAD~1")
        self.upstream.commit({"after": "the force push\n"})
        self.upstream.git("tag", "-a", "-m", "a tag", "v1", "HEAD~1")
        await self.mirrors.sync(self.name)
        await self.mirror_and_pin(
            {
                f"owner__name-{n}": CommitId(self.upstream.git("rev-parse", f"HEAD~{n}"))
                for n in range(3)
            }
        )
        first = CommitId(self.upstream.git("rev-list", "--max-parents=0", "HEAD"))
        assert await self.mirrors.pin(self.name, [first], owner="person/7", reason="paper") == {}
        await self.mirrors.maintain(self.name)

    async def bundle(self, file: Path, since: str | None = None) -> None:
        """Write the mirror as it is into a file."""
        made = await self.bundles.create(self.name.repo, since)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"".join([chunk async for chunk in made.content]))

    @contextmanager
    def without_upstream(self, *fallbacks: str) -> Iterator[None]:
        """Upstream is not there meanwhile; a row keeps the URL it was added with."""
        away = self.upstream.path.with_name("away")
        before = self.settings
        self.upstream.path.rename(away)
        settings = UpstreamSettings(url="file:///nonexistent/{name}", fallbacks=fallbacks)
        self.settings = before.model_copy(update={"upstream": settings})
        try:
            yield
        finally:
            away.rename(self.upstream.path)
            self.settings = before

    async def heal(self) -> Audit:
        return await self.audits.run(StartAudit(heal=True, level=AuditLevel.CONTENT))


def a_third(damages: Iterable[str]) -> list[str]:
    """Those that MIRRORD_SEED chooses; all with MIRRORD_DAMAGES=all, as before a release."""
    names = list(damages)
    if os.environ.get("MIRRORD_DAMAGES") == "all":
        return names
    chance = random.Random(os.environ.get("MIRRORD_SEED", "17"))
    return chance.sample(names, len(names) // 3)


def refs_of(mirror: Path) -> dict[str, str]:
    lines = git(mirror, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    return dict(line.split() for line in lines)


class Furnished:
    """A furnished house that lives as long as the tests do; each test gets its mirror as it was."""

    def __init__(self, root: Path, house: House, portal: BlockingPortal) -> None:
        self.root = root
        self.house = house
        self.upstream = house.upstream
        self.mirror = house.mirror
        self._portal = portal
        self.pristine = root / "pristine"
        self._settings = house.settings
        self.keep()

    def keep(self) -> None:
        """Have each test begin with the mirror as it is now."""
        shutil.rmtree(self.pristine, ignore_errors=True)
        shutil.copytree(self.mirror, self.pristine)
        self.refs = refs_of(self.mirror)

    def restore(self) -> None:
        self.restore_files()
        self._portal.call(self._restore_catalog)

    def restore_files(self) -> None:
        for directory in (
            self.mirror,
            self.house.damaged,
            self.house.dropped,
            self.root / "state/templates",
        ):
            if directory.is_dir() and not directory.is_symlink():
                shutil.rmtree(directory)
            else:
                directory.unlink(missing_ok=True)
        shutil.copytree(self.pristine, self.mirror)
        self.house.settings = self._settings

    async def _restore_catalog(self) -> None:
        """What a heal of an earlier test made of the row and the pins."""
        catalog, key = self.house.catalog, self.house.name.key
        await catalog.update_mirror(key, history=self.refs[HISTORY], error=None)
        for pin in await catalog.list_pins(key):
            if f"{PINS}{pin.owner}/{pin.commit}" not in self.refs:
                await catalog.delete_pins(key, [pin.commit], pin.owner)

    def live(self, body: Callable[[House], Awaitable[None]]) -> None:
        self._portal.call(body, self.house)

    def explode(self) -> None:
        """Every object loose, and nothing derived from packs."""
        packs = self.mirror / "objects/pack"
        streams = [pack.read_bytes() for pack in packs.glob("*.pack")]
        for file in packs.iterdir():
            file.unlink()
        for stream in streams:
            git(self.mirror, "unpack-objects", "-q", stdin=stream)

    def loose(self, oid: str) -> Path:
        return self.mirror / "objects" / oid[:2] / oid[2:]

    def object(self, rev: str) -> str:
        return git(self.mirror, "rev-parse", rev)

    def lose(self, *revs: str) -> None:
        """Delete objects, each a loose file by then."""
        lost = [self.object(rev) for rev in revs]
        self.explode()
        for oid in lost:
            self.loose(oid).unlink()

    def pack(self) -> Path:
        return max(
            (self.mirror / "objects/pack").glob("pack-*.pack"), key=lambda file: file.stat().st_size
        )


# -- what is done to it -----------------------------------------------------------------------------------------------


def write(path: Path, content: bytes) -> None:
    """Overwrite, read-only files too."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def truncate(path: Path, share: float = 0.5) -> None:
    write(path, path.read_bytes()[: int(path.stat().st_size * share)])


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int((len(data) - 1) * at)] ^= 0xFF
    write(path, bytes(data))


def snapshot(mirror: Path) -> dict[str, str]:
    """Every file by its content, but for the proof that an audit's finding ends."""
    return {
        str(file.relative_to(mirror)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in mirror.rglob("*")
        if file.is_file() and file.name != PROOF
    }
