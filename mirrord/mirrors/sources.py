"""Where the objects of a mirror come from: its upstream, then the fallbacks, each host in its turn.

Owns which URL a mirror has and how its sources are asked within the limits of their hosts. The caller holds the mirror's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import anyio

from ..catalog import MirrorRow
from ..config import Settings
from ..errors import UpstreamError
from ..git.command import Git
from ..host.files import sync_directory
from ..model import CommitId, MirrorName
from ..protocol import ProgressSink
from .fetch import Fetcher
from .quarantine import Quarantine
from .repository import Repository
from .sync import SyncResult, sync
from .upstream import Hosts, Upstream, parse_upstream, upstream_url

Unfetched = dict[CommitId, str]
"""Commits that did not come, each with the reason."""


class Sources:
    """All upstreams of all mirrors."""

    def __init__(
        self, *, settings: Callable[[], Settings], git: Git, quarantine: Quarantine
    ) -> None:
        self._settings = settings
        self._git = git
        self._quarantine = quarantine
        self._hosts = Hosts(concurrency=lambda: settings().sync.concurrency)

    def default_url(self, name: MirrorName) -> str:
        """The URL of the [[mirror]] table that names it, else the template."""
        own = (
            m.url
            for m in self._settings().mirror
            if m.url and MirrorName.parse(m.repo).key == name.key
        )
        return next(own, None) or upstream_url(self._settings().upstream.url, name)

    def upstreams(self, row: MirrorRow) -> list[Upstream]:
        """The upstream of a mirror, then its fallbacks."""
        urls = [
            row.url,
            *(upstream_url(template, row.name) for template in self._settings().upstream.fallbacks),
        ]
        return [parse_upstream(url) for url in urls]

    def _fetcher(
        self, repository: Repository, upstream: Upstream, progress: ProgressSink | None
    ) -> Fetcher:
        quiet = self._settings().upstream.timeout
        return Fetcher(
            repository,
            upstream,
            self._quarantine,
            quiet,
            progress,
            lambda: self._hosts.turn(upstream.host),
        )

    # -- refs ---------------------------------------------------------------------------------------------------------

    async def sync(
        self,
        row: MirrorRow,
        path: Path,
        progress: ProgressSink | None,
        *,
        asking: Callable[[], None],
        accept_loss: bool = False,
    ) -> SyncResult:
        """Sync the mirror at `path`; the first time it is built in quarantine and renamed when it is complete.

        `asking` is called when the host's turn has come, before it is asked for anything.
        """
        upstream = parse_upstream(row.url)
        async with self._hosts.turn(upstream.host):
            asking()
            if path.exists():
                return await self._sync(row, path, upstream, progress, accept_loss=accept_loss)
            async with self._quarantine.directory("clone") as directory:
                building = directory / "repository"
                await Repository(self._git, row.name, building).create()
                result = await self._sync(row, building, upstream, progress)
                building.rename(path)
                await anyio.to_thread.run_sync(sync_directory, path.parent)
                return result

    async def _sync(
        self,
        row: MirrorRow,
        path: Path,
        upstream: Upstream,
        progress: ProgressSink | None,
        *,
        accept_loss: bool = False,
    ) -> SyncResult:
        fetcher = self._fetcher(Repository(self._git, row.name, path), upstream, progress)
        known = {str(fault["commit"]): str(fault["reason"]) for fault in row.ref_faults}
        return await sync(
            fetcher, self._settings().upstream.refs, known_faults=known, accept_loss=accept_loss
        )

    # -- commits ------------------------------------------------------------------------------------------------------

    async def fetch_commits(
        self,
        row: MirrorRow,
        repository: Repository,
        commits: Collection[CommitId],
        progress: ProgressSink | None,
    ) -> Unfetched:
        """Fetch by id what is absent from the object store, asking each source for what the ones before it lacked.

        The reason given is the upstream's, which is the one that should have had it.
        """
        missing = [CommitId(oid) for oid in sorted(await repository.absent(commits))]
        reasons: Unfetched = {}
        for upstream in self.upstreams(row):
            if not missing:
                break
            unfetched = await self.fetch_from(upstream, repository, missing, progress)
            reasons = {commit: reasons.get(commit, reason) for commit, reason in unfetched.items()}
            missing = sorted(reasons)
        return {commit: reasons[commit] for commit in missing}

    async def fetch_from(
        self,
        upstream: Upstream,
        repository: Repository,
        commits: Sequence[CommitId],
        progress: ProgressSink | None,
    ) -> Unfetched:
        """Fetch objects by id from one source into a repository; answers those that did not come."""
        try:
            async with self._hosts.turn(upstream.host):
                failed = await self._fetcher(repository, upstream, progress).fetch(commits)
        except UpstreamError as error:
            return dict.fromkeys(commits, error.message)
        return {CommitId(oid): error.message for oid, error in failed.items()}
