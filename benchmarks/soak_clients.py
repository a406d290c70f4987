"""Well-behaved clients of the soak: members with uids of their own, an administrator who grades, and those who ask through restarts."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from measured_daemon import MEMBERS, MIRROR
from soak_tally import Tally

from mirrord import Checkout, Client, Sandbox
from mirrord.errors import MirrordError, NoDaemonError, StoppingError
from mirrord.model import Backend

MEMBER_UIDS = (61001, 61002, 61003)
REQUESTS = 1_050
_THREADS = 3
_PATIENCE = timedelta(seconds=60)
_LEASE = "3m"
_GRADER = 61010
_WRITTEN = "soak.txt"


@dataclass(frozen=True)
class Plan:
    """What one process of clients does for some seconds, with a turn of a thread every `pause_s`."""

    socket: str
    uid: int
    warm: list[str]
    cold: list[str]
    instance: str
    mirrors: list[str]
    seconds: float
    pause_s: float
    scratch: str


def be_clients(plan: Plan) -> Tally:
    """Runs in a process of its own, as the user of the plan."""
    os.environ["TMPDIR"] = plan.scratch
    if plan.uid in MEMBER_UIDS:
        become(plan.uid)
    elif plan.uid:
        os.setresuid(plan.uid, plan.uid, plan.uid)
    tally, began = Tally(), time.monotonic()
    with Client(plan.socket, patience=_PATIENCE) as client:
        workers = [_Worker(plan, client, tally, number) for number in range(_THREADS)]
        threads = [threading.Thread(target=each.work) for each in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    tally.elapsed_s = time.monotonic() - began
    return tally


def become(uid: int) -> None:
    """Go on as a member of the group that may use checkouts."""
    os.setgroups([])
    os.setresgid(MEMBERS, MEMBERS, MEMBERS)
    os.setresuid(uid, uid, uid)


class _Worker:
    def __init__(self, plan: Plan, client: Client, tally: Tally, number: int) -> None:
        self._plan, self._client, self._tally = plan, client, tally
        self._ends = time.monotonic() + plan.seconds
        self._chance = random.Random(f"{plan.uid} {number}")
        self._name = f"s{plan.uid}-{number}"
        self._count = 0
        self._steps: list[Callable[[Checkout, str], None]] = [
            *(self._reset, self._snapshot, self._fork, self._save, self._apply, self._run),
            *(self._look, self._renew),
        ]
        if plan.uid not in MEMBER_UIDS:
            self._steps.append(self._grade)

    def work(self) -> None:
        while (left := self._ends - time.monotonic()) > 0:
            began = time.monotonic()
            try:
                self._turn()
            except MirrordError:  # counted where it was asked
                pass
            except OSError as error:
                self._tally.broken.append(f"a client of uid {self._plan.uid}: {error!r}")
            rest = self._plan.pause_s * self._chance.uniform(0.5, 1.5)
            time.sleep(max(0.0, min(left, rest - (time.monotonic() - began))))

    def _turn(self) -> None:
        backend = self._chance.choices((Backend.OVERLAY, Backend.POOL), (3, 1))[0]
        with self._checked_out(backend) as checkout:
            _edit(checkout.path, self._chance)
            patch = self._tally.ask("diff", checkout.diff)
            if b"soak" not in patch:
                self._tally.broken.append(f"diff: {patch[:80]!r} lacks what was written")
            for step in self._chance.sample(self._steps, 2):
                (checkout.path / _WRITTEN).write_text("soak\n" * self._chance.randint(1, 400))
                step(checkout, f"{backend}")

    @contextmanager
    def _checked_out(self, backend: Backend) -> Iterator[Checkout]:
        """A warm one in most turns; else of any commit, the tip of a mirror, or the instance."""
        self._count += 1
        kind = self._chance.choices(("warm", "first", "tip", "instance"), (16, 2, 1, 2))[0]
        if kind == "tip":
            where = f"{self._chance.choice(self._plan.mirrors)}@main"
        elif kind == "instance":
            where = self._plan.instance
        else:
            commits = self._plan.warm if kind == "warm" else self._plan.cold
            where = f"{MIRROR}@{self._chance.choice(commits)}"
        checkout = self._tally.ask(
            f"checkout, {kind} ({backend})",
            lambda: self._client.checkout(where, backend=backend, ttl=_LEASE),
        )
        try:
            yield checkout
        finally:
            self._tally.ask("release", checkout.release)

    # -- what may be done with one -----------------------------------------------------------------

    def _reset(self, checkout: Checkout, backend: str) -> None:
        self._tally.ask(f"reset ({backend})", checkout.reset)
        if (checkout.path / _WRITTEN).exists():
            self._tally.broken.append("reset: a file that was written is still there")

    def _snapshot(self, checkout: Checkout, backend: str) -> None:
        self._tally.ask("snapshot create", lambda: checkout.snapshot("kept"))
        self._tally.ask(f"reset to a snapshot ({backend})", lambda: checkout.reset(to="kept"))
        if not (checkout.path / _WRITTEN).exists():
            self._tally.broken.append("reset to a snapshot: a file that it has is missing")
        self._tally.ask("snapshot remove", lambda: checkout.remove_snapshot("kept"))

    def _fork(self, checkout: Checkout, _: str) -> None:
        fork = self._tally.ask("fork", lambda: checkout.fork(ttl=_LEASE))
        self._tally.ask("release", fork.release)

    def _save(self, checkout: Checkout, _: str) -> None:
        name = f"{self._name}-{self._count}"
        layer = self._tally.ask("layer save", lambda: checkout.save(name))
        self._tally.ask("reset", checkout.reset)
        self._tally.ask("layer remove", lambda: self._client.remove_layer(layer.id))

    def _apply(self, checkout: Checkout, _: str) -> None:
        patch = self._tally.ask("diff", checkout.diff)
        self._tally.ask("reset", checkout.reset)
        self._tally.ask("apply", lambda: checkout.apply(patch))

    def _run(self, checkout: Checkout, _: str) -> None:
        """A sandbox, which is the client's own work."""
        with Sandbox(checkout) as sandbox:
            done = sandbox.exec(["cat", _WRITTEN], timeout=60)
        if done.exit_code:
            self._tally.broken.append(f"exec: {done.exit_code} {done.stderr[:200]!r}")

    def _look(self, checkout: Checkout, _: str) -> None:
        self._tally.ask("status", self._client.status)
        self._tally.ask("activity", self._client.activity)
        self._tally.ask("metrics", self._client.metrics)
        self._tally.ask("checkouts", self._client.list_checkouts)
        self._tally.ask("receipt", checkout.receipt)

    def _renew(self, checkout: Checkout, _: str) -> None:
        self._tally.ask("renew", checkout.renew)
        self._tally.ask("health", self._client.health)

    def _grade(self, checkout: Checkout, _: str) -> None:
        patch = self._tally.ask("diff", checkout.diff)
        for what, work in (
            ("grade", lambda: checkout.grade(ttl=_LEASE, owner=_GRADER)),
            ("grade of a patch", self._graded(patch)),
        ):
            with suppress(MirrordError):  # the patch may be of another commit than the instance
                grade = self._tally.ask(what, work)
                self._tally.ask("release", grade.release)

    def _graded(self, patch: bytes) -> Callable[[], Checkout]:
        return lambda: self._client.grade(self._plan.instance, patch, ttl=_LEASE)


