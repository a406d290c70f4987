"""Whole turns at an even rate for an hour: does what the daemon holds stay flat?

`bench.py --ext4 --cases turns --seconds 3600 --rate 8`: each turn checks out, writes files, reads the diff, grades or goes
through a snapshot, resets and releases; now and then one forks, pins, imports rows, syncs or leaves the warm commits. The
soak asks what breaks under everything at once; this one has no bad clients, so a slope is the daemon's own.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

from measured_daemon import MIRROR, REPO, Daemon, instance_row
from results import Figure, Latency
from rivals import Git
from soak import Options, Results
from soak_tally import Tally
from soak_watch import Sample, Watch, settled

from mirrord import Checkout, Client
from mirrord.errors import MirrordError

_THREADS = 4
_WARM_UP_S = 60.0
_REASON = "a turn"
_LONGEST = timedelta(minutes=5)


class Turns:
    """One daemon with a mirror of `source`."""

    def __init__(self, area: Path, source: Path, options: Options) -> None:
        self.options = options
        area.mkdir(parents=True)
        area.chmod(0o755)
        self.line = Git(source, area).line(200)
        self.daemon = Daemon(area / "daemon", source)
        self.tally = Tally()
        self.rows = [instance_row(REPO, commit) for commit in self.line]
        self.instances = [row["instance_id"] for row in self.rows[:4]]

    def run(self) -> Results:
        with self.daemon.client() as client:
            self._import(client, 4)
        self._load(_WARM_UP_S, Watch(self._sample))
        before = settled(self.daemon)
        self.tally, watch = Tally(), Watch(self._sample)
        self._load(self.options.seconds, watch)
        return self._results(before, settled(self.daemon, before), watch)

    def _sample(self) -> Sample:
        return Sample.of(self.daemon)

    def _import(self, client: Client, count: int) -> None:
        content = "".join(json.dumps(row) + "\n" for row in self.rows[:count]).encode()
        client.wait(
            client.import_dataset([content], source="turns.jsonl", name="turns"), timeout=_LONGEST
        )

    def _load(self, seconds: float, watch: Watch) -> None:
        ends = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(ends, number)) for number in range(_THREADS)
        ]
        began = time.monotonic()
        with watch.watching():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.tally.elapsed_s = time.monotonic() - began

    def _work(self, ends: float, number: int) -> None:
        chance, count = random.Random(number), 0
        with Client(self.daemon.socket) as client:
            due = time.monotonic()
            while (now := time.monotonic()) < ends:
                # what was late is not caught up with: the rate is never exceeded
                due = max(due, now - 1) + _THREADS / self.options.rate
                count += 1
                with suppress(MirrordError):  # counted where it was asked
                    self.tally.ask("turn", partial(self._turn, client, chance, count))
                time.sleep(max(0.0, min(due, ends) - time.monotonic()))

    def _turn(self, client: Client, chance: random.Random, count: int) -> None:
        if count % 20 == 0:
            self._aside(client, chance, count)
        commit = self.line[0] if count % 10 else chance.choice(self.line[5:])
        is_graded = count % 3 == 0
        where = chance.choice(self.instances) if is_graded else f"{MIRROR}@{commit}"
        with self._checked_out(client, where) as checkout:
            for name in range(4):
                (checkout.path / f"turn-{name}.txt").write_text(
                    f"{count}\n" * chance.randint(1, 99)
                )
            patch = self.tally.ask("diff", checkout.diff)
            if b"turn-3" not in patch:
                self.tally.broken.append(f"diff: {patch[:80]!r} lacks what was written")
            if is_graded:
                self.tally.ask("grade", partial(checkout.grade, ttl="3m")).release()
            else:
                self.tally.ask("snapshot", partial(checkout.snapshot, "kept"))
                self.tally.ask("reset to it", partial(checkout.reset, to="kept"))
            if count % 7 == 0:
                self.tally.ask("fork", partial(checkout.fork, ttl="3m")).release()
            self.tally.ask("reset", checkout.reset)

    @contextmanager
    def _checked_out(self, client: Client, where: str) -> Iterator[Checkout]:
        checkout = self.tally.ask("checkout", lambda: client.checkout(where, ttl="3m"))
        try:
            yield checkout
        finally:
            self.tally.ask("release", checkout.release)

    def _aside(self, client: Client, chance: random.Random, count: int) -> None:
        """What is done less often than turns."""
        commit = chance.choice(self.line)
        kinds: list[Callable[[], object]] = [
            lambda: client.pin(REPO, commit, reason=_REASON),
            lambda: self._unpin(client),
            lambda: self._import(client, chance.randint(4, len(self.rows))),
            lambda: client.wait(client.sync_mirror(REPO), timeout=_LONGEST),
            client.metrics,
            client.gc,
        ]
        self.tally.ask("aside", kinds[count // 20 % len(kinds)])

    def _unpin(self, client: Client) -> None:
        for pin in client.list_pins(MIRROR):
            if pin.reason == _REASON:
                with suppress(MirrordError):  # another thread removed it
                    client.unpin(REPO, pin.commit)

    def _results(self, before: Sample, after: Sample, watch: Watch) -> Results:
        taken = self.tally.taken
        print(f"  at rest before {before}\n  at rest after  {after}")
        for (what, code), count in sorted(self.tally.refused.items()):
            print(f"  {what}: {code}: {count}, such as {self.tally.examples[code][:200]}")
        broken = [*self.tally.broken, *watch.leaks(before, after, is_same=True)]
        for fact in broken[:40]:
            print(f"BROKEN {fact[:400]}", file=sys.stderr, flush=True)
        turns = taken.get("turn", [])
        return Results(
            latencies=[Latency.of(f"turns: {what}", taken[what]) for what in sorted(taken)],
            figures=[
                Figure("whole turns", len(turns), ""),
                Figure("whole turns a second", len(turns) / self.tally.elapsed_s, ""),
                Figure("private memory, slope of the second half", watch.slope_mib_h(), "MiB/h"),
                Figure("private memory at rest, before", before.private_mib, "MiB"),
                Figure("private memory at rest, after", after.private_mib, "MiB"),
                *(Figure(f"at most: {n}", v, "") for n, v in watch.most().items() if n != "at"),
                Figure("promises broken", len(broken), "", "0"),
            ],
            broken=broken,
        )


def turns(area: Path, source: Path, options: Options) -> Results:
    work = Turns(area, source, options)
    try:
        return work.run()
    finally:
        work.daemon.stop()
