"""The pool against git: plain trees, as an ordinary user without mounts or root in a pod has them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from measured_daemon import MIRROR, Daemon
from results import Figure, Row
from rivals import Git, dirty, disk_bytes
from rollouts import Change, make_change

from mirrord import Checkout, Client
from mirrord.model import Backend

_SPARE_S = 20.0  # as long as a spare tree may take to be written


class PlainTrees:
    """Checkouts of the pool beside worktrees of the same commit, by turns."""

    def __init__(self, daemon: Daemon, git: Git, commit: str, compare: Callable[..., None]) -> None:
        self._daemon, self._git, self._commit, self._compare = daemon, git, commit, compare
        self.figures: list[Figure] = []

    def run(self) -> None:
        with self._daemon.client() as client, self._take(client) as held:
            self._checkouts(client)
            self._wait_for_spare()
            self._resets(held)
            self._diff(held)
            self._weigh(held)

    def _take(self, client: Client) -> Checkout:
        return client.checkout(mirror=MIRROR, commit=self._commit, backend=Backend.POOL)

    def _checkouts(self, client: Client) -> None:
        def cold() -> float:
            self._wait_for_spare()
            client.gc()  # drops the spare trees; the held checkout keeps the store
            self._wait_until(lambda: not self._daemon.has_trash())
            return timed_checkout()

        def warm() -> float:
            self._wait_for_spare()
            return timed_checkout()

        def timed_checkout() -> float:
            began = time.perf_counter()
            checkout = self._take(client)
            took = time.perf_counter() - began
            checkout.release()
            return took

        def theirs() -> float:
            path = self._git.fresh()
            self._wait_for_spare()
            began = time.perf_counter()
            self._git.worktree_add(path, self._commit)
            took = time.perf_counter() - began
            self._git.remove(path)
            return took

        add = "git worktree add --detach"
        timed_checkout()
        self._compare(Row("checkout of a prepared commit (pool, cold)", add, goal=1), cold, theirs)
        self._compare(Row("checkout of a prepared commit (pool, warm)", add, goal=3), warm, theirs)

    def _wait_for_spare(self) -> None:
        """Until trees that are written ahead are complete, with their manifests, and trash is gone."""

        def is_written() -> bool:
            spares = list((self._daemon.state / "leases").glob(".warm-*"))
            is_whole = all((spare / "manifest").exists() for spare in spares)
            return bool(spares) and is_whole and not self._daemon.has_trash()

        self._wait_until(is_written)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SPARE_S
        while not is_so() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)

    def _resets(self, checkout: Checkout) -> None:
        rival = self._git.fresh()
        self._git.worktree_add(rival, self._commit)
        few = make_change(checkout.path, 5, 0)
        changes: list[tuple[str, Callable[[Path], object]]] = [
            ("5 changed", few.write),
            ("20 changed and 100 created", dirty),
        ]
        for name, change in changes:

            def ours(change: Callable[[Path], object] = change) -> float:
                change(checkout.path)
                return _timed(checkout.reset)

            def theirs(change: Callable[[Path], object] = change) -> float:
                change(rival)
                return _timed(lambda: self._git.reset_and_clean(rival))

            work = f"reset, {name} (pool)"
            against = "git reset --hard, git clean -ffdx"
            self._compare(Row(work, against, goal=1 / 1.2), ours, theirs)

    def _diff(self, checkout: Checkout) -> None:
        rival = self._git.fresh()
        self._git.worktree_add(rival, self._commit)
        numbers = iter(range(10**6))

        texts = sorted(Path(checkout.path).rglob("*.py"))  # of others git prints the patch
        names = [str(each.relative_to(checkout.path)) for each in texts if each.stat().st_size]
        contents = {name: Path(checkout.path, name).read_bytes() for name in names}

        def change(tree: Path, number: int) -> None:
            chosen = names[number % 5 :: len(names) // 4][:3]
            lines = b"# changed by %d\n" % number
            Change("3 changed", {name: contents[name] + lines for name in chosen}).write(tree)

        def ours() -> float:
            change(checkout.path, next(numbers))
            return _timed(checkout.diff)

        def theirs() -> float:
            change(rival, next(numbers))
            return _timed(lambda: self._git.diff(rival))

        against = "git add --all, git diff --cached"
        self._compare(Row("diff of 3 changed Python files (pool)", against, goal=1), ours, theirs)
        checkout.reset()

    def _weigh(self, checkout: Checkout) -> None:
        private = self._daemon.state / "leases" / checkout.id
        whole = disk_bytes(Path(checkout.directory), private)
        copy = self._git.area / "files-alone"
        shutil.copytree(checkout.path, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        ratio = whole / disk_bytes(copy)
        name = f"disk of a checkout to its files (pool, uid {os.geteuid()})"
        self.figures.append(Figure(name, ratio, "", "1.1"))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