def _edit(tree: Path, chance: random.Random) -> None:
    """New files, one changed, and now and then a link."""
    (tree / _WRITTEN).write_text("soak\n")
    first = next(each for each in sorted(tree.iterdir()) if each.name != ".git")
    if first.is_file() and not first.is_symlink():
        with first.open("a") as file:
            file.write("# soak\n")
    deep = tree / "soak/a/b/c"
    deep.mkdir(parents=True)
    for number in range(chance.randint(1, 30)):
        (deep / f"{number}.txt").write_text("soak\n")
    if chance.random() < 0.1:
        (tree / "soak/link").symlink_to("a/b")


# -- through restarts ------------------------------------------------------------------------------


@dataclass
class Asked:
    """Requests of those who ask through restarts; `repeated` are writes that a kill cut off."""

    asked: int = 0
    answered: int = 0
    repeated: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)


def started_file(socket: str) -> Path:
    """Is there once they ask."""
    return Path(socket).with_name("asking")


def be_askers(plan: Plan, count: int) -> Asked:
    """`count` requests, spread evenly over the plan's time, by a few threads of one client.

    The client waits for the daemon and sends a GET again. A write whose answer a kill cut off may have
    happened, so the caller decides: these callers send it again, and leave the lease to its end.
    """
    started_file(plan.socket).touch()
    become(plan.uid)
    threads_count = 6
    asked = [Asked() for _ in range(threads_count)]
    with Client(plan.socket, patience=_PATIENCE) as client:
        client.health()
        each = [count // threads_count + (n < count % threads_count) for n in range(threads_count)]
        threads = [
            threading.Thread(target=_ask, args=(plan, client, own, number))
            for own, number in zip(asked, each, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return Asked(
        sum(one.asked for one in asked),
        sum(one.answered for one in asked),
        sum((one.repeated for one in asked), Counter()),
        [fact for one in asked for fact in one.failed],
    )


def _ask(plan: Plan, client: Client, tally: Asked, count: int) -> None:
    held: list[Checkout] = []

    def check_out() -> None:
        where = f"{MIRROR}@{plan.warm[0]}"
        held.append(client.checkout(where, ttl=30, auto_renew=False))

    def diff() -> None:
        held[-1].diff()

    def release() -> None:
        held[-1].release()
        held.pop()

    cycle: list[tuple[str, Callable[[], object]]] = [
        ("checkout", check_out),
        ("diff", diff),
        ("status", client.status),
        ("release", release),
        ("checkouts", client.list_checkouts),
        ("metrics", client.metrics),
    ]
    began = time.monotonic()
    for number in range(count):
        due = began + plan.seconds * number / count
        time.sleep(max(0.0, due - time.monotonic()))
        what, work = cycle[number % len(cycle)]
        tally.asked += 1
        for _ in range(4):
            try:
                work()
            except (NoDaemonError, StoppingError) as error:
                tally.repeated[f"{what}: {error.code}"] += 1
                time.sleep(0.2)
            except MirrordError as error:
                tally.failed.append(f"{what}: {error.code}: {error.message}")
                break
            else:
                tally.answered += 1
                break
    for each in held:
        each.release()
