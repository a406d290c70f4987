"""Find the tips that a damaged upstream cannot give, so that all others arrive.

One damaged object upstream makes a fetch of everything fail. `find_bad` asks for ever smaller
groups: where a failure shows which items share its cause, those are left out and the rest is asked
for again, a step for each cause; where it shows nothing, groups are halved, and small ones tried
item by item, several at a time. `Lineage` is what shows it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import to_thread

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
from ..git.batch import lines_of, object_info
from .quarantine import Quarantine
from .repository import Repository

T = TypeVar("T")
Attempt = Callable[[Sequence[T]], Awaitable[None]]
Lane = Callable[[], AbstractAsyncContextManager[object]]
FetchFiltered = Callable[[Path, Sequence[str], str], Awaitable[None]]

_LANES = 4
_SMALL = 8
_PATIENT = 3  # after so many failures with a known cause, the rest is halved even so

BLOBLESS, TREELESS = "blob:none", "tree:0"
_SHALLOW = "cut"
_PARENTLESS = re.compile(r"could not read|parents of commit", re.IGNORECASE)
_WHOLE_UPSTREAM = (
    UpstreamAuthError, UpstreamNotFoundError, UpstreamThrottledError, UpstreamTimeoutError,
    UpstreamEmptyError, DiskFullError, GitKilledError,
)  # fmt: skip
_CONNECTION = re.compile(
    r"could not resolve|failed to connect|couldn't connect|unable to connect|unable to access"
    r"|connection (refused|reset)|no route to host|network is unreachable|returned error: 5"
    r"|SSL (certificate|connect|routines)",
    re.IGNORECASE,
)
_MOST_CUTS = 20
_TRIES = 3
_FEW = 8  # tips that are not worth asking for their history apart


async def find_bad(
    items: Sequence[T],
    attempt: Attempt[T],
    *,
    is_theirs: Callable[[MirrordError], bool],
    budget: int,
    hopeless: int,
    blame: Callable[[MirrordError, Sequence[T]], Awaitable[Collection[T]]] | None = None,
    sort: Callable[[Sequence[T]], Sequence[T] | None] = lambda _: None,
    lane: Lane = nullcontext,
) -> dict[T, MirrordError]:
    """Call `attempt` on `items`, then on ever smaller groups; answers the items that failed.

    An error that is not theirs, the items', is raised. `blame` answers all items that certainly
    fail for the cause of a group's failure; `sort` puts those first that make others fail, or
    answers None where that is unknown. Each call beside another one holds a `lane`. The rest gets
    the last error untried after `budget` failures, or when `hopeless` single items failed before
    anything succeeded.
    """
    bad: dict[T, MirrordError] = {}
    waiting: list[Sequence[T]] = [items]
    failures = alone = 0
    any_whole = False

    async def note(group: Sequence[T], error: MirrordError) -> None:
        nonlocal failures, alone
        failures, alone = failures + 1, alone + (len(group) == 1)
        blamed = {
            *(group if len(group) == 1 else ()),
            *(await blame(error, group) if blame else ()),
        }
        bad.update({item: error for item in items if item in blamed and item not in bad})

    while waiting:
        group = [item for item in waiting.pop() if item not in bad]
        error = await _try(group, attempt, is_theirs) if group else None
        if error is None:
            any_whole = any_whole or bool(group)
            continue
        await note(group, error)
        rest = [item for item in group if item not in bad]
        arranged = sort(rest)
        if failures > budget or (not any_whole and alone >= hopeless):
            untried = "cannot ask for it by itself: too many others failed"
            bad |= dict.fromkeys(rest, type(error)(untried, hint=error.hint))
        elif len(rest) < len(group) and failures <= _PATIENT:
            waiting.append(rest)
        elif arranged is None and len(rest) <= _SMALL:
            found = await _try_each(rest, attempt, is_theirs, lane)
            any_whole = any_whole or len(found) < len(rest)
            for item, why in found.items():
                await note([item], why)
        else:
            # where nothing is known of them, the first is the likeliest, and makes the rest cheaper
            middle = 1 if failures == 1 and arranged is None else len(rest) // 2
            arranged = arranged or rest
            waiting += [arranged[middle:], arranged[:middle]]
    return bad


async def _try(
    group: Sequence[T], attempt: Attempt[T], is_theirs: Callable[[MirrordError], bool]
) -> MirrordError | None:
    try:
        await attempt(group)
    except MirrordError as error:
        if not is_theirs(error):
            raise
        return error
    return None


async def _try_each(
    items: Sequence[T], attempt: Attempt[T], is_theirs: Callable[[MirrordError], bool], lane: Lane
) -> dict[T, MirrordError]:
    """Try items in the caller's own lane, helped by others for as long as there are free lanes."""
    queue, failed = list(items), dict[T, MirrordError]()
    idle: set[anyio.CancelScope] = set()

    async def work() -> None:
        while queue:
            item = queue.pop(0)
            if error := await _try([item], attempt, is_theirs):
                failed[item] = error

    async def help_out() -> None:
        with anyio.CancelScope() as scope:
            idle.add(scope)
            try:
                async with lane():
                    idle.discard(scope)
                    await work()
            except UpstreamThrottledError:
                if scope not in idle:
                    raise

    try:
        async with anyio.create_task_group() as tasks:
            for _ in items[1:_LANES]:
                tasks.start_soon(help_out)
            await work()
            for scope in idle:
                scope.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return failed


