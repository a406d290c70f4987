"""Fetching objects from an upstream: by id, into quarantine, checked, then accepted.

Never moves a ref that is visible: objects come first. Where upstream cannot give the objects of
some refs, those are found and all others arrive; refs below `refs/mirrord/incoming/` mark what was
accepted so far, so that nothing is fetched twice.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import anyio
from anyio import to_thread

from .. import errors
from ..git.command import GitResult, lines_of, object_info
from ..git.errors import masked_url
from ..host.files import full_disk_named
from ..host.processes import memory_limit_bytes
from ..protocol import ProgressSink
from .bisect import blames_objects, find_bad
from .quarantine import STREAM_BIG_FILES, Quarantine, accept_objects, within_room
from .refs import Offer, read_offer
from .repository import Repository
from .upstream import Upstream

INCOMING = "refs/mirrord/incoming/"
_MOST_REFS_BYTES = 64 * 1024**2  # of an offer: about a million refs


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Asks one upstream for one mirror. `quiet` is the longest silence to wait for."""

    repository: Repository
    upstream: Upstream
    quarantine: Quarantine
    quiet: timedelta
    progress: ProgressSink | None = None

    async def offer(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> Offer:
        """The refs that upstream has now; raises UpstreamEmptyError where it has none."""
        answer = await self.repository.git.run(
            "ls-remote", "--symref", "--", self.upstream.remote.url,
            remote=self.upstream.remote,
            timeout=self.quiet,
            memory_bytes=4 * _MOST_REFS_BYTES,
            stdout_limit_bytes=_MOST_REFS_BYTES,
            doing=f"ask upstream {self.upstream.shown} for its refs",
        )  # fmt: skip
        if not answer.lines and not may_be_empty:
            raise errors.UpstreamEmptyError(
                f"cannot mirror {self.upstream.shown}: it has no refs",
                hint="nothing was changed, and the mirror still serves what it has; push to"
                " upstream, check the URL, or follow it all the same with"
                " `mirrord mirror sync NAME --accept-loss`",
            )
        offer = await to_thread.run_sync(lambda: read_offer(answer.lines, patterns))
        if redirects := re.findall(r"(?m)^warning: redirecting to (\S+)", answer.stderr):
            return replace(offer, redirected_to=masked_url(redirects[-1].rstrip("/")))
        return offer

    async def fetch(
        self, oids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, errors.MirrordError]:
        """Fetch `oids`, the likeliest first, with all they reach; answers those that did not come.

        `known` are those that failed before, each with the message: as the objects that they reach
        never change, they fail for as long as the object in the message is damaged.
        """
        failures_seen = False
        if oids:
            await self.quarantine.room.ensure(f"fetch from upstream {self.upstream.shown}")

        async def attempt(some: Sequence[str]) -> None:
            nonlocal failures_seen
            try:
                async with self.quarantine.directory("fetch") as objects:
                    await self.fetch_into(objects, some, self.upstream.remote.url)
                    full = full_disk_named(f"mirror {self.repository.name}")
                    with anyio.CancelScope(shield=True), full:
                        await to_thread.run_sync(accept_objects, objects, self.repository.objects)
            except errors.MirrordError:
                failures_seen = True
                raise
            if failures_seen:  # tell the next fetch what is here already
                lines = [f"update {INCOMING}{oid} {oid}" for oid in some]
                await _update_marks(self.repository, lines)
                if len(some) >= 50:
                    await self.repository.pack_refs()

        async with AsyncExitStack() as closing:
            lineage = _Lineage(self, oids, known or {}, closing)
            try:
                failed = await find_bad(
                    oids, attempt, is_theirs=blames_objects, budget=400, hopeless=64,
                    blame=lineage.blame, sort=lineage.sort,
                )  # fmt: skip
            finally:
                if failures_seen:
                    with anyio.CancelScope(shield=True):
                        await unmark(self.repository)
        for oid in await self.repository.absent(set(oids) - failed.keys()):
            failed[oid] = errors.UpstreamNotFoundError(
                f"cannot fetch {oid} from upstream {self.upstream.shown}: it was not sent",
                hint="upstream no longer has it; try a fallback",
            )
        return failed

    async def fetch_into(
        self,
        objects: Path,
        oids: Sequence[str],
        remote: str,
        config: Sequence[str] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Fetch into an object directory; accepts nothing."""
        doing = f"fetch from upstream {self.upstream.shown}"
        await self.repository.run(
            *STREAM_BIG_FILES, *config,
            "fetch", "--progress", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance",
            *options, "--stdin", "--", remote,
            stdin=lines_of(oids),
            quarantine_objects=objects,
            env=env,
            remote=self.upstream.remote,
            timeout=timedelta(hours=24),
            quiet_timeout=self.quiet,
            memory_bytes=memory_limit_bytes(),
            progress=within_room(self.quarantine.room, self.progress, doing),
            doing=doing,
        )  # fmt: skip


@dataclass(slots=True)
class _Lineage:
    """The history of wanted tips, by which a damaged object is traced to the tips that it stops.

    A failed fetch names the first object that stopped it. Commits and trees are a small part of a
    repository, and an upstream sends them without reading a file (`--filter=blob:none`): with them
    all tips that reach the object are known. They are unchecked, and never get into a mirror. From
    an upstream that knows no filters nothing is learnt. `known` are tips that failed before, with
    the messages.
    """

    fetcher: Fetcher
    tips: Sequence[str]
    known: Mapping[str, str]
    closing: AsyncExitStack
    tries: int = 3
    objects: Path = Path()
    commits: dict[str, str] = field(default_factory=dict)  # of each tip
    # (commit, tree, parents…) that the tips reach and the mirror lacks, the oldest first
    history: list[list[str]] | None = None
    has_trees: bool = False

    async def blame(self, error: errors.MirrordError, group: Sequence[str]) -> Collection[str]:
        """The tips that certainly fail, by what made `group` fail."""
        lost = error.facts.get("objects", ())
        named = set(group) if len(group) == 1 else set(lost)
        blamed = named.intersection(self.tips)
        blamed |= {tip for tip, reason in self.known.items() if any(oid in reason for oid in lost)}
        # a few tips are not worth asking for their history apart
        worthwhile = self.history is None and self.tries and len(self.tips) > 8
        if worthwhile and blamed.isdisjoint(group):
            self.tries -= 1
            await self._read(group)
        if self.history is not None and named:
            try:
                blamed |= await self._reaching(named, self.history)
            except (errors.CorruptObjectError, errors.GitFailedError):  # its objects are unchecked
                self.history, self.tries = None, 0
        return blamed

    def sort(self, group: Sequence[str]) -> Sequence[str] | None:
        """The oldest first, on which the others build; None where the history is unknown."""
        if self.history is None:
            return None
        position = {oid: number for number, (oid, *_) in enumerate(self.history)}
        return sorted(group, key=lambda tip: position.get(self.commits.get(tip) or tip, -1))

    async def _read(self, tips: Sequence[str]) -> None:
        """Fetch the history, with its trees if those are whole, cut below commits that are lost."""
        directory = self.fetcher.quarantine.directory("lineage")
        self.objects = await self.closing.enter_async_context(directory)
        filters, cuts = ["blob:none", "tree:0"], set[str]()
        while filters and len(cuts) < 20:
            try:
                await self._fetch(tips, filters[0])
                await self._list_history(tips)
                self.has_trees = filters[0] == "blob:none"
                return
            except errors.MirrordError as error:
                if not blames_objects(error):
                    raise
                if error.facts.get("filter_ignored"):
                    return
                named = set(error.facts.get("objects", ())) - cuts
                is_parentless = re.search(r"(?i)could not read|parents of commit", error.message)
                if not is_parentless or not named:
                    del filters[0]
                    continue
            cuts |= named  # upstream then does not look for the parents of these
            with (self.objects / "cut").open("a", encoding="ascii") as file:
                file.writelines(f"{oid}\n" for oid in named)

    async def _fetch(self, tips: Sequence[str], kind: str) -> None:
        """Fetch the objects that a filter selects, unchecked: to be read, never to be accepted."""
        upstream = self.fetcher.upstream
        config = (
            f"remote.upstream.url={upstream.remote.url}",
            # a promisor from the start: else git (2.39) writes that into the mirror's configuration
            "remote.upstream.promisor=true",
            f"remote.upstream.partialCloneFilter={kind}",
            "fetch.fsckObjects=false",
        )
        options = [f"--filter={kind}"]
        if upstream.is_local:
            # an upstream on this machine serves filters only where its configuration says so, or
            # the command that serves it
            options += ["--upload-pack", "git -c uploadpack.allowFilter=true upload-pack"]
        words = [word for setting in config for word in ("-c", setting)]
        env = self._environment()
        await self.fetcher.fetch_into(self.objects, tips, "upstream", words, options, env)

    async def _list_history(self, tips: Sequence[str]) -> None:
        repository = self.fetcher.repository
        peeled = await object_info(
            repository.git,
            repository.path,
            [f"{oid}^{{commit}}" for oid in tips],
            quarantine_objects=self.objects,
            doing="look up the commits of an upstream",
        )
        commits = {tip: found.oid for tip, found in zip(tips, peeled, strict=True) if found.exists}
        words = ("rev-list", "--format=%H %T %P", "--no-commit-header", "--topo-order", "--reverse")
        listing = await self._ask(words, commits, "list the commits of an upstream")
        self.commits = commits
        self.history = await to_thread.run_sync(lambda: [it.split() for it in listing.lines])

    async def _reaching(self, oids: Collection[str], history: list[list[str]]) -> set[str]:
        """The tips that reach any of these objects."""
        seeds = set(oids)
        unknown = seeds.difference(self.commits, *history) if self.has_trees else set()
        if unknown:  # trees or files: the commits that add and those that remove one both reach it
            words = ("log", "--format=%H", "--no-patch", "-m", "-t", "--no-renames")
            finds = (f"--find-object={oid}" for oid in sorted(unknown))
            doing = "look for the commits that reach a damaged object"
            seeds |= set((await self._ask((*words, *finds), self.commits, doing)).lines)

        def descend() -> set[str]:
            reached = set(seeds)
            for oid, tree, *parents in history:
                if tree in seeds or not reached.isdisjoint(parents):
                    reached.add(oid)
            return {tip for tip, oid in self.commits.items() if tip in reached or oid in reached}

        return await to_thread.run_sync(descend)

    async def _ask(self, words: Sequence[str], commits: Mapping[str, str], doing: str) -> GitResult:
        return await self.fetcher.repository.run(
            *words, "--stdin", "--not", "--all",
            stdin=lines_of(commits.values()),
            quarantine_objects=self.objects,
            env=self._environment(),
            doing=doing,
        )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        shallow = self.objects / "cut"
        return {"GIT_SHALLOW_FILE": str(shallow)} if shallow.exists() else {}


async def unmark(repository: Repository) -> None:
    """Remove the marks of a fetch, also of one that a crash ended."""
    marks = [ref for ref in await repository.all_refs() if ref.startswith(INCOMING)]
    if marks:
        await _update_marks(repository, [f"delete {ref}" for ref in marks])


async def _update_marks(repository: Repository, lines: Sequence[str]) -> None:
    # not flushed: marks are lost in a crash without harm
    words = ("-c", "core.fsync=none", "update-ref", "--stdin")
    await repository.run(*words, stdin=lines_of(lines), doing="mark fetched objects")
