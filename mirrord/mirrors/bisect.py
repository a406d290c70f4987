"""Finding the bad ones among many by asking for groups of them.

One damaged ref upstream makes a fetch of everything fail. Where the failure tells which items share its cause, those are left
out and the rest is asked for again: a step for each cause. Where it tells nothing, groups are halved, and the items of a small
group that fails are asked for one by one, several at a time: most of the steps are there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import anyio

from ..errors import MirrordError, UpstreamThrottledError
from ..git.batch import object_info
from .repository import Repository
from .upstream import Upstream

T = TypeVar("T")
Attempt = Callable[[Sequence[T]], Awaitable[None]]
Lane = Callable[[], AbstractAsyncContextManager[object]]

_LANES = 4
_SMALL = 8
_PATIENT = 3  # so many failures of which the cause is known are followed by the whole rest, not by halves of it


class Insight(Protocol[T]):
    """What is known of the items beside how an attempt ended."""

    async def blame(self, error: MirrordError, group: Sequence[T]) -> Collection[T]:
        """Which of all items certainly fail, by what made that group fail."""

    def sort(self, group: Sequence[T]) -> Sequence[T] | None:
        """Those first that make others fail; None where that is not known."""


async def find_bad(
    items: Sequence[T],
    attempt: Attempt[T],
    *,
    is_theirs: Callable[[MirrordError], bool],
    budget: int,
    hopeless: int,
    insight: Insight[T] | None = None,
    lane: Lane = nullcontext,
) -> dict[T, MirrordError]:
    """Call `attempt` on all of `items`, then on ever smaller groups of those left; answers those that failed, with the error.

    An error that is not theirs, the items', is raised. Each call beside another one holds a `lane`. What is left is given the
    last error untried after `budget` failures, or when `hopeless` single items failed before anything succeeded.
    """
    bad: dict[T, MirrordError] = {}
    waiting: list[Sequence[T]] = [items]
    failures = alone = 0
    any_whole = False

    async def note(group: Sequence[T], error: MirrordError) -> None:
        nonlocal failures, alone
        failures, alone = failures + 1, alone + (len(group) == 1)
        blamed = {*group} if len(group) == 1 else set[T]()
        blamed |= {*(await insight.blame(error, group) if insight else ())}
        bad.update({item: error for item in items if item in blamed and item not in bad})

    while waiting:
        group = [item for item in waiting.pop() if item not in bad]
        error = await _tried(group, attempt, is_theirs) if group else None
        if error is None:
            any_whole = any_whole or bool(group)
            continue
        await note(group, error)
        rest = [item for item in group if item not in bad]
        arranged = insight.sort(rest) if insight else None
        if failures > budget or (not any_whole and alone >= hopeless):
            bad |= dict.fromkeys(rest, _untried(error))
        elif len(rest) < len(group) and failures <= _PATIENT:
            waiting.append(rest)
        elif arranged is None and len(rest) <= _SMALL:
            found = await _one_by_one(rest, attempt, is_theirs, lane)
            any_whole = any_whole or len(found) < len(rest)
            for item, why in found.items():
                await note([item], why)
        else:
            # where nothing is known of them, the first is the likeliest, and makes the rest cheaper
            middle = 1 if failures == 1 and arranged is None else len(rest) // 2
            arranged = arranged or rest
            waiting += [arranged[middle:], arranged[:middle]]
    return bad


def _untried(error: MirrordError) -> MirrordError:
    return type(error)("cannot ask for it by itself: too many others failed", hint=error.hint)


async def _tried(
    group: Sequence[T], attempt: Attempt[T], is_theirs: Callable[[MirrordError], bool]
) -> MirrordError | None:
    try:
        await attempt(group)
    except MirrordError as error:
        if not is_theirs(error):
            raise
        return error
    return None


async def _one_by_one(
    items: Sequence[T], attempt: Attempt[T], is_theirs: Callable[[MirrordError], bool], lane: Lane
) -> dict[T, MirrordError]:
    """The first in line needs no lane, which the caller has; the others help while there is a lane to be had."""
    queue, failed = list(items), dict[T, MirrordError]()
    idle: set[anyio.CancelScope] = set()

    async def work() -> None:
        while queue:
            item = queue.pop(0)
            if error := await _tried([item], attempt, is_theirs):
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


_SHALLOW = "cut"
BLOBLESS, TREELESS = "blob:none", "tree:0"


@dataclass(frozen=True, slots=True)
class Lineage:
    """The commits that `tips` reach and the mirror lacks, in `objects`, as (commit, tree, parents…), the oldest first."""

    repository: Repository
    objects: Path
    commits: dict[str, str]
    history: list[list[str]]
    has_trees: bool

    async def reaching(self, oids: Collection[str]) -> set[str]:
        """The tips that reach any of these objects."""
        seeds = set(oids)
        unknown = seeds.difference(self.commits, *self.history) if self.has_trees else set()
        if unknown:
            seeds |= await self._commits_with(unknown)
        return await anyio.to_thread.run_sync(self._descendants, seeds)

    def sort(self, tips: Collection[str]) -> list[str]:
        """Tips whose history is part of another's come before it."""
        position = {oid: number for number, (oid, *_) in enumerate(self.history)}
        return sorted(tips, key=lambda tip: position.get(self.commits.get(tip) or tip, -1))

    async def _commits_with(self, oids: Collection[str]) -> set[str]:
        """The commits that brought a tree or a file with one of these ids, or took it away: both reach it."""
        found = await self.repository.git.run(
            "log", "--format=%H", "--no-patch", "-m", "-t", "--no-renames", *(f"--find-object={oid}" for oid in sorted(oids)),
            "--stdin", "--not", "--all",
            git_dir=self.repository.path,
            stdin="".join(f"{oid}\n" for oid in self.commits.values()).encode(),
            quarantine_objects=self.objects,
            env=shallow_at(self.objects),
            doing="look for the commits that reach a damaged object",
        )  # fmt: skip
        return set(found.lines)

    def _descendants(self, seeds: set[str]) -> set[str]:
        reached = set(seeds)
        for oid, tree, *parents in self.history:
            if tree in seeds or not reached.isdisjoint(parents):
                reached.add(oid)
        return {tip for tip, commit in self.commits.items() if tip in reached or commit in reached}


