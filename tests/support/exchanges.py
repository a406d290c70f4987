"""Nodes of a fleet without daemons: a mirror and a quarantine each, on one store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from gitrepos import Upstream, git

from mirrord.catalog import Generation
from mirrord.config import Settings
from mirrord.fleet.exchange import Exchange
from mirrord.fleet.objects import ObjectStore
from mirrord.git.command import Git
from mirrord.host.trash import Trash
from mirrord.mirrors.quarantine import Quarantine
from mirrord.mirrors.repository import Repository
from mirrord.mirrors.sync import sync
from mirrord.mirrors.upstreams.credentials import Credentials
from mirrord.mirrors.upstreams.fetching import Fetcher
from mirrord.mirrors.upstreams.upstream import parse_upstream
from mirrord.model import MirrorName

NAME = MirrorName("owner", "name")


async def accepted(_: Generation) -> bool:
    return True


@dataclass
class Node:
    """A mirror and a quarantine of one machine, on the store of all."""

    root: Path
    store: ObjectStore

    def __post_init__(self) -> None:
        (self.root / "quarantine").mkdir(parents=True)
        self.git = Git(home=self.root)
        self.mirror = Repository(self.git, NAME, self.root / "mirror")
        self.exchange = Exchange(self.store, Quarantine(self.root / "quarantine", Trash()))

    async def sync(self, upstream: Upstream) -> None:
        if not self.mirror.path.exists():
            await self.mirror.create()
        remote, quiet = parse_upstream(upstream.url), timedelta(seconds=30)
        fetcher = Fetcher(
            self.mirror, remote, self.exchange.quarantine, quiet, Credentials(Settings)
        )
        await sync(fetcher, ["refs/heads/*", "refs/tags/*"])

    async def publish(self, previous: Generation | None, epoch: int = 1) -> Generation | None:
        refs, head = await self.mirror.all_refs(), await self.mirror.head()
        return await self.exchange.publish(
            self.mirror, refs, head, url="https://u:secret@example.com/name", epoch=epoch,
            previous=previous, accept=accepted,
        )  # fmt: skip

    async def follow(self, generation: Generation) -> None:
        if not self.mirror.path.exists():
            await self.mirror.create()
        await self.exchange.follow(self.mirror, generation)

    def refs(self) -> str:
        return git(self.mirror.path, "for-each-ref") + git(self.mirror.path, "symbolic-ref", "HEAD")

    def must_be_sound(self) -> None:
        git(self.mirror.path, "fsck", "--strict", "--connectivity-only", "--no-dangling")
