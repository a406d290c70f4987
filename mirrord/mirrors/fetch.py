"""Bringing objects from an upstream: by id, into quarantine, checked, then accepted.

Owns how an upstream is asked. Never moves a ref that anybody sees: objects come first. Where upstream cannot give the objects of
some refs, those are found and all others arrive; what was accepted so far is marked by refs below `refs/mirrord/incoming/`, so
that nothing is fetched twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import anyio

from ..errors import (
    CorruptObjectError,
    DiskFullError,
    GitFailedError,
    GitKilledError,
    MirrordError,
    UpstreamAuthError,
    UpstreamEmptyError,
    UpstreamNotFoundError,
    UpstreamThrottledError,
    UpstreamTimeoutError,
)
from ..git.errors import masked_url
from ..host.files import full_disk_named
from ..host.processes import memory_limit_bytes
from ..protocol import Progress
from .bisect import (
    BLOBLESS,
    TREELESS,
    Lane,
    Lineage,
    cut_at,
    filtering,
    find_bad,
    read_lineage,
    shallow_at,
)
from .quarantine import STREAM_BIG_FILES, Quarantine, accept_objects, within_disk
from .refs import Offer, read_offer
from .repository import Repository
from .upstream import Upstream

INCOMING = "refs/mirrord/incoming/"
_FAILURES = 400
_HOPELESS = 64
_MOST_CUTS = 20
_TRIES = 3
_FEW = 8  # tips that are not worth asking for their history apart
_MANY = 50
_REDIRECT = re.compile(r"^warning: redirecting to (\S+)", re.MULTILINE)
_LONGEST = timedelta(hours=24)
_PARENTLESS = re.compile(r"could not read|parents of commit", re.IGNORECASE)
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
    """Asks one upstream for one mirror. `quiet` is the longest silence that is waited for; each further connection at the same
    time is a `lane`.
    """

    repository: Repository
    upstream: Upstream
    quarantine: Quarantine
    quiet: timedelta
    progress: Callable[[Progress], None] | None = None
    lane: Lane = nullcontext

    async def offer(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> Offer:
        """The refs that upstream has now. None at all is an UpstreamEmptyError, unless that may be."""
        doing = f"ask upstream {self.upstream.shown} for its refs"
        answer = await self.repository.git.run(
            "ls-remote",
            "--symref",
            "--",
            self.upstream.remote.url,
            remote=self.upstream.remote,
            timeout=self.quiet,
            doing=doing,
        )
        if not answer.lines and not may_be_empty:
            raise UpstreamEmptyError(
                f"cannot mirror {self.upstream.shown}: it has no refs",
                hint="nothing was changed, and what the mirror has is served on; push to upstream, check the URL, or follow it"
                " all the same with `mirrord mirror sync NAME --accept-loss`",
            )
        offer = await anyio.to_thread.run_sync(read_offer, answer.lines, patterns)
        redirects = _REDIRECT.findall(answer.stderr)
        return (
            replace(offer, redirected_to=masked_url(redirects[-1].rstrip("/")))
            if redirects
            else offer
        )

    async def fetch(
        self, oids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, MirrordError]:
        """Bring `oids`, the likeliest first, with everything they reach; answers those that upstream could not give.

        `known` are those that it could not give before, each with the message then: what they reach never changes, so they fail
        again for as long as the object that it names is damaged.
        """
        marking = anyio.Lock()
        failures_seen = False

        async def attempt(some: Sequence[str]) -> None:
            nonlocal failures_seen
            try:
                async with self.quarantine.directory("fetch") as objects:
                    await self._fetch_into(objects, some)
                    await self._accept(objects)
            except MirrordError:
                failures_seen = True
                raise
            if failures_seen:
                async with marking:
                    await self._mark(some)

        async with AsyncExitStack() as stack:
            insight = _Insight(self, oids, known or {}, stack)
            try:
                failed = await find_bad(
                    oids,
                    attempt,
                    is_theirs=blames_objects,
                    budget=_FAILURES,
                    hopeless=_HOPELESS,
                    insight=insight,
                    lane=self.lane,
                )
            finally:
                if failures_seen:
                    with anyio.CancelScope(shield=True):
                        await unmark(self.repository)
        absent = await self.repository.absent(set(oids) - failed.keys())
        return failed | {oid: _not_sent(self.upstream, oid) for oid in absent}

    async def fetch_filtered(self, objects: Path, oids: Sequence[str], kind: str) -> None:
        """Bring what a filter lets through into `objects`, unchecked: to be read there, and never to be accepted."""
        config, options = filtering(self.upstream, kind)
        await self._fetch_into(objects, oids, "upstream", config, options, shallow_at(objects))

    async def _fetch_into(
        self,
        objects: Path,
        oids: Sequence[str],
        remote: str | None = None,
        config: Sequence[str] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        await self.repository.git.run(
            *STREAM_BIG_FILES, *config,
            "fetch", "--progress", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", *options, "--stdin", "--",
            remote or self.upstream.remote.url,
            git_dir=self.repository.path,
            stdin="".join(f"{oid}\n" for oid in oids).encode("ascii"),
            quarantine_objects=objects,
            env=env,
            remote=self.upstream.remote,
            timeout=_LONGEST,
            quiet_timeout=self.quiet,
            memory_bytes=memory_limit_bytes(),
            progress=within_disk(objects, self.progress, f"fetch from upstream {self.upstream.shown}"),
            doing=f"fetch from upstream {self.upstream.shown}",
        )  # fmt: skip

    async def _accept(self, objects: Path) -> None:
        with anyio.CancelScope(shield=True), full_disk_named(f"mirror {self.repository.name}"):
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


class _Insight:
    """Which of the wanted tips a failure is about, by the objects that it names and by the history of the tips."""

    def __init__(
        self, fetcher: Fetcher, tips: Sequence[str], known: Mapping[str, str], stack: AsyncExitStack
    ) -> None:
        self._fetcher = fetcher
        self._tips = tips
        self._known = known
        self._stack = stack
        self._tries = _TRIES if len(tips) > _FEW else 0
        self._lineage: Lineage | None = None

    async def blame(self, error: MirrordError, group: Sequence[str]) -> Collection[str]:
        named = set(group) if len(group) == 1 else set(error.facts.get("objects", ()))
        blamed = named.intersection(self._tips)
        lost = error.facts.get("objects", ())
        blamed |= {tip for tip, reason in self._known.items() if any(oid in reason for oid in lost)}
        if self._lineage is None and self._tries and blamed.isdisjoint(group):
            self._tries -= 1
            self._lineage = await self._read(group)
        if self._lineage is not None and named:
            try:
                blamed |= await self._lineage.reaching(named)
            except (CorruptObjectError, GitFailedError):  # its objects are unchecked
                self._lineage, self._tries = None, 0
        return blamed

    def sort(self, group: Sequence[str]) -> Sequence[str] | None:
        """The oldest first: what the others build on."""
        return None if self._lineage is None else self._lineage.sort(group)

    async def _read(self, tips: Sequence[str]) -> Lineage | None:
        """With the trees, if those are whole; None where upstream cannot give the commits either."""
        objects = await self._stack.enter_async_context(
            self._fetcher.quarantine.directory("lineage")
        )
        kinds, cuts = [BLOBLESS, TREELESS], set[str]()
        while kinds and len(cuts) < _MOST_CUTS:
            try:
                await self._fetcher.fetch_filtered(objects, tips, kinds[0])
                return await read_lineage(self._fetcher.repository, tips, objects, kinds[0])
            except MirrordError as error:
                if not blames_objects(error):
                    raise
                if error.facts.get("filter_ignored"):
                    break
                named = (
                    set(error.facts.get("objects", ())) - cuts
                    if _PARENTLESS.search(error.message)
                    else set()
                )
                if not named:
                    del kinds[0]
                cuts |= named
                await anyio.to_thread.run_sync(cut_at, objects, named)
        return None


async def unmark(repository: Repository) -> None:
    """Remove the marks of a fetch, or of one that a crash ended."""
    found = [ref for ref in await repository.all_refs() if ref.startswith(INCOMING)]
    if not found:
        return
    lines = "".join(f"delete {ref}\n" for ref in found)
    await repository.git.run(
        "-c",
        "core.fsync=none",
        "update-ref",
        "--stdin",
        git_dir=repository.path,
        stdin=lines.encode(),
        doing="remove marks",
    )


def blames_objects(error: MirrordError) -> bool:
    """True when some of the wanted objects may be the cause, and others could come."""
    return not isinstance(error, _WHOLE_UPSTREAM) and not _CONNECTION.search(error.message)


def _not_sent(upstream: Upstream, oid: str) -> MirrordError:
    return UpstreamNotFoundError(
        f"cannot fetch {oid} from upstream {upstream.shown}: it was not sent",
        hint="upstream no longer has it; try a fallback",
    )
