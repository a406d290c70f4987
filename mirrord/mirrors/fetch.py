"""Fetching objects from an upstream: by id, into quarantine, checked, then accepted.

Never moves a ref that is visible: objects come first. Where upstream cannot give the objects of
some refs, those are found and all others arrive; refs below `refs/mirrord/incoming/` mark what was
accepted so far, so that nothing is fetched twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import anyio
from anyio import to_thread

from ..errors import (
    CorruptObjectError,
    GitFailedError,
    MirrordError,
    UpstreamEmptyError,
    UpstreamNotFoundError,
)
from ..git.batch import lines_of, object_info
from ..git.errors import masked_url
from ..host.files import full_disk_named
from ..host.processes import memory_limit_bytes
from ..protocol import Progress
from .bisect import Lane, blames_objects, find_bad
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
_BLOBLESS, _TREELESS = "blob:none", "tree:0"
_SHALLOW = "cut"
_PARENTLESS = re.compile(r"could not read|parents of commit", re.IGNORECASE)
_MOST_CUTS = 20
_TRIES = 3
_FEW = 8  # tips that are not worth asking for their history apart
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
            lineage = _Lineage(self, oids, known or {}, closing)
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

    async def fetch_filtered(self, objects: Path, oids: Sequence[str], kind: str) -> None:
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
        env = _shallow_environment(objects)
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


class _Lineage:
    """The history of wanted tips, by which a damaged object is traced to the tips that it stops.

    A failed fetch names the first object that stopped it. Commits and trees are a small part of a
    repository, and an upstream sends them without reading a file (`--filter=blob:none`): with them
    all tips that reach the object are known. They are unchecked, and never get into a
    mirror. From an upstream that knows no filters nothing is learnt. `known` are
    tips that failed before, with the messages.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        tips: Sequence[str],
        known: Mapping[str, str],
        closing: AsyncExitStack,
    ) -> None:
        self._fetcher = fetcher
        self._tips = tips
        self._known = known
        self._closing = closing
        self._tries = _TRIES if len(tips) > _FEW else 0
        self._objects = Path()
        self._commits: dict[str, str] = {}  # of each tip
        # (commit, tree, parents…) that the tips reach and the mirror lacks, the oldest first
        self._history: list[list[str]] | None = None
        self._has_trees = False

    async def blame(self, error: MirrordError, group: Sequence[str]) -> Collection[str]:
        """The tips that certainly fail, by what made `group` fail."""
        lost = error.facts.get("objects", ())
        named = set(group) if len(group) == 1 else set(lost)
        blamed = named.intersection(self._tips)
        blamed |= {tip for tip, reason in self._known.items() if any(oid in reason for oid in lost)}
        if self._history is None and self._tries and blamed.isdisjoint(group):
            self._tries -= 1
            await self._read(group)
        if self._history is not None and named:
            try:
                blamed |= await self._reaching(named, self._history)
            except (CorruptObjectError, GitFailedError):  # its objects are unchecked
                self._history, self._tries = None, 0
        return blamed

    def sort(self, group: Sequence[str]) -> Sequence[str] | None:
        """The oldest first, on which the others build; None where the history is unknown."""
        if self._history is None:
            return None
        position = {oid: number for number, (oid, *_) in enumerate(self._history)}
        return sorted(group, key=lambda tip: position.get(self._commits.get(tip) or tip, -1))

    async def _read(self, tips: Sequence[str]) -> None:
        """Fetch the history, with its trees if those are whole, cut below commits that are lost."""
        directory = self._fetcher.quarantine.directory("lineage")
        self._objects = await self._closing.enter_async_context(directory)
        kinds, cuts = [_BLOBLESS, _TREELESS], set[str]()
        while kinds and len(cuts) < _MOST_CUTS:
            try:
                await self._fetcher.fetch_filtered(self._objects, tips, kinds[0])
                await self._list_history(tips)
            except MirrordError as error:
                if not blames_objects(error):
                    raise
                if error.facts.get("filter_ignored"):
                    return
                named = set(error.facts.get("objects", ())) - cuts
                if not _PARENTLESS.search(error.message) or not named:
                    del kinds[0]
                    continue
                cuts |= named
                await to_thread.run_sync(_cut_at, self._objects, named)
            else:
                self._has_trees = kinds[0] == _BLOBLESS
                return

    async def _list_history(self, tips: Sequence[str]) -> None:
        repository = self._fetcher.repository
        peeled = await object_info(
            repository.git,
            repository.path,
            [f"{oid}^{{commit}}" for oid in tips],
            quarantine_objects=self._objects,
            doing="look up the commits of an upstream",
        )
        commits = {tip: found.oid for tip, found in zip(tips, peeled, strict=True) if found.exists}
        listing = await self._fetcher.repository.run(
            "rev-list", "--format=%H %T %P", "--no-commit-header", "--topo-order", "--reverse",
            "--stdin", "--not", "--all",
            stdin=lines_of(commits.values()),
            quarantine_objects=self._objects,
            env=_shallow_environment(self._objects),
            doing="list the commits of an upstream",
        )  # fmt: skip
        self._commits = commits
        self._history = await to_thread.run_sync(lambda: [it.split() for it in listing.lines])

    async def _reaching(self, oids: Collection[str], history: list[list[str]]) -> set[str]:
        """The tips that reach any of these objects."""
        seeds = set(oids)
        unknown = seeds.difference(self._commits, *history) if self._has_trees else set()
        if unknown:  # trees or files: the commits that add and those that remove one both reach it
            found = await self._fetcher.repository.run(
                "log", "--format=%H", "--no-patch", "-m", "-t", "--no-renames",
                *(f"--find-object={oid}" for oid in sorted(unknown)), "--stdin", "--not", "--all",
                stdin=lines_of(self._commits.values()),
                quarantine_objects=self._objects,
                env=_shallow_environment(self._objects),
                doing="look for the commits that reach a damaged object",
            )  # fmt: skip
            seeds |= set(found.lines)

        def descend() -> set[str]:
            reached = set(seeds)
            for oid, tree, *parents in history:
                if tree in seeds or not reached.isdisjoint(parents):
                    reached.add(oid)
            return {tip for tip, oid in self._commits.items() if tip in reached or oid in reached}

        return await to_thread.run_sync(descend)


def _cut_at(objects: Path, commits: Collection[str]) -> None:
    """End the history at these commits: upstream then does not look for their parents."""
    with (objects / _SHALLOW).open("a", encoding="ascii") as file:
        file.writelines(f"{oid}\n" for oid in commits)


def _shallow_environment(objects: Path) -> dict[str, str]:
    """For a git that works on what `Lineage` fetched."""
    return {"GIT_SHALLOW_FILE": str(objects / _SHALLOW)} if (objects / _SHALLOW).exists() else {}


async def unmark(repository: Repository) -> None:
    """Remove the marks of a fetch, also of one that a crash ended."""
    marks = [ref for ref in await repository.all_refs() if ref.startswith(INCOMING)]
    if marks:
        await _update_marks(repository, [f"delete {ref}" for ref in marks])


async def _update_marks(repository: Repository, lines: Sequence[str]) -> None:
    words = (*_NO_FLUSH, "update-ref", "--stdin")
    await repository.run(*words, stdin=lines_of(lines), doing="mark fetched objects")