class Lineage:
    """The history of wanted tips, by which a damaged object is traced to the tips that it stops.

    A failed fetch names the first object that stopped it. Commits and trees are a small part of a
    repository, and an upstream sends them without reading a file (`--filter=blob:none`): with them
    all tips that reach the object are known. They are fetched into `directory()`, unchecked, and
    never get into a mirror. From an upstream that knows no filters nothing is learnt. `known` are
    tips that failed before, with the messages.
    """

    def __init__(
        self,
        repository: Repository,
        quarantine: Quarantine,
        fetch: FetchFiltered,
        tips: Sequence[str],
        known: Mapping[str, str],
        closing: AsyncExitStack,
    ) -> None:
        self._repository = repository
        self._quarantine = quarantine
        self._fetch = fetch
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
        directory = self._quarantine.directory("lineage")
        self._objects = await self._closing.enter_async_context(directory)
        kinds, cuts = [BLOBLESS, TREELESS], set[str]()
        while kinds and len(cuts) < _MOST_CUTS:
            try:
                await self._fetch(self._objects, tips, kinds[0])
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
                self._has_trees = kinds[0] == BLOBLESS
                return

    async def _list_history(self, tips: Sequence[str]) -> None:
        peeled = await object_info(
            self._repository.git,
            self._repository.path,
            [f"{oid}^{{commit}}" for oid in tips],
            quarantine_objects=self._objects,
            doing="look up the commits of an upstream",
        )
        commits = {tip: found.oid for tip, found in zip(tips, peeled, strict=True) if found.exists}
        listing = await self._repository.run(
            "rev-list", "--format=%H %T %P", "--no-commit-header", "--topo-order", "--reverse",
            "--stdin", "--not", "--all",
            stdin=lines_of(commits.values()),
            quarantine_objects=self._objects,
            env=shallow_environment(self._objects),
            doing="list the commits of an upstream",
        )  # fmt: skip
        self._commits = commits
        self._history = await to_thread.run_sync(lambda: [it.split() for it in listing.lines])

    async def _reaching(self, oids: Collection[str], history: list[list[str]]) -> set[str]:
        """The tips that reach any of these objects."""
        seeds = set(oids)
        unknown = seeds.difference(self._commits, *history) if self._has_trees else set()
        if unknown:  # trees or files: the commits that add and those that remove one both reach it
            found = await self._repository.run(
                "log", "--format=%H", "--no-patch", "-m", "-t", "--no-renames",
                *(f"--find-object={oid}" for oid in sorted(unknown)), "--stdin", "--not", "--all",
                stdin=lines_of(self._commits.values()),
                quarantine_objects=self._objects,
                env=shallow_environment(self._objects),
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


def shallow_environment(objects: Path) -> dict[str, str]:
    """For a git that works on what `Lineage` fetched."""
    return {"GIT_SHALLOW_FILE": str(objects / _SHALLOW)} if (objects / _SHALLOW).exists() else {}


def blames_objects(error: MirrordError) -> bool:
    """Whether some of the wanted objects may be the cause, so that others could come."""
    return not isinstance(error, _WHOLE_UPSTREAM) and not _CONNECTION.search(error.message)
