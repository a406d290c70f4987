"""Fetching objects from an upstream: by id, into quarantine, checked, then accepted.

Never moves a ref that is visible: objects come first. Where upstream cannot give the objects of
some refs, those are found and all others arrive; refs below `refs/mirrord/incoming/` mark what was
accepted so far, so that nothing is fetched twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import anyio
from anyio import to_thread

from ..errors import MirrordError, UpstreamEmptyError, UpstreamNotFoundError
from ..git.batch import lines_of
from ..git.errors import masked_url
from ..host.files import full_disk_named
from ..host.processes import memory_limit_bytes
from ..protocol import Progress
from .bisect import Lane, Lineage, blames_objects, find_bad, shallow_environment
from .quarantine import STREAM_BIG_FILES, Quarantine, accept_objects, within_disk
from .refs import Offer, read_offer
from .repository import Repository
from .upstream import Upstream

INCOMING = "refs/mirrord/incoming/"
_FAILURES = 400
_HOPELESS = 64
_MANY = 50
_LONGEST = timedelta(hours=24)
_REDIRECT = re.compile(r"^warning: redirecting to (\S+)", re.MULTILINE)
_NO_FLUSH = ("-c", "core.fsync=none")  # marks are lost in a crash without harm


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Asks one upstream for one mirror.

    `quiet` is the longest silence to wait for; each further connection at a time holds a `lane`.
    """

    repository: Repository
    upstream: Upstream
    quarantine: Quarantine
    quiet: timedelta
    progress: Callable[[Progress], None] | None = None
    lane: Lane = nullcontext

    async def offer(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> Offer:
        """The refs that upstream has now; raises UpstreamEmptyError where it has none."""
        url = self.upstream.remote.url
        answer = await self.repository.git.run(
            "ls-remote", "--symref", "--", url,
            remote=self.upstream.remote,
            timeout=self.quiet,
            doing=f"ask upstream {self.upstream.shown} for its refs",
        )  # fmt: skip
        if not answer.lines and not may_be_empty:
            raise UpstreamEmptyError(
                f"cannot mirror {self.upstream.shown}: it has no refs",
                hint="nothing was changed, and the mirror still serves what it has; push to"
                " upstream, check the URL, or follow it all the same with"
                " `mirrord mirror sync NAME --accept-loss`",
            )
        offer = await to_thread.run_sync(read_offer, answer.lines, patterns)
        redirects = _REDIRECT.findall(answer.stderr)
        if not redirects:
            return offer
        return replace(offer, redirected_to=masked_url(redirects[-1].rstrip("/")))

    async def fetch(
        self, oids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, MirrordError]:
        """Fetch `oids`, the likeliest first, with all they reach; answers those that did not come.

        `known` are those that failed before, each with the message: as the objects that they reach
        never change, they fail for as long as the object in the message is damaged.
        """
        marking = anyio.Lock()
        failures_seen = False

        async def attempt(some: Sequence[str]) -> None:
            nonlocal failures_seen
            try:
                async with self.quarantine.directory("fetch") as objects:
                    await self._fetch_into(objects, some, self.upstream.remote.url)
                    with (
                        anyio.CancelScope(shield=True),
                        full_disk_named(f"mirror {self.repository.name}"),
                    ):
                        target = self.repository.objects
                        await to_thread.run_sync(accept_objects, objects, target)
            except MirrordError:
                failures_seen = True
                raise
            if failures_seen:  # tell the next fetch what is here already
                async with marking:
                    lines = [f"update {INCOMING}{oid} {oid}" for oid in some]
                    await _update_marks(self.repository, lines)
                    if len(some) >= _MANY:
                        await self.repository.pack_refs()

        async with AsyncExitStack() as closing:
            lineage = Lineage(
                self.repository, self.quarantine, self._fetch_filtered, oids, known or {}, closing
            )
            try:
                failed = await find_bad(
                    oids,
                    attempt,
                    is_theirs=blames_objects,
                    budget=_FAILURES,
                    hopeless=_HOPELESS,
                    blame=lineage.blame,
                    sort=lineage.sort,
                    lane=self.lane,
                )
            finally:
                if failures_seen:
                    with anyio.CancelScope(shield=True):
                        await unmark(self.repository)
        for oid in await self.repository.absent(set(oids) - failed.keys()):
            failed[oid] = UpstreamNotFoundError(
                f"cannot fetch {oid} from upstream {self.upstream.shown}: it was not sent",
                hint="upstream no longer has it; try a fallback",
            )
        return failed

    async def _fetch_filtered(self, objects: Path, oids: Sequence[str], kind: str) -> None:
        """Fetch the objects that a filter selects, unchecked: to be read, never to be accepted."""
        config = {
            "remote.upstream.url": self.upstream.remote.url,
            # a promisor from the start: else git (2.39) writes that into the mirror's configuration
            "remote.upstream.promisor": "true",
            "remote.upstream.partialCloneFilter": kind,
            "fetch.fsckObjects": "false",
        }
        options = [f"--filter={kind}"]
        if self.upstream.is_local:
            # an upstream on this machine serves filters only where its configuration says so, or
            # the command that serves it
            options += ["--upload-pack", "git -c uploadpack.allowFilter=true upload-pack"]
        words = [part for key, value in config.items() for part in ("-c", f"{key}={value}")]
        env = shallow_environment(objects)
        await self._fetch_into(objects, oids, "upstream", words, options, env)

    async def _fetch_into(
        self,
        objects: Path,
        oids: Sequence[str],
        remote: str,
        config: Sequence[str] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        doing = f"fetch from upstream {self.upstream.shown}"
        await self.repository.run(
            *STREAM_BIG_FILES, *config,
            "fetch", "--progress", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance",
            *options, "--stdin", "--", remote,
            stdin=lines_of(oids),
            quarantine_objects=objects,
            env=env,
            remote=self.upstream.remote,
            timeout=_LONGEST,
            quiet_timeout=self.quiet,
            memory_bytes=memory_limit_bytes(),
            progress=within_disk(objects, self.progress, doing),
            doing=doing,
        )  # fmt: skip


async def unmark(repository: Repository) -> None:
    """Remove the marks of a fetch, also of one that a crash ended."""
    marks = [ref for ref in await repository.all_refs() if ref.startswith(INCOMING)]
    if marks:
        await _update_marks(repository, [f"delete {ref}" for ref in marks])


async def _update_marks(repository: Repository, lines: Sequence[str]) -> None:
    words = (*_NO_FLUSH, "update-ref", "--stdin")
    await repository.run(*words, stdin=lines_of(lines), doing="mark fetched objects")
