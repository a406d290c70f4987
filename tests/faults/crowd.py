"""Everything at once on one mirror: syncs, maintenance, audits, heals, imports, pins, checkouts of two users; we know the truth.

What may be answered besides success is listed here: conflicts that the documents tell of.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import anyone
from gitrepos import git

from .client import must_be
from .judge import judge
from .lab import NAME, Lab, Refused, laboratory
from .plan import Plan
from .report import Row

DOCUMENTED = frozenset({"checkout-busy", "too-many-checkouts"})
_CLIENTS, _USERS = 6, 2
STRANGER = 65534


class Crowd:
    """Threads that work until told to stop, and what went wrong."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab = lab
        self._seed = seed
        self._stop = threading.Event()
        self.done: Counter[str] = Counter()
        self.conflicts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._trees = {
            commit: git(lab.upstream.path, "rev-parse", f"{commit}^{{tree}}")
            for commit in lab.commits
        }

    def run(self, duration_s: float) -> None:
        work: list[tuple[str, Callable[[random.Random], None]]] = [
            ("syncs", self._sync), ("maintenances", self._maintain), ("audits", self._audit), ("heals", self._heal),
            ("imports", self._import), ("pins", self._pin),
            *[("checkouts", self._checkout)] * _CLIENTS,
        ]  # fmt: skip
        users = [self._start_user(n, duration_s) for n in range(_USERS)]
        threads = [
            threading.Thread(target=self._loop, args=(name, each, n))
            for n, (name, each) in enumerate(work)
        ]
        for thread in threads:
            thread.start()
        time.sleep(duration_s)
        self._stop.set()
        for thread in threads:
            thread.join(90)
            assert not thread.is_alive(), "a request does not end"
        for user in users:
            self._hear(user)

    def _start_user(self, number: int, duration_s: float) -> subprocess.Popen[str]:
        """A client of another user, who is nobody but a member of the group."""
        user = subprocess.Popen(
            [*anyone.python(), "-m", "faults.client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, user=STRANGER, group=STRANGER, extra_groups=[], cwd="/",
        )  # fmt: skip
        socket, seed = str(self._lab.daemon.socket), self._seed * 1000 + 500 + number
        orders = {"socket": socket, "seed": seed, "duration_s": duration_s, "trees": self._trees}
        assert user.stdin is not None
        user.stdin.write(json.dumps(orders))
        user.stdin.close()
        user.stdin = None
        return user

    def _hear(self, user: subprocess.Popen[str]) -> None:
        said, complaint = user.communicate(timeout=90)
        assert said, f"a user died: {complaint[-300:]}"
        answer = json.loads(said)
        self.done["checkouts of another user"] += answer["done"]
        self.wrong += [f"another user: {answer['wrong']}"] if answer["wrong"] else []

    def _loop(self, name: str, work: Callable[[random.Random], None], number: int) -> None:
        choices = random.Random(self._seed * 1000 + number)
        while not self._stop.is_set() and not self.wrong:
            try:
                work(choices)
                self.done[name] += 1
            except Refused as refused:
                if refused.code in DOCUMENTED:
                    self.conflicts[refused.code] += 1
                else:
                    self.wrong.append(f"{name}: {refused}")
            except (AssertionError, OSError, KeyError) as error:
                self.wrong.append(f"{name}: {error!r}")

    def _sync(self, choices: random.Random) -> None:
        number = self._lab.number()
        self._lab.upstream.git("branch", "--force", "moved", choices.choice(self._lab.commits))
        self._lab.upstream.commit({"crowd": str(number)})
        self._lab.sync()

    def _maintain(self, _: random.Random) -> None:
        self._lab.maintain()
        self._stop.wait(1)

    def _audit(self, choices: random.Random) -> None:
        level = choices.choice(("quick", "closure", "content"))
        audit = self._lab.finish(self._lab.call("POST", "audits", {"level": level, "heal": False}))
        assert not audit["findings"], f"{level} audit: {audit['findings'][:2]}"

    def _heal(self, _: random.Random) -> None:
        self._lab.finish(self._lab.call("POST", "heals", {"mirrors": [NAME]}))
        self._stop.wait(1)

    def _import(self, choices: random.Random) -> None:
        self._lab.import_rows("crowd", choices.sample(self._lab.commits, 5))

    def _pin(self, choices: random.Random) -> None:
        commit = choices.choice(self._lab.commits[8:])
        self._lab.call("POST", "pins", {"mirror": NAME, "commit": commit, "reason": "crowd"})
        pins = {
            pin["commit"]
            for pin in self._lab.call("GET", f"pins?mirror={NAME}")
            if pin["owner"] == "person/0"
        }
        assert commit in pins, "a pin that was answered is not there"
        self._lab.call("DELETE", f"pins/{NAME}/{commit}")

    def _checkout(self, choices: random.Random) -> None:
        commit, backend = choices.choice(self._lab.commits), choices.choice(("overlay", "pool"))
        body = {"mirror": NAME, "commit": commit, "backend": backend}
        made = self._lab.call("POST", "checkouts", body)
        try:
            tree = Path(made["path"])
            must_be(tree, commit, self._trees)
            (tree / "README").write_text("dirty\n")
            onwards = choices.choice(self._lab.commits)
            self._lab.call("POST", f"checkouts/{made['id']}/reset", {"commit": onwards})
            must_be(tree, onwards, self._trees)
        finally:
            self._lab.call("DELETE", f"checkouts/{made['id']}")


def rows(plan: Plan) -> Iterator[Row]:
    """One row of everything at once."""
    with laboratory() as lab:
        yield everything_at_once(lab, plan.seed, plan.crowd_s)


def everything_at_once(lab: Lab, seed: int, duration_s: float) -> Row:
    """Raises AssertionError with what went wrong first."""
    crowd = Crowd(lab, seed)
    crowd.run(duration_s)
    assert not crowd.wrong, [*crowd.wrong[:3], *lab.bugs()]
    with suppress(Refused):
        lab.finish(lab.call("POST", f"mirrors/{NAME}/sync"))
    judge(lab, level="content")
    did = ", ".join(f"{count} {name}" for name, count in sorted(crowd.done.items()))
    return Row("everything at once", "all of them", f"one mirror, {duration_s:.0f} s", did)
