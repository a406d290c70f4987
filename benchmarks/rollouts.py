"""Rollouts against git: what is asked for between a checkout and its release, alone and as a whole turn.

A change is written anew before each round, on both sides, so that nothing an earlier round left in a cache
helps. Every patch is compared with git's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from measured_daemon import Daemon
from results import Row
from rivals import Git, git

from mirrord import Checkout

_PAUSE_S = 1.0
_TURNS = 5  # rounds of what takes git seconds


@dataclass(frozen=True, slots=True)
class Change:
    """What an agent writes: whole files, by their paths in the tree."""

    name: str
    files: dict[str, bytes]

    def write(self, tree: Path) -> None:
        for parent in {name.rpartition("/")[0] for name in self.files}:
            os.makedirs(tree / parent, exist_ok=True)
        for name, data in self.files.items():
            fd = os.open(f"{tree}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(fd, data)
            os.close(fd)


NOTHING = Change("nothing changed", {})


def make_change(tree: Path, changed: int, created: int, number: int = 0) -> Change:
    """A line more in some files of a clean tree, and new ones of 20 lines; another for each `number`."""
    names = [name for name in git("ls-files", "-z", cwd=tree).split("\0") if name]
    plain = [name for name in names if (tree / name).is_file() and not (tree / name).is_symlink()]
    spread = plain[number :: len(plain) // (changed + 1)][:changed]
    line = b"# changed by %d\n" % number
    files = {name: (tree / name).read_bytes() + line for name in spread}
    for file in range(created):
        files[f"created-{file % 10}/file{number}-{file}.txt"] = b"created by %d\n" % number * 20
    name = f"{changed} changed" + (f" and {created} new" if created else "")
    return Change(name, files)


class Rollouts:
    """A plain clone beside checkouts of an instance at `commit`, whose test patch changes one file."""

    def __init__(self, daemon: Daemon, git: Git, commit: str, compare: Callable[..., None]) -> None:
        self._daemon, self._git, self._commit, self._compare = daemon, git, commit, compare
        self._clone = git.fresh()
        git.clone_isolated(self._clone, commit)
        self._usual = make_change(self._clone, 20, 100)
        self._tests = self._expect(make_change(self._clone, 1, 0, 7))
        self._patch = self._expect(self._usual)
        self.instance = daemon.record(commit, self._tests)

    def diff(self) -> None:
        self._diff(self._usual, 6.0)
        self._diff(make_change(self._clone, 1, 0), 2.5)
        self._diff(NOTHING, None)

    def _diff(self, change: Change, most_ms: float | None) -> None:
        expected = self._expect(change)
        with self._daemon.client() as client, client.checkout(self.instance) as checkout:
            self._compare(
                Row(f"diff, {change.name}", "git add --all, git diff", 10, most_ms),
                self._timed(lambda: rewrite(checkout, change), checkout.diff, expected),
                self._timed(
                    lambda: self._dirty(change), lambda: self._git.diff(self._clone), expected
                ),
            )

    def apply(self) -> None:
        with self._daemon.client() as client, client.checkout(self.instance) as checkout:
            self._compare(
                Row(f"apply, {self._usual.name}", "git apply"),
                self._timed(checkout.reset, lambda: checkout.apply(self._patch)),
                self._timed(
                    lambda: self._dirty(NOTHING),
                    lambda: self._git.apply(self._clone, self._patch),
                ),
            )
            assert checkout.diff() == self._patch

    def branch(self) -> None:
        """Forks, snapshots and roll-backs, beside what a user of git alone does."""
        change, more = self._usual.name, make_change(self._clone, 5, 5, 3)
        forks: list[Checkout] = []

        def release() -> None:
            while forks:
                forks.pop().release()

        def changed_anew() -> None:  # a copy of what did not change since the last one is shared
            release()
            for again in [each for each in checkout.snapshots() if each.name != "kept"]:
                checkout.remove_snapshot(again.name)
            rewrite(checkout, self._usual)

        def fork_eight() -> None:
            forks.extend(checkout.fork(snapshot="kept") for _ in range(8))

        with self._daemon.client() as client, client.checkout(self.instance) as checkout:
            rewrite(checkout, self._usual)
            checkout.snapshot("kept")
            self._dirty(self._usual)
            stash = self._git.stash(self._clone)
            self._compare(
                Row(f"fork, {change}", "git worktree add, git apply", most_ms=6),
                self._timed(changed_anew, lambda: forks.append(checkout.fork())),
                self._worktree(self._patch),
                _TURNS,
            )
            self._compare(
                Row(f"snapshot, {change}", "git add --all, git stash create", most_ms=6),
                self._timed(changed_anew, lambda: checkout.snapshot("again")),
                self._timed(lambda: self._dirty(self._usual), lambda: self._git.stash(self._clone)),
            )
            self._compare(
                Row(f"roll-back, {change}", "git reset --hard, clean, stash apply", most_ms=6),
                self._timed(lambda: more.write(checkout.path), lambda: checkout.reset(to="kept")),
                self._timed(
                    lambda: more.write(self._clone),
                    lambda: self._git.roll_back(self._clone, stash),
                ),
            )
            self._compare(
                Row(f"8 forks of a snapshot, {change}", "git worktree add, git apply, 8 times"),
                self._timed(release, fork_eight),
                lambda: sum(self._worktree(self._patch)() for _ in range(8)),
                _TURNS,
            )
            for each in (checkout, *forks):
                assert each.diff() == self._patch
            release()

    def grade(self) -> None:
        self._dirty(self._usual)
        self._git.apply(self._clone, self._tests)
        expected = self._git.diff(self._clone)
        with self._daemon.client() as client, client.checkout(self.instance) as checkout:
            rewrite(checkout, self._usual)
            with checkout.grade() as grade:
                assert grade.diff() == expected
            grades: list[Checkout] = []

            def release() -> None:
                while grades:
                    grades.pop().release()

            self._compare(
                Row(f"grade, {self._usual.name}", "git worktree add, git apply twice", most_ms=15),
                self._timed(release, lambda: grades.append(checkout.grade())),
                self._worktree(self._patch, self._tests),
                _TURNS,
            )
            release()

    def cold(self) -> None:
        """Each verb after a second in which nobody asks for anything, as an agent thinks, and git's after the same."""
        change = make_change(self._clone, 3, 1)
        expected, clone, git_ = self._expect(change), self._clone, self._git
        leases: list[Checkout] = []
        trees: list[Path] = []

        def add(*patches: bytes) -> None:
            trees.append(git_.fresh())
            git_.worktree_add(trees[-1], self._commit)
            git_.apply(trees[-1], *patches)

        def remove() -> None:
            while trees:
                git_.worktree_remove(trees.pop())

        def release() -> None:
            while leases:
                leases.pop().release()

        with self._daemon.client() as client, client.checkout(self.instance) as checkout:

            def check_out() -> None:
                leases.append(client.checkout(self.instance))

            def compare(
                verb: str,
                against: str,
                ours: tuple[Callable[[], object], Callable[[], object]],
                theirs: tuple[Callable[[], object], Callable[[], object]],
                goal: float | None = None,
                expected: bytes | None = None,
            ) -> None:
                sides = [self._timed(*side, expected, _PAUSE_S) for side in (ours, theirs)]
                self._compare(Row(f"{verb}, after a pause of 1 s", against, goal), *sides)

            def write() -> None:
                rewrite(checkout, change)

            def dirty() -> None:
                self._dirty(change)

            compare("checkout", "git worktree add", (release, check_out), (remove, add), 10)
            compare(
                "diff",
                "git add --all, git diff",
                (write, checkout.diff),
                (dirty, lambda: git_.diff(clone)),
                3,
                expected,
            )
            compare(
                "snapshot",
                "git add --all, git stash create",
                (write, checkout.snapshot),
                (dirty, lambda: git_.stash(clone)),
            )
            compare(
                "grade",
                "git worktree add, git apply twice",
                (release, lambda: leases.append(checkout.grade())),
                (remove, lambda: add(expected, self._tests)),
            )
            compare(
                "reset",
                "git reset --hard, git clean -ffdx",
                (write, checkout.reset),
                (dirty, lambda: git_.reset_and_clean(clone)),
                3,
            )
            compare("release", "git worktree remove", (check_out, release), (add, remove))
            release()
            remove()

    def turn(self) -> None:
        """The checkout's files are written inside the time of both, as an agent would."""
        with self._daemon.client() as client:

            def ours() -> None:
                with client.checkout(self.instance) as checkout:
                    self._usual.write(checkout.path)
                    assert checkout.diff() == self._patch
                    checkout.grade().release()
                    checkout.reset()

            self._compare(
                Row(
                    "a turn: checkout, write, diff, grade, reset, release",
                    "git worktree add twice, add, diff, apply twice, reset, clean, worktree remove",
                    goal=15,
                ),
                self._timed(lambda: None, ours),
                self._timed(lambda: None, self._git_turn),
                _TURNS,
            )

    def _git_turn(self) -> None:
        agent, grader = self._git.fresh(), self._git.fresh()
        self._git.worktree_add(agent, self._commit)
        self._usual.write(agent)
        assert self._git.diff(agent) == self._patch
        self._git.worktree_add(grader, self._commit)
        self._git.apply(grader, self._patch, self._tests)
        self._git.reset_and_clean(agent)
        self._git.worktree_remove(grader)
        self._git.worktree_remove(agent)

    def _worktree(self, *patches: bytes) -> Callable[[], float]:
        """A second tree with patches applied."""

        def theirs() -> float:
            tree = self._git.fresh()
            began = time.perf_counter()
            self._git.worktree_add(tree, self._commit)
            self._git.apply(tree, *patches)
            took = time.perf_counter() - began
            self._git.worktree_remove(tree)
            return took

        return theirs

    def _timed(
        self,
        prepare: Callable[[], object],
        work: Callable[[], object],
        expected: bytes | None = None,
        pause_s: float = 0.0,
    ) -> Callable[[], float]:
        """A round: its seconds without the preparation, what that leaves the daemon to remove, and a pause.

        A patch must be the expected one.
        """

        def once() -> float:
            prepare()
            while self._daemon.has_trash():
                time.sleep(0.005)
            time.sleep(pause_s)
            began = time.perf_counter()
            answer = work()
            took = time.perf_counter() - began
            assert expected is None or answer == expected
            return took

        return once

    def _dirty(self, change: Change) -> None:
        self._git.reset_and_clean(self._clone)
        change.write(self._clone)

    def _expect(self, change: Change) -> bytes:
        self._dirty(change)
        return self._git.diff(self._clone)


def rewrite(checkout: Checkout, change: Change) -> None:
    checkout.reset()
    change.write(checkout.path)
