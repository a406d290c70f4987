"""A fleet simulated by measured costs: mirrord's, clones by every node, one shared file system; side by side.

`python benchmarks/fleet_simulation.py --nodes 16 100 1000 --seed 1` prints a table in Markdown. At second 0 nothing is anywhere,
and every node begins its first checkouts, several at once; a day of syncs follows. `--measure REPOSITORY...` measures with
mirrord's modules, its daemon and git, and prints `MEASURED`. docs/fleet-setup.md says what all of it rests on.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import logging
import math
import os
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

import anyio
import structlog
from measured_daemon import MIRROR, Daemon
from rivals import Git, git, git_bytes

from mirrord.fleet.objects import ObjectStore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from exchanges import Node
from gitrepos import Upstream

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One real repository, its branches and tags."""

    pack_bytes: float  # in the store: pack, index and manifest of the first generation
    publish_s: float  # packed, hashed, written to a store that is a directory
    follow_s: float  # from there into an empty mirror, proven, refs moved
    index_s: float  # git index-pack of that pack, as a clone ends
    first_s: float  # the first checkout of a mirror, by the daemon
    further_s: float  # the mean of 9 further ones, spread over half of its history
    worktree_s: float  # the mean of the same 10 by git worktree add
    files: float  # of the newest commit
    tree_bytes: float
    noop_s: float  # a sync that finds nothing, without a network
    changed: float  # the part of the 6-hour windows of its last year in which its branch moved
    change_bytes: float  # in the store, for the commits of such a window
    change_follow_s: float


# --measure; Linux 6.18, git 2.39.5, ext4. Times are seconds of one processor, of all processes together
MEASURED = {
    "psf/requests": Measured(1.46e07, 0.30, 0.11, 0.74, 0.49, 0.325, 0.0727, 130, 4.45e06, 0.01, 0.0521, 1.93e04, 0.04),
    "pallets/flask": Measured(1.26e07, 0.25, 0.07, 1.05, 0.59, 0.467, 0.157, 236, 1.82e06, 0.02, 0.0274, 1.2e05, 0.06),
    "ansible/ansible": Measured(2.71e08, 9.9, 1.9, 20.7, 11.8, 8.41, 0.872, 5050, 1.36e07, 0.06, 0.234, 1.15e05, 0.08),
}  # fmt: skip
# branches and tags of marshmallow, axum, flask, requests, caddy, lombok, PhpSpreadsheet, babel, prometheus, terraform
# and ansible, as git packs them; the whole of docusaurus. Eight were drawn from SWE-bench Multilingual by chance
SAMPLE_MB = (6.4, 6.6, 12.2, 14.2, 21.2, 34.8, 86.3, 146.5, 178.0, 253.9, 260.6, 1497.5)
LARGEST_BYTES = 10e9  # of a repository: GitHub's documented limit
POPULARITY = (
    1.0  # Zipf's exponent, instances by repository: 1.5 in SWE-bench Lite, 0.7 Multilingual
)
ATTEMPTS = 4  # nodes that try each instance (assumed)
SLOTS, CPUS = 16, 16  # environments that begin at once on a node, its processors (assumed)
WORKERS = 2  # that build templates for one user: mirrord/workers/pool.py

FORGE_CONNECTION = 20e6  # bytes a second (assumed)
FORGE_REQUEST_S = 0.1  # until the forge answers (assumed)
FORGE_AT_ONCE = 100  # GitHub's documented limit of API requests, here of git's and of all nodes
FORGE_REPOSITORY_RATE = 15  # reads of one repository a second: GitHub's documented limit
LOOK_REQUESTS, FETCH_REQUESTS = 2, 3  # of git's protocol 2: the service, its refs; and the pack

STORE = 12.5e9  # bytes a second of the object store and of the file system (assumed)
STORE_CONNECTION = 90e6  # bytes a second of one request: S3's documented 85 to 90 MB
GETS, PUTS = 3, 3  # of a generation: manifest, pack, index
METADATA_RATE = 192_000  # operations a second of a file system: the most of FSx for Lustre
READ_OPS, CREATE_OPS = 2, 3  # of a file: open, close; create, set attributes, close (assumed)

