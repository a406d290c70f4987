"""Soak: mixed verbs of several users and bad clients for a while, with syncs, imports, audits and gc below them.

`bench.py --ext4 --cases soak --seconds 600` warms up for a fifth of that (two minutes at most), lets the daemon come to rest, soaks it, lets it
come to rest again, and compares what it holds. `--restart` also stops and kills the daemon in the middle, beside clients who
count their answers. The load is paced (`--rate`), so latencies are those of a busy day, not of a queue. A leak, an answer
that docs/errors.md does not have, or a lost request ends it with status 1; all else is a figure.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from measured_daemon import MIRROR, NOBODY, REPO, Daemon, instance_row
from results import Figure, Latency
from rivals import Git, git
from scale import Upstreams
from soak_abuse import MEMBER, STRANGER, Abuse, be_bad
from soak_clients import MEMBER_UIDS, REQUESTS, Asked, Plan, be_askers, be_clients, started_file
from soak_tally import Tally
from soak_watch import Sample, Watch, settled

from mirrord import Client
from mirrord.errors import MirrordError
from mirrord.model import AuditLevel, Backend
from mirrord.protocol import Operation

_MIRRORS = 4
_ASKER = 61007
_TURN_CLIENTS = (*MEMBER_UIDS, NOBODY)
_THREADS = 3  # of each of them
_LONGEST = timedelta(minutes=5)
_BUILDS = ("checkout, first", "checkout, tip", "checkout, instance", "sync", "import", "audit")
_OPERATIONS = ("gc", *_BUILDS)


@dataclass(frozen=True)
class Options:
    seconds: float
    rate: float
    connections: int
    restart: bool


@dataclass
class Results:
    """What a run came to; `broken` are promises that it broke."""

    latencies: list[Latency] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


class Soak:
    """One daemon with a mirror of `source`, and mirrors of generated upstreams that change."""

    def __init__(self, area: Path, source: Path, options: Options) -> None:
        self.options = options
        self.area = area
        area.mkdir(parents=True)
        area.chmod(0o755)
        self.scratch = area / "scratch"
        self.scratch.mkdir()
        self.scratch.chmod(0o1777)
        self.line = Git(source, area).line(60)
        self.upstreams = Upstreams(area / "upstreams", _MIRRORS)
        url = f"[upstream]\nurl = {json.dumps(f'file://{area}/upstreams/{{owner}}/{{name}}.git')}\n"
        self.daemon = Daemon(
            area / "daemon", source, url, "45s", 'prewarm = true\ntemplate_bytes = "300MiB"'
        )
        self.tally = Tally()
        self.asked: Asked | None = None
        rows = [instance_row(repo, one) for repo, c in self.upstreams.commits.items() for one in c]
        self.rows = [instance_row(REPO, commit) for commit in self.line[:20]] + rows
        self.warm, self.cold = self.line[:3], self.line[20:]

    def run(self) -> Results:
        with self.daemon.client() as client, self._held(client):
            self._import(client, Tally(), len(self.rows))
            self._load(
                min(max(self.options.seconds / 5, 20.0), 120.0), Watch(self._sample), restart=False
            )
            self._rest(client)
            before = settled(self.daemon)
            self.tally = Tally()
            watch = Watch(self._sample)
            self._load(self.options.seconds, watch, restart=self.options.restart)
            self._rest(client)
            after = settled(self.daemon, before)
        return self._results(before, after, watch)

    def _sample(self) -> Sample:
        return Sample.of(self.daemon)

    @contextmanager
    def _held(self, client: Client) -> Iterator[None]:
        """Leases of both backends on the warm commits, so that no gc takes their templates."""
        backends = (Backend.OVERLAY, Backend.POOL)
        held = [
            client.checkout(mirror=MIRROR, commit=commit, backend=backend)
            for commit in self.warm
            for backend in backends
        ]
        yield
        for each in held:
            each.release()

    def _rest(self, client: Client) -> None:
        """What clients that went left behind ends by itself; templates are a cache."""
        client.wait(client.start_audit(level=AuditLevel.CLOSURE, heal=False), timeout=_LONGEST)
        with suppress(MirrordError):
            self.tally.ask("gc", client.gc)

    # -- the load --------------------------------------------------------------------------------------------------------

    def _load(self, seconds: float, watch: Watch, *, restart: bool) -> None:
        ended = threading.Event()
        work = [self._operate, self._upstream_moves, self._collect]
        operators = [threading.Thread(target=each, args=(ended,)) for each in work]
        for thread in operators:
            thread.start()
        pool = ProcessPoolExecutor(8, get_context("spawn"), max_tasks_per_child=1)
        try:
            with pool, watch.watching():
                good = [pool.submit(be_clients, self._plan(uid, seconds)) for uid in _TURN_CLIENTS]
                bad = [pool.submit(be_bad, self._abuse(uid, seconds)) for uid in (MEMBER, STRANGER)]
                asking = None
                if restart:
                    asking = pool.submit(be_askers, self._plan(_ASKER, seconds), REQUESTS)
                    self._restart(seconds)
                for each in [*good, *bad]:
                    self.tally.add(each.result())
                self.asked = asking.result() if asking else None
        finally:
            ended.set()
            for thread in operators:
                thread.join()

    def _plan(self, uid: int, seconds: float) -> Plan:
        pause_s = len(_TURN_CLIENTS) * _THREADS / self.options.rate
        instance = self.rows[0]["instance_id"]
        names = [repo.replace("/", "__") for repo in self.upstreams.commits]
        place = f"{self.daemon.socket}", uid, self.warm, self.cold, instance, names, seconds
        return Plan(*place, pause_s, f"{self.scratch}")

    def _abuse(self, uid: int, seconds: float) -> Abuse:
        count = self.options.connections if uid == MEMBER else 100
        return Abuse(f"{self.daemon.socket}", uid, self.warm[0], seconds, count)

    def _restart(self, seconds: float) -> None:
        """An orderly restart after a third of the time, a kill after two."""
        while not started_file(f"{self.daemon.socket}").exists():
            time.sleep(0.1)
        time.sleep(seconds / 3)
        self.daemon.stop()
        self.daemon.start()
        time.sleep(seconds / 3)
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.daemon.start()

    def _collect(self, ended: threading.Event) -> None:
        """What an operator looks at, and a gc, which evicts every template that nobody holds."""
        with self.daemon.client() as client:
            while not ended.wait(15):
                for what, work in (("usage", client.usage), ("gc", client.gc)):
                    with suppress(MirrordError):
                        self.tally.ask(what, work)

    def _operate(self, ended: threading.Event) -> None:
        """Syncs, imports of ever other rows, removals, and audits, one after the other."""
        chance = random.Random(7)
        names = [MIRROR, *(repo.replace("/", "__") for repo in self.upstreams.commits)]
        levels = (AuditLevel.QUICK, AuditLevel.CLOSURE, AuditLevel.CONTENT)
        with self.daemon.client() as client:
            while not ended.wait(1.5):
                with suppress(MirrordError):
                    sync = partial(client.sync_mirror, chance.choice(names))
                    self.tally.ask("sync", partial(_wait, client, sync))
                    self._import(client, self.tally, chance.randint(20, len(self.rows)))
                    audit = partial(client.start_audit, level=chance.choice(levels), heal=True)
                    self.tally.ask("audit", partial(_wait, client, audit))
                    if chance.random() < 0.3:
                        self.tally.ask("dataset remove", lambda: client.remove_dataset("more"))

    def _import(self, client: Client, tally: Tally, count: int) -> None:
        """The dataset of the clients stays as it is; another one has `count` rows."""
        for name, rows in (("soak", self.rows[:20]), ("more", self.rows[20:count])):
            if not rows:
                continue
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
            start = partial(client.import_dataset, [content], source=f"{name}.jsonl", name=name)
            tally.ask("import", partial(_wait, client, start))

    def _upstream_moves(self, ended: threading.Event) -> None:
        """A new commit every few seconds, now and then by force, and a branch that comes and goes."""
        chance, count = random.Random(8), 0
        while not ended.wait(2):
            count += 1
            repo = chance.choice([*self.upstreams.commits])
            path = self.area / "upstreams" / f"{repo}.git"
            parent = "refs/heads/main~2" if count % 5 == 0 else "refs/heads/main"
            tree = f"{parent}^{{tree}}"
            made = git("commit-tree", tree, "-p", parent, "-m", f"{count}", cwd=path)
            git("update-ref", "refs/heads/main", made, cwd=path)
            if count % 3 == 0:
                git("update-ref", "refs/heads/side", made, cwd=path)
            elif count % 3 == 1:
                git("update-ref", "-d", "refs/heads/side", cwd=path)

    # -- what came of it -------------------------------------------------------------------------------------------------

    def _results(self, before: Sample, after: Sample, watch: Watch) -> Results:
        results, taken = Results(), self.tally.taken
        rate_h = 3600 / self.tally.elapsed_s
        results.latencies = [Latency.of(f"soak: {what}", taken[what]) for what in sorted(taken)]
        results.broken = [*self.tally.broken, *self._leaks(before, after, watch)]
        if self.asked and (self.asked.failed or self.asked.answered != self.asked.asked):
            results.broken += self.asked.failed or ["requests were lost through restarts"]
        checkouts = sum(
            len(seconds)
            for what, seconds in taken.items()
            if what.startswith(("checkout,", "fork", "grade"))
        )
        warm = Latency.of("warm", taken["checkout, warm (overlay)"])
        answers = {w: max(s) for w, s in taken.items() if not w.startswith(_OPERATIONS)}
        longest = max(answers, key=lambda what: answers[what])
        most = watch.most()
        results.figures = [
            Figure("checkouts, with forks and grades", checkouts * rate_h, "an hour", "10,000"),
            Figure("warm checkout, p99 / p50", warm.p99_ms / warm.p50_ms, "times", "under 10"),
            Figure(f"longest answer but builds and syncs ({longest})", answers[longest], "s", "5"),
            Figure("answers to good clients", sum(map(len, taken.values())), ""),
            Figure("memory of the daemon, slope of the second half", watch.slope_mib_h(), "MiB/h"),
            Figure("memory of the daemon at rest, before", before.private_mib, "MiB private"),
            Figure("memory of the daemon at rest, after", after.private_mib, "MiB private"),
            *(Figure(f"at most: {name}", most[name], "") for name in most if name != "at"),
            Figure("promises broken", len(results.broken), "", "0"),
        ]
        if self.asked:
            results.figures += [
                Figure("requests through a restart and a kill", self.asked.asked, "", "1,050"),
                Figure("of them answered", self.asked.answered, "", "1,050"),
                Figure("writes sent again by the caller", self.asked.repeated.total(), ""),
            ]
        self._print(results, before, after)
        return results

    def _leaks(self, before: Sample, after: Sample, watch: Watch) -> list[str]:
        found = watch.leaks(before, after, is_same=not self.options.restart)
        if left := sorted(os.listdir(self.scratch)):
            found.append(f"sandboxes left {len(left)} directories, such as {left[0]}")
        return found

    def _print(self, results: Results, before: Sample, after: Sample) -> None:
        print(f"  at rest before {before}\n  at rest after  {after}")
        for (what, code), count in sorted(self.tally.refused.items()):
            print(f"  {what}: {code}: {count}")
        for code, example in sorted(self.tally.examples.items()):
            print(f"  such as {code}: {example[:200]}")
        if self.asked:
            print(f"  sent again by the caller: {dict(self.asked.repeated)}")
        for fact, count in Counter(results.broken).most_common(40):
            print(f"BROKEN {count}x {fact[:400]}", file=sys.stderr, flush=True)


def _wait(client: Client, start: Callable[[], Operation]) -> Operation:
    return client.wait(start(), timeout=_LONGEST)


def soak(area: Path, source: Path, options: Options) -> Results:
    soaked = Soak(area, source, options)
    try:
        return soaked.run()
    finally:
        soaked.daemon.stop()


def row_of(results: Results) -> dict[str, Any]:
    """As bench.py keeps it."""
    return {
        "rows": [],
        "figures": [vars(each) for each in results.figures],
        "latencies": [vars(each) for each in results.latencies],
    }
