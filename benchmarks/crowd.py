"""Many environments at once: 64 tasks on one `AsyncClient` do whole turns, in turn with git doing the same.

A turn is seven requests, or three where `finish` ends it: a reset before a release would make a tree for nobody.
The first turns of all tasks begin at the same moment, so each verb of them waits for those of the others; they are
listed apart.

Both have the machine to themselves for a few seconds, several times over. A turn that fails, or whose patch is not
git's, is counted.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from measured_daemon import Daemon
from results import Figure, Latency
from rivals import Git
from rollouts import Change, make_change

from mirrord import AsyncClient
from mirrord.errors import MirrordError

T = TypeVar("T")

_SLICES = 4
_CHANGES = 16
_FEW = 10  # new files
_AT_ONCE = ", all at once"  # of verbs in the first turn of each task


@dataclass
class Crowd:
    """What the tasks did: seconds of each verb, turns, and what went wrong."""

    daemon: Daemon
    instance: str
    work: list[tuple[Change, bytes]]
    by_finish: bool
    taken: dict[str, list[float]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)

    async def turns(self, tasks: int, seconds: float) -> None:
        began = time.perf_counter()
        async with AsyncClient(self.daemon.socket) as client:
            each = (self._task(client, number, began + seconds) for number in range(tasks))
            await asyncio.gather(*each)

    async def _task(self, client: AsyncClient, number: int, ends: float) -> None:
        change, expected = self.work[number % len(self.work)]
        when = _AT_ONCE
        while (began := time.perf_counter()) < ends:
            try:
                await self._turn(client, change, expected, when)
            except MirrordError as error:
                self.failed[error.code] += 1
            else:
                self.taken.setdefault("turn", []).append(time.perf_counter() - began)
            when = ""

    async def _turn(self, client: AsyncClient, change: Change, expected: bytes, when: str) -> None:
        async def timed(verb: str, work: Awaitable[T]) -> T:
            began = time.perf_counter()
            done = await work
            self.taken.setdefault(verb + when, []).append(time.perf_counter() - began)
            return done

        checkout = await timed("checkout", client.checkout(self.instance))
        await timed("write", asyncio.to_thread(change.write, checkout.path))
        if self.by_finish:
            finished = await timed("finish", checkout.finish(grade=True))
            patch, grade = finished.diff, finished.grade
            assert grade is not None
            await timed("release", grade.release())
        else:
            patch = await timed("diff", checkout.diff())
            grade = await timed("grade", checkout.grade())
            await timed("release", grade.release())
            await timed("reset", checkout.reset())
            await timed("release", checkout.release())
        if patch != expected:
            self.failed["wrong patch"] += 1


def git_turns(git: Git, commit: str, change: Change, expected: bytes, seconds: float) -> int:
    """Worktrees of one mirror; runs in a process of its own."""
    done, ends = 0, time.perf_counter() + seconds
    while time.perf_counter() < ends:
        tree = git.area / f"crowd-{os.getpid()}"
        try:
            git.worktree_add(tree, commit)
            change.write(tree)
            assert git.diff(tree) == expected
            git.worktree_remove(tree)
        except RuntimeError:  # git 2.39 reads a worktree that another process begins to add
            git.remove(tree)
        else:
            done += 1
    return done


def compare(
    daemon: Daemon,
    git: Git,
    commit: str,
    instance: str,
    changed: int,
    created: int,
    tasks: int,
    seconds: float,
    *,
    by_finish: bool,
) -> tuple[list[Latency], list[Figure]]:
    """Whole turns of ours and of git's, alternating; `seconds` of each."""
    clone = git.fresh()
    git.clone_isolated(clone, commit)
    work = [_expected(git, clone, changed, created, number) for number in range(_CHANGES)]
    crowd = Crowd(daemon, instance, work, by_finish)
    with daemon.client() as client:
        client.checkout(instance).release()
    theirs, ours_s, theirs_s, memory = 0, 0.0, 0.0, 0.0
    spent = [0.0, 0.0]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for _ in range(_SLICES):
            began = time.perf_counter()
            before = daemon.cpu_s(), time.process_time()
            asyncio.run(crowd.turns(tasks, seconds / _SLICES))
            while daemon.has_trash():  # else git would have it beside itself
                time.sleep(0.01)
            ours_s += time.perf_counter() - began
            spent[0] += daemon.cpu_s() - before[0]
            spent[1] += time.process_time() - before[1]
            memory = max(memory, daemon.memory()["rss_mib"])
            began = time.perf_counter()
            asked = git, commit, *work[0], seconds / _SLICES
            running = [pool.submit(git_turns, *asked) for _ in range(os.cpu_count() or 1)]
            theirs += sum(each.result() for each in running)
            theirs_s += time.perf_counter() - began
    turns = len(crowd.taken["turn"])
    name = f"{tasks} tasks of one client, {work[0][0].name}" + (", by finish" if by_finish else "")
    goal = "60" if created > _FEW else "120"
    rate, git_rate = turns / ours_s, theirs / theirs_s
    figures = [
        Figure(f"{name}: whole turns", rate, "a second", goal),
        Figure(
            "git worktree add, add, diff, worktree remove, on each processor", git_rate, "a second"
        ),
        Figure("turns, ours / theirs", rate / git_rate, "times", "20"),
        Figure("of them failed, or with another patch than git's", crowd.failed.total(), "", "0"),
        Figure(
            "processor time of the daemon and its workers", spent[0] / turns * 1000, "ms a turn"
        ),
        Figure("processor time of the client, with writing", spent[1] / turns * 1000, "ms a turn"),
        Figure("memory of the daemon and its workers", memory, "MiB resident"),
    ]
    if crowd.failed:
        print(f"  failed: {dict(crowd.failed)}", flush=True)
    return [Latency.of(f"{name}: {verb}", taken) for verb, taken in crowd.taken.items()], figures


def _expected(
    git: Git, clone: Path, changed: int, created: int, number: int
) -> tuple[Change, bytes]:
    git.reset_and_clean(clone)
    change = make_change(clone, changed, created, number)
    change.write(clone)
    return change, git.diff(clone)