async def read_lineage(
    repository: Repository, tips: Sequence[str], objects: Path, kind: str
) -> Lineage:
    """Read what a fetch with the filter `kind` brought into `objects`."""
    peeled = await object_info(
        repository.git,
        repository.path,
        [f"{oid}^{{commit}}" for oid in tips],
        quarantine_objects=objects,
        doing="look up the commits of an upstream",
    )
    commits = {tip: found.oid for tip, found in zip(tips, peeled, strict=True) if found.exists}
    listing = await repository.git.run(
        "rev-list", "--format=%H %T %P", "--no-commit-header", "--topo-order", "--reverse", "--stdin", "--not", "--all",
        git_dir=repository.path,
        stdin="".join(f"{oid}\n" for oid in commits.values()).encode(),
        quarantine_objects=objects,
        env=shallow_at(objects),
        doing="list the commits of an upstream",
    )  # fmt: skip
    history = await anyio.to_thread.run_sync(lambda: [line.split() for line in listing.lines])
    return Lineage(repository, objects, commits, history, has_trees=kind == BLOBLESS)


def cut_at(objects: Path, commits: Collection[str]) -> None:
    """Have the fetches into `objects` tell upstream that history ends at these commits: it does not look for their parents."""
    with (objects / _SHALLOW).open("a", encoding="ascii") as file:
        file.writelines(f"{oid}\n" for oid in commits)


def shallow_at(objects: Path) -> dict[str, str]:
    return {"GIT_SHALLOW_FILE": str(objects / _SHALLOW)} if (objects / _SHALLOW).exists() else {}


def filtering(upstream: Upstream, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The configuration and the options of a fetch from the remote `upstream` that takes only what the filter lets through.

    The remote is a promisor from the start: else git (2.39) writes that into the mirror's configuration.
    """
    config = {
        "remote.upstream.url": upstream.remote.url,
        "remote.upstream.promisor": "true",
        "remote.upstream.partialCloneFilter": kind,
        "fetch.fsckObjects": "false",
    }
    # an upstream on this machine knows filters where its own configuration says so, or the command that serves it
    allowing = (
        ("--upload-pack", "git -c uploadpack.allowFilter=true upload-pack")
        if upstream.is_local
        else ()
    )
    return tuple(part for key, value in config.items() for part in ("-c", f"{key}={value}")), (
        f"--filter={kind}",
        *allowing,
    )
