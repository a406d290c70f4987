"""Fetches from an upstream: its refs, then objects by id into quarantine, checked and accepted.

Where upstream cannot give the objects of some refs, all others arrive. A connection that was cut
is taken up again with parts of what was asked for. Refs below `refs/mirrord/incoming/` mark what
was accepted so far, so that nothing is fetched twice.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from ... import errors
from ...errors import MirrordError, full_disk_named
from ...git.batch import object_info
from ...git.command import GitResult, lines_of
from ...git.configuration import Remote
from ...git.listing import RefList, list_refs
from ...host.processes import memory_limit_bytes
from ...presence import exists
from ...protocol import ProgressSink
from ...telemetry import masked
from ...units import Backoff
from .. import refs
from ..quarantine import STREAM_BIG_FILES, Quarantine, accept_objects, within_room
from ..repository import INCOMING, Repository
from .credentials import Credentials
from .upstream import Upstream, blames_objects, find_bad


class _Line:
    """Counts how often the connection to an upstream was cut, and pauses after each time.

    A fetch that begins again has no more than what arrived whole before, so it may be cut anew;
    ten times in a row, with pauses of half a minute in all, is a line that does not hold.
    """

    # 40 in all: a line that is cut after each piece would never come to an end
    _MAX_IN_A_ROW, _MAX = 10, 40

    def __init__(self, first_pause: timedelta) -> None:
        self.cuts = self._in_a_row = 0
        self._backoff = Backoff(first_pause, 16 * first_pause, spread=0.2)

    async def wait(self, error: errors.UpstreamUnavailableError) -> None:
        """Pause after a cut; raises `error` if it is none, or one too many.

        After a cut, a host that refuses a connection may be starting again.
        """
        is_slow = isinstance(error, errors.UpstreamTimeoutError)
        is_cut = self.cuts and not is_slow and "retry_after_s" not in error.facts
        if not is_cut and not error.facts.get("was_cut"):
            raise error
        self.cuts, self._in_a_row = self.cuts + 1, self._in_a_row + 1
        if self._in_a_row >= self._MAX_IN_A_ROW or self.cuts >= self._MAX:
            raise error
        await anyio.sleep(self._backoff.next().total_seconds())

    def held(self) -> None:
        """Count something that arrived."""
        self._in_a_row = 0
        self._backoff.reset()


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches from one upstream for one mirror.

    `quiet` is the longest silence to wait for; `first_pause` follows a connection that was cut.
    `kinds` are those of the objects that came.
    """

    repository: Repository
    upstream: Upstream
    quarantine: Quarantine
    quiet: timedelta
    credentials: Credentials
    progress: ProgressSink | None = None
    # 0.25, 0.5, 1, 2, then 4 s each: 25 s before the tenth cut in a row
    first_pause: timedelta = timedelta(seconds=0.25)
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def held(self) -> set[str]:
        """Return what came and is in the mirror."""
        return {oid for oid, kind in self.kinds.items() if kind != "missing"}

    async def offer(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> refs.Offer:
        """Ask upstream for HEAD and the refs of `patterns`; raises UpstreamEmptyError for none."""
        line = _Line(self.first_pause)
        answer = None
        while answer is None:
            try:
                answer = await self._list_refs(patterns)
            except errors.UpstreamUnavailableError as error:
                await line.wait(error)
        if not answer.lines and not may_be_empty:
            wanted = ", ".join(patterns)
            raise errors.UpstreamEmptyError(
                f"cannot mirror {self.upstream.shown}: it has no refs that match {wanted}",
                hint="nothing was changed, and the mirror still serves what it has; push to"
                " upstream, check the URL, or follow it all the same with"
                " `mirrord mirror sync NAME --accept-loss`",
            )
        offer = await to_thread.run_sync(lambda: refs.read_offer(answer.lines, patterns))
        if redirects := re.findall(r"(?m)^warning: redirecting to (\S+)", answer.stderr):
            return replace(offer, redirected_to=masked(redirects[-1].rstrip("/")))
        return offer

    async def _list_refs(self, patterns: Sequence[str]) -> RefList:
        ask = partial(
            list_refs,
            self.repository.git,
            self.repository.path,
            patterns=patterns,
            timeout=self.quiet,
            doing=f"ask upstream {self.upstream.shown} for its refs",
        )
        return await self.credentials.exchange(self.upstream, ask)

    async def fetch(
        self, oids: Sequence[str], earlier: Mapping[str, str] | None = None
    ) -> dict[str, errors.MirrordError]:
        """Fetch `oids`, the likeliest first, with all they reach; return those that failed.

        `earlier` are those that failed before, each with the message. What they reach never
        changes, so they fail again while the object in the message is damaged. After a connection
        that was cut, parts are asked for. Raises UpstreamUnavailableError where nothing came.
        """
        if oids:
            await self.quarantine.room.ensure(f"fetch from upstream {self.upstream.shown}")
        groups = _Groups(self)
        async with AsyncExitStack() as closing:
            lineage = _Lineage(self, oids, earlier or {}, closing)
            try:
                failed: dict[str, MirrordError] = await find_bad(
                    oids, groups.fetch, is_item_error=blames_objects, max_failures=400,
                    max_first_failures=64, blame=lineage.blame, sort=lineage.sort,
                )  # fmt: skip
            except errors.UpstreamUnavailableError as error:
                if not groups.arrived:
                    raise
                failed = {oid: error for oid in oids if oid not in groups.arrived}
            finally:
                if groups.has_failed:
                    with anyio.CancelScope(shield=True):
                        await unmark(self.repository)
        self.kinds.update(await self.repository.kinds(set(oids) - failed.keys()))
        for oid in [oid for oid in oids if self.kinds.get(oid) == "missing"]:
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
        """Fetch into an object directory."""
        doing = f"fetch from upstream {self.upstream.shown}"

        async def run(with_secrets: Remote) -> GitResult:
            return await self.repository.run(
                *STREAM_BIG_FILES, *config,
                # objects alone: no tags that nobody asked for, no FETCH_HEAD in the mirror, no gc
                "fetch", "--progress", "--no-tags", "--no-write-fetch-head",
                "--no-auto-maintenance",
                *options, "--stdin", "--", remote,
                stdin=lines_of(oids),
                quarantine_objects=objects,
                env=env,
                remote=with_secrets,
                # silence tells a dead upstream; a first fetch over a slow line takes hours
                timeout=timedelta(hours=24),
                quiet_timeout=self.quiet,
                memory_bytes=memory_limit_bytes(),
                progress=within_room(self.quarantine.room, self.progress, doing),
                doing=doing,
            )  # fmt: skip

        await self.credentials.exchange(self.upstream, run)


class _Groups:
    """Fetches groups of objects; after a cut their parts, which may arrive where the whole cannot.

    Once a fetch has failed, more follow: what arrived is marked, so that they need not repeat it.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher, self._line = fetcher, _Line(fetcher.first_pause)
        self.arrived: set[str] = set()
        self.has_failed = False

    async def fetch(self, group: Sequence[str]) -> None:
        try:
            await self._fetch_whole(group)
        except errors.UpstreamUnavailableError as error:
            await self._line.wait(error)
            middle = 1 if self._line.cuts == 1 else (len(group) + 1) // 2
            for part in filter(None, (group[:middle], group[middle:])):
                await self.fetch(part)
        else:
            self.arrived.update(group)
            self._line.held()

    async def _fetch_whole(self, group: Sequence[str]) -> None:
        fetcher, repository = self._fetcher, self._fetcher.repository
        try:
            async with fetcher.quarantine.directory("fetch") as objects:
                await fetcher.fetch_into(objects, group, fetcher.upstream.remote.url)
                full = full_disk_named(f"mirror {repository.name}")
                with anyio.CancelScope(shield=True), full:
                    await to_thread.run_sync(accept_objects, objects, repository.objects)
        except errors.MirrordError:
            self.has_failed = True
            raise
        if self.has_failed:
            await _update_marks(repository, [f"update {INCOMING}{oid} {oid}" for oid in group])
            if len(group) >= 50:
                await repository.pack_refs()


@dataclass(slots=True)
class _Lineage:
    """The history of wanted tips, which tells the tips that reach a damaged object.

    A failed fetch names the first object that stopped it. Commits and trees are a small part of a
    repository, and an upstream sends them without reading a blob (`--filter=blob:none`). They are
    unchecked, and never get into a mirror. An upstream that ignores filters is not asked again.
    `known` are tips that failed before, with the messages.
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
        """Return the tips that certainly fail for the error of `group`."""
        lost = error.facts.get("objects", ())
        named = set(group) if len(group) == 1 else set(lost)
        blamed = named.intersection(self.tips)
        blamed |= {tip for tip, reason in self.known.items() if any(oid in reason for oid in lost)}
        # for a few tips, halving is cheaper than their history
        worthwhile = self.history is None and self.tries and len(self.tips) > 8
        if worthwhile and blamed.isdisjoint(group):
            self.tries -= 1
            try:
                await self._read(group)
            except errors.UpstreamUnavailableError as cut:
                if not cut.facts.get("was_cut"):
                    raise
        if self.history is not None and named:
            try:
                blamed |= await self._reaching(named, self.history)
            except (errors.CorruptObjectError, errors.GitFailedError):  # of unchecked objects
                self.history, self.tries = None, 0
        return blamed

    def sort(self, group: Sequence[str]) -> Sequence[str] | None:
        """Sort the oldest first, because others build on them; None where history is unknown."""
        if self.history is None:
            return None
        position = {oid: number for number, (oid, *_) in enumerate(self.history)}
        return sorted(group, key=lambda tip: position.get(self.commits.get(tip) or tip, -1))

    async def _read(self, tips: Sequence[str]) -> None:
        """Fetch the history, with trees if they are whole, cut off at commits that are lost."""
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
        """Fetch the objects that a filter selects, unchecked."""
        upstream = self.fetcher.upstream
        config = (
            f"remote.upstream.url={upstream.remote.url}",
            # or git (2.39) would write it into the mirror's configuration
            "remote.upstream.promisor=true",
            f"remote.upstream.partialCloneFilter={kind}",
            "fetch.fsckObjects=false",
        )
        options = [f"--filter={kind}"]
        if upstream.is_local:
            # a local upstream serves filters only if its configuration or its command allows that
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
        commits = {tip: info.oid for tip, info in zip(tips, peeled, strict=True) if info.exists}
        words = ("rev-list", "--format=%H %T %P", "--no-commit-header", "--topo-order", "--reverse")
        listing = await self._ask(words, commits, "list the commits of an upstream")
        self.commits = commits
        self.history = await to_thread.run_sync(lambda: [it.split() for it in listing.lines])

    async def _reaching(self, oids: Collection[str], history: list[list[str]]) -> set[str]:
        """Return the tips that reach any of these objects."""
        seeds = set(oids)
        unknown = seeds.difference(self.commits, *history) if self.has_trees else set()
        if unknown:  # trees or blobs: commits that add or remove one reach it
            # -m: a merge alone may have brought it in; -t: trees are looked at too, not only files
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
        return {"GIT_SHALLOW_FILE": str(shallow)} if exists(shallow) else {}


async def unmark(repository: Repository) -> None:
    """Remove the marks of a fetch, also of one that a crash interrupted."""
    marks = [ref for ref in await repository.all_refs() if ref.startswith(INCOMING)]
    if marks:
        await _update_marks(repository, [f"delete {ref}" for ref in marks])


async def _update_marks(repository: Repository, lines: Sequence[str]) -> None:
    # not flushed, because losing marks in a crash is harmless
    words = ("-c", "core.fsync=none", "update-ref", "--stdin")
    await repository.run(*words, stdin=lines_of(lines), doing="mark fetched objects")
