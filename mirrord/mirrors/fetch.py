"""Bringing objects from an upstream: by id, into quarantine, checked, then accepted.

Owns how an upstream is asked. Never moves a ref that anybody sees: objects come first. A ref whose objects upstream cannot give
is found by trying halves; what was accepted so far is marked by refs below `refs/mirrord/incoming/`, so that nothing is fetched
twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import anyio

from ..errors import (
    DiskFullError,
    GitKilledError,
    MirrordError,
    UpstreamAuthError,
    UpstreamEmptyError,
    UpstreamNotFoundError,
    UpstreamThrottledError,
    UpstreamTimeoutError,
)
from ..git.command import masked_url
from ..host.files import full_disk_named
from ..host.processes import memory_limit_bytes
from ..protocol import Progress
from .bounds import STREAM_BIG_FILES, within_disk
from .isolation import isolate
from .quarantine import Quarantine, accept_objects
from .refs import Offer, read_offer
from .repository import Repository
from .upstream import Upstream

INCOMING = "refs/mirrord/incoming/"
_FAILURES = 400
_HOPELESS = 8
_MANY = 50
_REDIRECT = re.compile(r"^warning: redirecting to (\S+)", re.MULTILINE)
_LONGEST = timedelta(hours=24)
_WHOLE_UPSTREAM = (
    UpstreamAuthError, UpstreamNotFoundError, UpstreamThrottledError, UpstreamTimeoutError, UpstreamEmptyError, DiskFullError,
    GitKilledError,
)  # fmt: skip
_CONNECTION = re.compile(
    r"could not resolve|failed to connect|couldn't connect|unable to connect|unable to access|connection (refused|reset)"
    r"|no route to host|network is unreachable|returned error: 5|SSL (certificate|connect|routines)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Asks one upstream for one mirror. `quiet` is the longest silence that is waited for."""

    repository: Repository
    upstream: Upstream
    quarantine: Quarantine
    quiet: timedelta
    progress: Callable[[Progress], None] | None = None

    async def offer(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> Offer:
        """The refs that upstream has now. None at all is an UpstreamEmptyError, unless that may be."""
        doing = f"ask upstream {self.upstream.shown} for its refs"
        answer = await self.repository.git.run(
            "ls-remote", "--symref", "--", self.upstream.remote.url, remote=self.upstream.remote, timeout=self.quiet, doing=doing
        )
        if not answer.lines and not may_be_empty:
            raise UpstreamEmptyError(
                f"cannot mirror {self.upstream.shown}: it has no refs",
                hint="nothing was changed, and what the mirror has is served on; push to upstream, check the URL, or follow it"
                " all the same with `mirrord mirror sync NAME --accept-loss`",
            )
        offer = await anyio.to_thread.run_sync(read_offer, answer.lines, patterns)
        redirects = _REDIRECT.findall(answer.stderr)
        return replace(offer, redirected_to=masked_url(redirects[-1].rstrip("/"))) if redirects else offer

    async def fetch(self, oids: Sequence[str]) -> dict[str, MirrordError]:
        """Bring `oids`, the likeliest first, with everything they reach; answers those that upstream could not give."""
        failures_seen = False

        async def attempt(some: Sequence[str]) -> None:
            nonlocal failures_seen
            try:
                await self._fetch_once(some)
            except MirrordError:
                failures_seen = True
                raise
            if failures_seen:
                await self._mark(some)

        try:
            failed = await isolate(oids, attempt, blames_items=blames_objects, budget=_FAILURES, hopeless=_HOPELESS)
        finally:
            if failures_seen:
                with anyio.CancelScope(shield=True):
                    await unmark(self.repository)
        absent = await self.repository.absent(set(oids) - {oid for oid, _ in failed})
        return dict(failed) | {oid: _not_sent(self.upstream, oid) for oid in absent}

    async def _fetch_once(self, oids: Sequence[str]) -> None:
        async with self.quarantine.directory("fetch") as objects:
            await self.repository.git.run(
                *STREAM_BIG_FILES,
                "fetch", "--progress", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--stdin", "--",
                self.upstream.remote.url,
                git_dir=self.repository.path,
                stdin="".join(f"{oid}\n" for oid in oids).encode("ascii"),
                quarantine_objects=objects,
                remote=self.upstream.remote,
                timeout=_LONGEST,
                quiet_timeout=self.quiet,
                memory_bytes=memory_limit_bytes(),
                progress=within_disk(objects, self.progress, f"fetch from upstream {self.upstream.shown}"),
                doing=f"fetch from upstream {self.upstream.shown}",
            )  # fmt: skip
            with anyio.CancelScope(shield=True):
                with full_disk_named(f"mirror {self.repository.name}"):
                    await anyio.to_thread.run_sync(accept_objects, objects, self.repository.objects)

    async def _mark(self, oids: Sequence[str]) -> None:
        """Tell the next fetch what is here already. Lost in a crash without harm, so not flushed."""
        lines = "".join(f"update {INCOMING}{oid} {oid}\n" for oid in oids)
        await self.repository.git.run(
            "-c",
            "core.fsync=none",
            "update-ref",
            "--stdin",
            git_dir=self.repository.path,
            stdin=lines.encode(),
            doing="mark objects",
        )
        if len(oids) >= _MANY:
            await self.repository.pack_refs()


async def unmark(repository: Repository) -> None:
    """Remove the marks of a fetch, or of one that a crash ended."""
    found = [ref for ref in await repository.all_refs() if ref.startswith(INCOMING)]
    if not found:
        return
    lines = "".join(f"delete {ref}\n" for ref in found)
    await repository.git.run(
        "-c", "core.fsync=none", "update-ref", "--stdin", git_dir=repository.path, stdin=lines.encode(), doing="remove marks"
    )


def blames_objects(error: MirrordError) -> bool:
    """True when some of the wanted objects may be the cause, and others could come."""
    return not isinstance(error, _WHOLE_UPSTREAM) and not _CONNECTION.search(error.message)


def _not_sent(upstream: Upstream, oid: str) -> MirrordError:
    return UpstreamNotFoundError(
        f"cannot fetch {oid} from upstream {upstream.shown}: it was not sent", hint="upstream no longer has it; try a fallback"
    )
