"""A fleet for real: daemons of this machine on one PostgreSQL and one store, beside daemons that clone for themselves.

    python benchmarks/fleet.py --nodes 16 REPOSITORY...

prints what a node costs that is added, a round without news, and what is seen after a publication and a kill. Each
repository is mirrored under several names, and is out of reach when the last node begins. Processor time is that
of the daemon with its workers and gits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import daemon_fleet
import postgresql
from daemon_fleet import Fleet, done, eventually, have, refs
from daemons import Daemon, daemon
from gitrepos import Upstream, git

_TICK = os.sysconf("SC_CLK_TCK")


def processor_s(one: Daemon) -> float:
    """Of the daemon and all its children, ended ones too."""
    ticks, pids = 0, [one.pid]
    while pids:
        pid = pids.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except FileNotFoundError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICK


@contextmanager
def measured(what: str, *nodes: Daemon) -> Iterator[None]:
    began, before = time.monotonic(), sum(map(processor_s, nodes))
    yield
    took, used = time.monotonic() - began, sum(map(processor_s, nodes)) - before
    print(f"{what}: {took:.2f} s, {used:.2f} s of processor time", flush=True)


def take_all(one: Daemon, names: list[str]) -> None:
    """Have every mirror on this node."""
    for name in names:
        status, _, body = one.get(f"/v1/mirrors/{name}/refs/log")
        assert status == 200, body


def join(fleet: Fleet, sources: list[Path], count: int, nodes: int) -> None:
    """What the last node of a fleet costs, beside one that clones."""
    names = [f"o{number}/{path.parent.name}" for number in range(count) for path in sources][:count]
    mirrors = "".join(
        f'[[mirror]]\nrepo = "{name}"\nurl = "file://{fleet.upstreams}/{name.split("/")[1]}"\n'
        for name in names
    )
    for path in sources:
        (fleet.upstreams / path.parent.name).symlink_to(path)
    with (
        daemon(mirrors + '[sync]\ninterval = "0s"\n') as alone,
        measured(f"cloned, {count} mirrors", alone),
    ):
        for name in names:
            done(alone, "POST", f"/v1/mirrors/{name.replace('/', '__')}/sync", bound_s=600)
    first = fleet.make(mirrors, interval="0s")
    with measured(f"cloned and published, {count} mirrors", first):
        for name in names:
            done(first, "POST", f"/v1/mirrors/{name.replace('/', '__')}/sync", bound_s=600)
    while len(fleet.nodes) < nodes - 1:
        fleet.make(interval="0s")
    for path in sources:
        (fleet.upstreams / path.parent.name).unlink()
    last = fleet.make(interval="0s")
    with measured(f"node {len(fleet.nodes)}, {count} mirrors from the store", last):
        take_all(last, [name.replace("/", "__") for name in names])


def first_checkouts(fleet: Fleet, source: Path) -> None:
    """First checkouts of four commits: on the daemon that packs them, and on one that takes its packs."""
    line = git(source, "rev-list", "--first-parent", "HEAD").split()
    commits = [line[len(line) * tenths // 10] for tenths in (6, 4, 2, 0)]
    mirror, quiet = f"owner/{source.parent.name}", "[checkouts]\nprewarm = false\n"
    (fleet.upstreams / f"owner+{source.parent.name}").symlink_to(source)
    first, second = fleet.make(quiet, interval="0s"), fleet.make(quiet, interval="0s")
    done(first, "POST", "/v1/mirrors", {"repo": mirror}, bound_s=600)
    name = mirror.replace("/", "__")
    take_all(second, [name])
    shared = "SELECT count(*) FROM closures WHERE commit_id = '{}'"
    for one, what in ((first, "packed"), (second, "taken from the store")):
        for commit in commits:
            before, began = processor_s(one), time.monotonic()
            status, _, body = one.request(
                "POST", "/v1/checkouts", {"mirror": name, "commit": commit}
            )
            took = time.monotonic() - began
            assert status == 201, body
            eventually(partial(fleet.server.execute_in, fleet.catalog, shared.format(commit)))
            time.sleep(3)  # what follows an answer
            used = processor_s(one) - before
            print(
                f"first checkout of {commit[:8]} of {mirror}, {what}: {took:.2f} s, {used:.2f} s of processor time",
                flush=True,
            )


def rest(fleet: Fleet, seconds: float) -> None:
    before = len(fleet.server.statements())
    time.sleep(seconds)
    rate = (len(fleet.server.statements()) - before) / seconds
    print(f"{len(fleet.nodes)} daemons at rest: {rate:.1f} statements/s", flush=True)


def rounds(fleet: Fleet, upstream: Upstream, count: int) -> None:
    """A round of mirrors without news: statements, and what is written to the store."""
    mirrors = "".join(
        f'[[mirror]]\nrepo = "many/n{number}"\nurl = "{upstream.url}"\n' for number in range(count)
    )
    one = fleet.make(mirrors, interval="120s", start=False)
    one.start(wait=False)
    one.wait_until_healthy(600)
    synced = "SELECT count(*) FROM mirrors WHERE name LIKE 'many%' AND synced_at IS NOT NULL"
    eventually(lambda: fleet.server.execute_in(fleet.catalog, synced) == [(count,)], 1200)
    # the first collection of the store, which claims each mirror, has ended too
    due = "SELECT count(*) FROM claims WHERE (key LIKE 'mirror/many%' OR key = 'store/collect') AND due_ms > 0 AND node IS NULL"
    eventually(lambda: fleet.server.execute_in(fleet.catalog, due) == [(count + 1,)], 600)
    time.sleep(10)  # and what that changed was seen
    stored = sorted(fleet.store_path.rglob("*"))
    newest = "SELECT min(synced_at), max(synced_at) FROM mirrors WHERE name LIKE 'many%'"
    before, asked = fleet.server.execute_in(fleet.catalog, newest), len(fleet.server.statements())
    fleet.server.execute_in(
        fleet.catalog, "UPDATE claims SET due_ms = 0 WHERE key LIKE 'mirror/many%'"
    )
    began = time.monotonic()
    eventually(lambda: fleet.server.execute_in(fleet.catalog, newest)[0][0] > before[0][1], 600)  # type: ignore[operator]
    took = time.monotonic() - began
    # without what the others ask at rest, and what this asked itself
    theirs = [it for it in fleet.server.statements()[asked:] if "LIKE 'm" not in it]
    polls = sum("changes" in it or "nodes" in it for it in theirs)
    writes = len(sorted(fleet.store_path.rglob("*"))) - len(stored)
    print(
        f"a round of {count} mirrors without news: {took:.1f} s, {len(theirs) - polls} statements,"
        f" {writes} new objects in the store",
        flush=True,
    )


def failover(fleet: Fleet, upstream: Upstream, times: int) -> None:
    """How long after a daemon was killed in the middle of a sync another one has the next commit."""
    query = "SELECT node FROM claims WHERE key = 'mirror/owner__name' AND node IS NOT NULL"
    took: list[float] = []
    while len(took) < times:
        holder = eventually(partial(fleet.server.execute_in, fleet.catalog, query))[0][0]
        known = {
            it["holder"]: it["id"]
            for it in fleet.nodes[0].json("GET", "/v1/status")["fleet"]["nodes"]
        }
        found = [
            it
            for it in fleet.nodes
            if known.get(holder) == (it.state_dir / "node").read_text().strip()
        ]
        if not found:
            continue
        found[0].kill()
        began, commit = time.monotonic(), upstream.commit({"file": f"{time.time()}\n"})
        eventually(partial(_is_on_another, commit, found[0], fleet.nodes), 90)
        took.append(time.monotonic() - began)
        found[0].start()
    print(f"killed, and followed by another: {', '.join(f'{it:.1f}' for it in took)} s", flush=True)


def _is_on_another(commit: str, one: Daemon, nodes: list[Daemon]) -> bool:
    return any(commit in refs(it) for it in nodes if it is not one)


def spread(fleet: Fleet, upstream: Upstream) -> None:
    """How long after a sync every daemon has what it brought."""
    took, nodes = [], [node for node in fleet.nodes if refs(node)]
    for number in range(5):
        commit = upstream.commit({"spread": f"{number}\n"})
        done(nodes[0], "POST", "/v1/mirrors/owner__name/sync")
        began = time.monotonic()
        have(commit, *nodes)
        took.append(time.monotonic() - began)
    print(
        f"a sync is on {len(nodes)} daemons after {statistics.median(took):.1f} s (median of 5)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repositories", nargs="+", type=Path)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--mirrors", type=int, default=20)
    parser.add_argument("--round", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--first", action="store_true", help="nothing but first checkouts")
    options = parser.parse_args()
    area = Path(tempfile.mkdtemp(prefix="fleet-", dir="/tmp"))
    try:
        (area / "upstreams").mkdir()
        upstream = Upstream(area / "upstreams/owner+name")
        upstream.history(5)
        with postgresql.running() as server:
            with daemon_fleet.fleet(server, f"file://{area}/store0", area / "upstreams") as fleet:
                for source in options.repositories:
                    first_checkouts(fleet, source)
            if options.first:
                return
            with daemon_fleet.fleet(server, f"file://{area}/store", area / "upstreams") as fleet:
                server.record(fleet.catalog)
                join(fleet, options.repositories, options.mirrors, options.nodes)
                rest(fleet, 30)
                done(fleet.nodes[0], "POST", "/v1/mirrors", {"repo": "owner/name"})
                for node in fleet.nodes:
                    take_all(node, ["owner__name"])
                spread(fleet, upstream)
            with daemon_fleet.fleet(server, f"file://{area}/store2", area / "upstreams") as fleet:
                server.record(fleet.catalog)
                rounds(fleet, upstream, options.round)
            with daemon_fleet.fleet(server, f"file://{area}/store3", area / "upstreams") as fleet:
                for _ in range(4):
                    fleet.make('[[mirror]]\nrepo = "owner/name"\n', interval="1s")
                failover(fleet, upstream, options.kills)
    finally:
        shutil.rmtree(area)


if __name__ == "__main__":
    main()