SYNC_INTERVAL, DAY = 6 * 3600, 24 * 3600  # config.toml: sync.interval
BATCH, BATCH_TRANSACTIONS = 250, 7  # mirrors of a round of syncs; what one asks PostgreSQL
CHANGED_TRANSACTIONS = 3  # of a mirror that changed: published, recorded, pins looked up
CHECKOUT_TRANSACTIONS = 1  # the instance
LOOK, LOOK_TRANSACTIONS = 5, 2  # seconds between two looks of a node; what changed, what is due
HEARTBEAT, RENEWAL, LIFE = 15, 5, 20  # seconds; renewal and life of a claim
FIRST_WAIT, LONGEST_WAIT = 0.5, 5  # seconds between two tries for a claim: each doubles
WAIT_TRANSACTIONS = 2  # of a try: the claim, its holder
CLOSURE, TAKEN = 0.3, 0.29  # of a mirror's pack; of the time that packing it takes, as measured
HOLDER = 0  # the node that syncs


class Gate:
    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open, self.waiting = is_open, list[Process]()


Process = Generator["float | Gate", None, None]
"""Yields the time, or the gate, that it waits for."""


class Loop:
    def __init__(self) -> None:
        self.now, self._count = 0.0, itertools.count()
        self._heap: list[tuple[float, int, Process]] = []

    def start(self, process: Process, at: float = 0.0) -> None:
        heapq.heappush(self._heap, (max(at, self.now), next(self._count), process))

    def open(self, gate: Gate) -> None:
        gate.is_open = True
        for process in gate.waiting:
            self.start(process)

    def run(self) -> None:
        while self._heap:
            self.now, _, process = heapq.heappop(self._heap)
            wanted = next(process, None)
            if isinstance(wanted, Gate) and not wanted.is_open:
                wanted.waiting.append(process)
            elif wanted is not None:
                self.start(process, self.now if isinstance(wanted, Gate) else wanted)


class Line:
    """First come, first served, by so many at once."""

    def __init__(self, at_once: int = 1) -> None:
        self._free = [0.0] * at_once

    def take(self, now: float, seconds: float) -> float:
        """When work is done that joins the line now."""
        end = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, end)
        return end


class World:
    """Repositories, when they change, and who asks for which instances: the same for every way."""

    def __init__(
        self, nodes: int, repositories: int, instances: int, seed: int, connections: int = 4
    ) -> None:
        self.connections = connections  # to the forge, of the node that syncs: sync.concurrency
        random, logs = Random(seed), [math.log(1e6 * size) for size in SAMPLE_MB]
        spread = statistics.mean(logs), statistics.stdev(logs)
        sizes = [min(random.lognormvariate(*spread), LARGEST_BYTES) for _ in range(repositories)]
        costs = [_cost(points) for points in zip(*map(astuple, MEASURED.values()), strict=True)]
        self.costs = [Measured(size, *(cost(size) for cost in costs[1:])) for size in sizes]
        # by round of syncs, of which the first brings everything
        rounds = range(1 + DAY // SYNC_INTERVAL)
        self.moved = [[random.random() < it.changed for _ in rounds] for it in self.costs]
        weights = [rank**-POPULARITY for rank in range(1, repositories + 1)]
        random.shuffle(weights)
        more = random.choices(range(repositories), weights, k=max(0, instances - repositories))
        self.instances = [*range(min(instances, repositories)), *more]  # the repository of each
        self.asked: list[list[int]] = [[] for _ in range(nodes)]  # instances, by node
        for instance in range(instances):
            for node in random.sample(range(nodes), min(ATTEMPTS, nodes)):
                self.asked[node].append(instance)
        for asked in self.asked:
            random.shuffle(asked)
        self.phases = [random.random() * LOOK for _ in range(nodes)]


def _cost(points: tuple[float, ...]) -> Callable[[float], float]:
    """A line by size through what was measured, and never below the least of it."""
    sizes = [it.pack_bytes for it in MEASURED.values()]
    slope, intercept = statistics.linear_regression(sizes, points)
    return lambda size: max(slope * size + intercept, min(points))


class Way:
    """One way to serve a world. `is_full`: what outlives nodes has every mirror at the beginning."""

    def __init__(self, world: World, at_once: int, *, is_full: bool = False) -> None:
        self.world, self.at_once, self.is_full, self.loop = world, at_once, is_full, Loop()
        self.cpus = [Line(CPUS) for _ in world.asked]
        self.forge, self.shared = Line(at_once), Line()
        self.here: dict[tuple[int, int], Gate] = {}  # by node and repository
        self.is_there = [Gate(is_open=is_full) for _ in world.costs]  # where all nodes find it
        self.warm: list[float] = []
        self.cloned_bytes = self.fetched_bytes = self.shared_in = self.shared_out = 0.0
        self.forge_requests = 0

    def run(self) -> None:
        for node, asked in enumerate(self.world.asked):
            left = iter(asked)
            for _ in range(SLOTS):
                self.loop.start(self._begin_environments(node, left))
        self.loop.start(self._sync())
        self.loop.run()

    def _begin_environments(self, node: int, left: Iterator[int]) -> Process:
        for instance in left:
            repository = self.world.instances[instance]
            if is_first := (node, repository) not in self.here:
                gate = self.here[node, repository] = Gate()
                yield from self._bring(node, repository)
                self.loop.open(gate)
            yield self.here[node, repository]
            yield from self._build(node, instance, is_first=is_first)
            self.warm.append(self.loop.now)

    def _bring(self, node: int, repository: int) -> Process:
        """What a node does that is asked for a mirror it does not have."""
        yield self.is_there[repository]

    def _build(self, node: int, instance: int, *, is_first: bool) -> Process:
        yield self._work(node, self.world.costs[self.world.instances[instance]].worktree_s)

    def _work(self, node: int, seconds: float) -> float:
        return self.cpus[node].take(self.loop.now, seconds)

    def _ask_forge(self, size: float, requests: int, seconds: float = 0.0) -> float:
        self.forge_requests += requests
        seconds += requests * FORGE_REQUEST_S + size / FORGE_CONNECTION
        return self.forge.take(self.loop.now, seconds)

    def _sync(self) -> Process:
        """Rounds of what is due, by one node for all, until the day ends."""
        due, rounds = [(0.0, it) for it in range(len(self.is_there))], Counter[int]()
        last = 0.0

        def end(batch: list[int]) -> Process:
            self._record(batch)
            for each in batch:
                heapq.heappush(due, (self.loop.now + SYNC_INTERVAL, each))
            yield self.loop.now

        while (begin := due[0][0] if due else last) < DAY:
            yield begin
            batch, ends = list[int](), list[float]()
            while len(batch) < BATCH and due and due[0][0] <= self.loop.now:
                batch.append(heapq.heappop(due)[1])
            for each in batch:
                cost, number = self.world.costs[each], rounds[each] + self.is_full
                size, seconds = 0.0, cost.noop_s
                if number == 0:
                    slowness = max(1, self.at_once / CPUS)
                    size, seconds = cost.pack_bytes, slowness * (cost.index_s + cost.publish_s)
                    self.cloned_bytes += size
                elif self.world.moved[each][number]:
                    size, seconds = cost.change_bytes, cost.noop_s
                    self.fetched_bytes += size
                requests = LOOK_REQUESTS + (FETCH_REQUESTS if size else 0)
                seconds += size / STORE_CONNECTION
                ends.append(self._ask_forge(size, requests, seconds))
                if size:
                    self.loop.start(self._publish(each, size), ends[-1])
                rounds[each] += 1
            if batch:
                last = max(last, *ends)
                self.loop.start(end(batch), max(ends))
                yield sorted(ends)[-min(len(ends), self.at_once)]  # all of it has begun

    def _publish(self, repository: int, size: float) -> Process:
        self.shared_in += size
        self.loop.open(self.is_there[repository])
        yield self.loop.now

    def _record(self, batch: list[int]) -> None:
        """The end of a round of syncs."""


class Fleet(Way):
    """mirrord: one node syncs and publishes, the others take from a store what they are asked for."""

    def __init__(self, world: World, *, is_full: bool = False, takes_turns: bool = False) -> None:
        super().__init__(world, world.connections, is_full=is_full)
        self.takes_turns = takes_turns
        self._workers = [Line(WORKERS) for _ in world.asked]
        self._is_free = [Gate() for _ in world.costs]  # its claim, the first time
        self._turns = [Line() for _ in world.costs]
        self.followers: list[list[int]] = [[] for _ in world.costs]
        self.followed: list[float] = []  # seconds behind a publication
        self.gets = self.puts = 0
        self.transactions = Counter[int]()  # by second
        self.closures_in = self.closures_out = 0.0  # of the bytes into the store and out of it
        self._packed = set[int]()  # instances whose closures are in the store
        self._waits = defaultdict[int, float](float)  # how many more a second, from a second on
        self._refreshed = set[int]()  # seconds in which looks find something

    def _bring(self, node: int, repository: int) -> Process:
        asked, cost = self.loop.now, self.world.costs[repository]
        self.transactions[int(asked)] += 1
        if node == HOLDER:
            yield self.is_there[repository]
            return
        if not self.is_there[repository].is_open:
            yield self._is_free[repository] if self.takes_turns else self.is_there[repository]
            yield self.loop.now + LONGEST_WAIT / 2
            if self.takes_turns:  # each downloads under the claim
                seconds = cost.pack_bytes / STORE_CONNECTION + cost.follow_s
                yield self._turns[repository].take(self.loop.now, seconds) - seconds
            self._try(asked, self.loop.now)
        yield from self._download(node, cost.pack_bytes, cost.follow_s)
        self.followers[repository].append(node)

    def _try(self, now: float, end: float) -> None:
        """Ask for a claim from now to an end; the longest pauses are a rate."""
        pause = FIRST_WAIT
        while now < end and pause < LONGEST_WAIT:
            self.transactions[int(now)] += WAIT_TRANSACTIONS
            now, pause = now + pause, pause * 2
        if now < end:
            self._waits[int(now)] += WAIT_TRANSACTIONS / LONGEST_WAIT
            self._waits[int(end)] -= WAIT_TRANSACTIONS / LONGEST_WAIT

    def _download(self, node: int, size: float, seconds: float) -> Process:
        now, self.gets, self.shared_out = self.loop.now, self.gets + GETS, self.shared_out + size
        yield max(self.shared.take(now, size / STORE), now + size / STORE_CONNECTION)
        yield self._work(node, seconds)

    def _build(self, node: int, instance: int, *, is_first: bool) -> Process:
        cost = self.world.costs[self.world.instances[instance]]
        self.transactions[int(self.loop.now)] += CHECKOUT_TRANSACTIONS
        seconds, size = cost.first_s if is_first else cost.further_s, CLOSURE * cost.pack_bytes
        if instance not in self._packed:
            yield self._workers[node].take(self.loop.now, seconds)
            self._packed.add(instance)
            self.puts, self.shared_in = self.puts + 2, self.shared_in + size
            self.closures_in += size
        else:
            self.gets, self.shared_out = self.gets + 2, self.shared_out + size
            self.closures_out += size
            yield max(
                self.shared.take(self.loop.now, size / STORE),
                self.loop.now + size / STORE_CONNECTION,
            )
            yield self._workers[node].take(self.loop.now, TAKEN * seconds)

    def _publish(self, repository: int, size: float) -> Process:
        now, is_new = self.loop.now, not self.is_there[repository].is_open
        self.puts, self.gets = self.puts + PUTS, self.gets + (not is_new)  # the manifest before
        self.transactions[int(now)] += CHANGED_TRANSACTIONS
        self._refreshed |= {int(now) + each for each in range(1, LOOK + 1)}
        yield from super()._publish(repository, size)
        for node in self.followers[repository] if not is_new else ():
            look = now + (self.world.phases[node] - now) % LOOK
            self.loop.start(self._follow(node, self.world.costs[repository], now), look)

    def _follow(self, node: int, cost: Measured, since: float) -> Process:
        yield from self._download(node, cost.change_bytes, cost.change_follow_s)
        self.followed.append(self.loop.now - since)

    def _record(self, batch: list[int]) -> None:
        self.transactions[int(self.loop.now)] += BATCH_TRANSACTIONS
        for each in batch:
            self.loop.open(self._is_free[each])

    def load(self) -> list[float]:
        """Transactions in each second of the day."""
        looking = Counter(int(phase) for phase in self.world.phases)
        waiting, found = 0.0, list[float]()
        for second in range(DAY):
            waiting += self._waits[second]
            each = LOOK_TRANSACTIONS + LOOK / HEARTBEAT + (second in self._refreshed)
            found.append(self.transactions[second] + waiting + each * looking[second % LOOK])
        return found

    def take_over(self, deaths: int = 10_000) -> list[float]:
        """Seconds from the death of the node that syncs until another has its claim: one with the mirror, where there is one."""
        random = Random(len(self.world.asked))
        others = [len(each) or len(self.world.asked) - 1 for each in self.followers]
        ends = [LIFE - random.random() * RENEWAL for _ in range(deaths)]
        return [end + LOOK * (1 - random.random() ** (1 / random.choice(others))) for end in ends]


class Clones(Way):
    """Each node clones for itself, and fetches what it has."""

    def __init__(self, world: World, *, is_full: bool = False) -> None:
        super().__init__(world, FORGE_AT_ONCE)
        self._rates = [Line() for _ in world.costs]

    def _bring(self, node: int, repository: int) -> Process:
        cost = self.world.costs[repository]
        self.cloned_bytes += cost.pack_bytes
        yield self._rates[repository].take(self.loop.now, FETCH_REQUESTS / FORGE_REPOSITORY_RATE)
        yield self._ask_forge(cost.pack_bytes, FETCH_REQUESTS)
        yield self._work(node, cost.index_s)

    def _sync(self) -> Process:
        for number in range(1, DAY // SYNC_INTERVAL):
            yield number * SYNC_INTERVAL
            for _, repository in self.here:
                moved, cost = self.world.moved[repository][number], self.world.costs[repository]
                self.fetched_bytes += moved * cost.change_bytes
                requests = FETCH_REQUESTS if moved else LOOK_REQUESTS
                self._ask_forge(moved * cost.change_bytes, requests)


class Share(Way):
    """One node clones, and the first one asked writes a checkout, to a file system; others read it there."""

    def __init__(self, world: World, *, is_full: bool = False) -> None:
        super().__init__(world, world.connections, is_full=is_full)
        self._metadata, self._written = Line(), dict[int, Gate]()

    def _build(self, node: int, instance: int, *, is_first: bool) -> Process:
        cost, gate = self.world.costs[self.world.instances[instance]], self._written.get(instance)
        if gate is not None:
            yield gate
            self.shared_out += cost.tree_bytes
            yield self._move(cost.tree_bytes, READ_OPS * cost.files)
            return
        gate = self._written[instance] = Gate()
        self.shared_in += cost.tree_bytes
        yield self._work(node, cost.worktree_s)
        yield self._move(cost.tree_bytes, CREATE_OPS * cost.files)
        self.loop.open(gate)

    def _move(self, size: float, operations: float) -> float:
        now, data = self.loop.now, self.shared.take(self.loop.now, size / STORE)
        return max(data, self._metadata.take(now, operations / METADATA_RATE))


def figures(world: World) -> dict[str, list[float]]:
    """The rows of a table: of mirrord, clones, a file system; some of mirrord alone."""
    fleet, clones, _ = ways = Fleet(world), Clones(world), Share(world)
    full = Fleet(world, is_full=True), clones, Share(world, is_full=True)
    turns = Fleet(world, takes_turns=True)
    for way in (*ways, full[0], full[2], turns):
        way.run()
    syncs = [len(world.costs), len(clones.here), len(world.costs)]
    load, waiting = fleet.load(), turns.load()
    followed, ends = fleet.followed, fleet.take_over()
    time_s = LOOK_REQUESTS * FORGE_REQUEST_S
    return {
        "first checkouts": [len(way.warm) for way in ways],
        "mirrors on nodes": [len(way.here) for way in ways],
        "from the forge at first, GB": [way.cloned_bytes / 1e9 for way in ways],
        "from the forge later in a day, GB": [way.fetched_bytes / 1e9 for way in ways],
        "requests to the forge": [way.forge_requests for way in ways],
        "into the store or file system, GB": [way.shared_in / 1e9 for way in ways],
        "out of it, GB": [way.shared_out / 1e9 for way in ways],
        "between nodes, GB": [0, 0, 0],
        "from nothing, half warm, min": [_part(way.warm, 0.5) / 60 for way in ways],
        "from nothing, 99 % warm, min": [_part(way.warm, 0.99) / 60 for way in ways],
        "the same, waiting in turn, min": [_part(turns.warm, 0.99) / 60],
        "new nodes, half warm, min": [_part(way.warm, 0.5) / 60 for way in full],
        "new nodes, 99 % warm, min": [_part(way.warm, 0.99) / 60 for way in full],
        "round without change, requests to the forge": [LOOK_REQUESTS * it for it in syncs],
        "its time, s": [it * time_s / way.at_once for it, way in zip(syncs, ways, strict=True)],
        "its transactions": [math.ceil(syncs[0] / BATCH) * BATCH_TRANSACTIONS, 0, 0],
        "reads of the store": [fleet.gets, 0, 0],
        "writes to the store": [fleet.puts, 0, 0],
        "transactions a second, at rest": [statistics.median(load[-3600:]), 0, 0],
        "transactions a second, mean of the day": [statistics.mean(load), 0, 0],
        "transactions, busiest second": [max(load), 0, 0],
        "transactions a second, waiting in turn, mean": [statistics.mean(waiting)],
        "a change is followed, median, s": [_part(followed, 0.5)],
        "a change is followed, 99 %, s": [_part(followed, 0.99)],
        "another node syncs after a death, median, s": [_part(ends, 0.5)],
        "another node syncs after a death, 99 %, s": [_part(ends, 0.99)],
    }


def _part(values: list[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)] if values else math.nan


# -- measuring -------------------------------------------------------------------------------------


class _Copied(Upstream):
    def __init__(self, path: Path) -> None:
        self.path = path


def measure(source: Path) -> Measured:
    """What mirrord's own modules, its daemon and git do with one repository."""
    branch = git("symbolic-ref", "HEAD", cwd=source)
    stamps = [int(it) for it in git("log", "--format=%ct", branch, cwd=source).split()]
    windows = Counter(it // SYNC_INTERVAL for it in stamps if it > max(stamps) - 365 * DAY)
    line = git("rev-list", "--first-parent", branch, cwd=source).split()
    back, spread = round(windows.total() / len(windows)), line[: len(line) // 2 : len(line) // 20]
    words = "for-each-ref", "--format=create %(refname) %(objectname)", "refs/heads", "refs/tags"
    late = git(*words, "--contains", line[back - 1], cwd=source).splitlines()
    early = [it for it in git(*words, cwd=source).splitlines() if it not in late]
    early += [f"create {branch} {line[back]}", ""]
    with tempfile.TemporaryDirectory(prefix="mirrord-fleet-") as temporary:
        area = Path(temporary)
        upstream, store = area / "upstream.git", ObjectStore(f"file://{area}/store")
        git("init", "--quiet", "--bare", upstream)
        (upstream / "objects/info/alternates").write_text(f"{source.resolve()}/objects\n")
        git("symbolic-ref", "HEAD", branch, cwd=upstream)
        git_bytes("update-ref", "--stdin", cwd=upstream, stdin="\n".join(early).encode())
        nodes = Node(area / "a", store), Node(area / "b", store)
        exchanged = anyio.run(_exchange, *nodes, _Copied(upstream), line[0])
        pack = max((area / "store").rglob("*.pack"), key=lambda path: path.stat().st_size)
        index_s = _spent(partial(git, "index-pack", "-o", area / "pack.idx", pack))
        rival, daemon = Git(upstream, area), Daemon(area / "daemon", upstream)
        added = [_spent(partial(rival.worktree_add, rival.fresh(), it)) for it in spread]
        try:
            with daemon.client() as client:
                client.health()

                def check_out(commit: str) -> None:
                    client.checkout(mirror=MIRROR, commit=commit).release()

                taken = [_spent(partial(check_out, it), daemon.cpu_s) for it in spread]
        finally:
            daemon.stop()
    listed = [it.split()[3] for it in git("ls-tree", "-r", "-l", branch, cwd=source).splitlines()]
    sizes = [int(it) for it in listed if it != "-"]
    return Measured(
        **exchanged, index_s=index_s, worktree_s=statistics.mean(added), files=len(sizes),
        first_s=taken[0], further_s=statistics.mean(taken[1:]), tree_bytes=sum(sizes),
        changed=len(windows) * SYNC_INTERVAL / (365 * DAY),
    )  # fmt: skip


async def _exchange(a: Node, b: Node, upstream: Upstream, newest: str) -> dict[str, float]:
    """A generation and the change after it, from one node to another."""
    marks = list[float]()

    async def marked(work: Awaitable[T]) -> T:
        marks.append(_cpu_s())
        result = await work
        marks.append(_cpu_s() - marks.pop())
        return result

    def stored() -> int:
        return sum(each.size_bytes for each in a.store.iterate("mirrors/"))

    await a.sync(upstream)
    await marked(a.sync(upstream))
    first, size = await marked(a.publish(None)), stored()
    git("update-ref", "HEAD", newest, cwd=upstream.path)
    await a.sync(upstream)
    second = await a.publish(first)
    assert first
    assert second
    await marked(b.follow(first))
    await marked(b.follow(second))
    names = "noop_s", "publish_s", "follow_s", "change_follow_s"
    found = dict(zip(names, marks, strict=True))
    return found | {"pack_bytes": size, "change_bytes": stored() - size}


def _cpu_s() -> float:
    """Processor seconds of this process and of its children that ended."""
    return sum(os.times()[:4])


def _spent(work: Callable[[], object], clock: Callable[[], float] = _cpu_s) -> float:
    began = clock()
    work()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 100, 1000])
    parser.add_argument("--repositories", type=int, default=3400)
    parser.add_argument("--instances", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=4, help="sync.concurrency")
    parser.add_argument("--measure", type=Path, nargs="+", metavar="REPOSITORY")
    given = parser.parse_args()
    if given.measure:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        for each in given.measure:
            found = ", ".join(f"{it:.3g}" for it in astuple(measure(each)))
            print(f"{each}: Measured({found})", flush=True)
        return
    heads, rows = ["nodes"], dict[str, list[str]]()
    for nodes in given.nodes:
        heads += [f"{way}, {nodes:,}" for way in ("mirrord", "clones", "file system")]
        scale = given.repositories, given.instances, given.seed, given.connections
        for name, values in figures(World(nodes, *scale)).items():
            cells = [f"{it:,.1f}" if it < 100 and it % 1 else f"{it:,.0f}" for it in values]
            rows.setdefault(name, [name]).extend([*cells, "", ""][:3])
    for row in (heads, ["---"] * len(heads), *rows.values()):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
