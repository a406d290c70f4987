"""A daemon of three killed at each step of a sync, a publication, a download and a removal.

The steps of an operation are those that a run of it showed. One of them is struck, chosen by
MIRRORD_SEED; all with MIRRORD_KILLS=all.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import daemon_fleet
import link
import postgresql
import pytest
import s3
from daemon_fleet import Fleet, done, eventually, rows, well_ended
from daemons import Daemon
from gitrepos import Upstream, git
from steps import Steps
from waiting import BOUND_S

from mirrord.errors import StoreDamagedError
from mirrord.fleet.generations import index_key, list_published, pack_key, read_manifest
from mirrord.fleet.objects import ObjectStore
from mirrord.model import MirrorName

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
_SOME = 1
_OFTEN = 3  # of a step that comes again and again, so many are struck
_TRIES = 3
_FAR_MS = 1 << 50
_PACE = "UPDATE claims SET expires_ms = 0 WHERE node IS NOT NULL"
"""The 20 s for which the claims of a dead daemon last, cut short; test_faults.py waits for them."""


class Lab:
    """Three daemons, of which the first one is struck, and what they must not lose."""

    def __init__(
        self, fleet: Fleet, upstream: Upstream, clock: Path, wires: tuple[link.Link, link.Link]
    ):
        self.fleet, self.upstream, self.clock, self.wires = fleet, upstream, clock, wires
        self.store = ObjectStore(fleet.store)
        self.a, self.b, self.c = fleet.nodes
        self._count, self._days = 0, 0
        self._newest: dict[str, tuple[int, int]] = {}

    def number(self) -> int:
        self._count += 1
        return self._count

    def commit(self) -> str:
        return self.upstream.commit({"file": f"{self.number()}\n"})

    def age_store(self) -> None:
        """Two days pass in the store."""
        self._days += 2
        self.clock.write_text(f"+{self._days}d")
        time.sleep(2)  # longer than it is not read again

    def ask(self, query: str) -> list[tuple[object, ...]]:
        return self.fleet.server.execute_in(self.fleet.catalog, query)

    def leave_to_the_first(self, work: str) -> None:
        """No other daemon claims what is due of a host of which the first one has a batch."""
        node = (self.a.state_dir / "node").read_text().strip()
        self.ask(f"UPDATE claims SET host = 'first' WHERE key = '{work}' RETURNING key")
        self.ask(
            "INSERT INTO claims (key, node, epoch, expires_ms, host, is_batch, failures)"
            f" SELECT 'batch', document->>'holder', 0, {_FAR_MS}, 'first', true, 0 FROM nodes"
            f" WHERE id = '{node}' ON CONFLICT (key) DO UPDATE"
            f" SET node = excluded.node, expires_ms = {_FAR_MS} RETURNING key"
        )

    def start_again(self) -> None:
        self.ask(_PACE + " RETURNING key")
        if self.a.process is None:
            self.a.start()

    def judge(self, key: str) -> None:
        """No generation goes back, all have what they name, and so have refs, wherever they are."""
        name = MirrorName.parse(key)
        query = f"SELECT epoch, number FROM generations WHERE mirror_key = '{key}'"
        for found in self.ask(query):
            now = (int(str(found[0])), int(str(found[1])))
            assert now >= self._newest.get(name.key, (0, 0)), f"{name} went back"
            self._newest[name.key] = now
            published = list_published(self.store, name)
            assert now in [it[:2] for it in published]
            keys = {it.key for it in self.store.iterate(f"mirrors/{name.key}/packs/")}
            for generation in published:
                try:
                    manifest = read_manifest(self.store, name, generation)
                except StoreDamagedError:  # a collection is running
                    assert generation not in list_published(self.store, name)
                    continue
                for pack in manifest.packs:
                    assert {pack_key(name, pack), index_key(name, pack)} <= keys
        for node in self.fleet.nodes:
            if (path := node.state_dir / "mirrors" / key).exists():
                git(path, "fsck", "--connectivity-only", "--no-dangling")

    def become_alike(self, key: str) -> None:
        """On all that have it, with every pin that is recorded."""
        query = f"SELECT owner, commit_id FROM pins WHERE mirror_key = '{key}'"
        for node in self.fleet.nodes:
            if (node.state_dir / "mirrors" / key).exists():
                eventually(lambda: _refs(node, key) == _refs(self.b, key))  # noqa: B023
                for owner, oid in self.ask(query):
                    assert f"refs/mirrord/pins/{owner}/{oid}" in _refs(node, key)


def _refs(node: Daemon, key: str) -> set[str]:
    path = node.state_dir / "mirrors" / key
    listed = git(path, "for-each-ref", "--format=%(objectname) %(refname)").splitlines()
    return {
        line.partition(" ")[2] if "/pins/" in line else line
        for line in listed
        if "/kept/" not in line
    }


@pytest.fixture(scope="module")
def lab(server: postgresql.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("kills")
    upstream = Upstream(root / "upstreams/owner+name")
    upstream.history(5)
    clock = root / "clock"
    clock.write_text("+0d")
    fake = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock)}
    # read for each look at the clock or a file's times, it is half of the store's processor time
    fake |= {
        "FAKETIME_CACHE_DURATION": "1",
        "NO_FAKE_STAT": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with ExitStack() as stack:
        bucket = stack.enter_context(s3.running(fake))
        fleet = stack.enter_context(
            daemon_fleet.fleet(server, bucket.create(), upstream.path.parent)
        )
        wires = (
            stack.enter_context(link.to(bucket.port)),
            stack.enter_context(link.to(server.port)),
        )
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in bucket.environment.items():
            patch.setenv(name, value)
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{wires[0].port}"}
        catalog = fleet.catalog.replace(f":{server.port}/", f":{wires[1].port}/")
        # nothing but the collection is done by the clock
        first = fleet.make(environment=bucket.environment | endpoint, catalog=catalog)
        for _ in range(2):
            fleet.make(environment=bucket.environment, interval="0s")
        done(first, "POST", "/v1/mirrors", {"repo": "owner/name"})
        base = upstream.git("rev-parse", "HEAD~2")
        done(first, "POST", "/v1/datasets?name=d&filename=d.jsonl", rows(base))
        # its pin, and what the catalog has of it: in one publication, or in two with a poll between
        eventually(lambda: daemon_fleet.newest(fleet)[1] >= 2)
        time.sleep(6)  # longer than between polls
        for node in fleet.nodes[1:]:
            done(node, "POST", "/v1/mirrors/owner__name/sync")
        yield Lab(fleet, upstream, clock, wires)
        for node in fleet.nodes:
            assert "Traceback" not in node.log, node.log


class Operation:
    """Work of the first daemon; `finish` is the others' after it was killed in the middle."""

    key = "owner__name"

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.prepare()

    def prepare(self) -> None:
        self.lab.commit()

    def run(self) -> None:
        self.sync(self.lab.a)

    def finish(self) -> None:
        self.lab.commit()
        self.sync(self.lab.b)

    def sync(self, node: Daemon) -> None:
        done(node, "POST", f"/v1/mirrors/{self.key}/sync")

    def add_on(self, node: Daemon) -> None:
        body = {"repo": self.key.replace("__", "/"), "url": self.lab.upstream.url}
        done(node, "POST", "/v1/mirrors", body)


class Sync(Operation):
    """With something new, which is published."""


class Follow(Operation):
    """Of what another one published."""

    def prepare(self) -> None:
        self.lab.commit()
        self.sync(self.lab.b)


class FirstSync(Operation):
    """Of a mirror that no daemon has."""

    def prepare(self) -> None:
        self.key = f"owner__n{self.lab.number()}"

    def run(self) -> None:
        self.add_on(self.lab.a)

    def finish(self) -> None:
        self.add_on(self.lab.b)


class Download(FirstSync):
    """Of a mirror that another one has, to pin a commit of it."""

    def prepare(self) -> None:
        super().prepare()
        self.add_on(self.lab.b)
        self.is_pinned = False
        self.commit = self.lab.upstream.git("rev-parse", "HEAD")

    def run(self) -> None:
        body = {"mirror": self.key, "commit": self.commit}
        status, _, answer = self.lab.a.request("POST", "/v1/pins", body)
        if status == 202:  # a strained machine
            well_ended(self.lab.a, json.loads(answer))
        else:
            assert status == 201, answer
        self.is_pinned = True

    def finish(self) -> None:
        self.sync(self.lab.b)
        query = f"SELECT owner FROM pins WHERE mirror_key = '{self.key}'"
        assert self.lab.ask(query) or not self.is_pinned


class Collection(Operation):
    """Of packs and manifests that no generation needs any more."""

    def prepare(self) -> None:
        for _ in range(2):
            self.lab.commit()
            self.sync(self.lab.b)
        self.lab.age_store()
        self.lab.commit()
        self.sync(self.lab.b)
        self.sync(self.lab.a)

    def run(self) -> None:
        self.lab.leave_to_the_first("store/collect")
        self.lab.ask("UPDATE claims SET due_ms = 0 WHERE key = 'store/collect' RETURNING key")
        query = "SELECT 1 FROM claims WHERE key = 'store/collect' AND due_ms > 0 AND node IS NULL"
        eventually(lambda: self.lab.a.get("/v1/health") and self.lab.ask(query))
        assert len(list_published(self.lab.store, MirrorName.parse(self.key))) < 4


class Removal(FirstSync):
    """Of a mirror that all have."""

    def prepare(self) -> None:
        super().prepare()
        self.add_on(self.lab.b)
        for node in self.lab.fleet.nodes:
            self.sync(node)

    def run(self) -> None:
        self.remove(self.lab.a)

    def finish(self) -> None:
        if self.key.replace("__", "/") in {
            it["repo"] for it in self.lab.b.json("GET", "/v1/mirrors")
        }:
            self.remove(self.lab.b)
        for node in self.lab.fleet.nodes:
            eventually(lambda: not (node.state_dir / "mirrors" / self.key).exists())  # noqa: B023

    def remove(self, node: Daemon) -> None:
        status, _, answer = node.request("DELETE", f"/v1/mirrors/{self.key}")
        assert status == 204, answer


def steps_of(lab: Lab, kind: type[Operation]) -> list[tuple[str, int]]:
    """What a run of it does, in order."""
    operation, seen = kind(lab), list[tuple[str, int]]()

    def note(step: str, count: int) -> bool:
        seen.append((step, count))
        return False

    with Steps(lab.a.state_dir, *lab.wires, note):
        operation.run()
    operation.finish()
    return [(step, count) for step, count in seen if count <= _OFTEN]


def kill_at(lab: Lab, kind: type[Operation], step: str, count: int) -> bool:
    """Kill the first daemon there, start it again, and judge; answers whether it came so far."""
    operation, struck, killed = kind(lab), threading.Event(), threading.Event()

    def strike(seen: str, number: int) -> bool:
        if (seen, number) != (step, count) or struck.is_set():
            return False
        struck.set()
        lab.a.kill()
        killed.set()
        return True

    with Steps(lab.a.state_dir, *lab.wires, strike):
        try:
            operation.run()
        except (OSError, ValueError, AssertionError):  # no answer, half of one, another one
            if not struck.is_set():
                raise
    assert not struck.is_set() or killed.wait(BOUND_S)
    lab.judge(operation.key)
    lab.start_again()
    operation.finish()
    lab.become_alike(operation.key)
    lab.judge(operation.key)
    return struck.is_set()


@pytest.mark.skipif(not FAKETIME.exists(), reason="needs libfaketime")
@pytest.mark.parametrize("kind", [Sync, Follow, FirstSync, Download, Collection, Removal])
def test_a_kill_at_a_step_loses_nothing(lab: Lab, kind: type[Operation]) -> None:
    steps = steps_of(lab, kind)
    chance = random.Random(f"{os.environ.get('MIRRORD_SEED', '17')} {kind.__name__}")
    chance.shuffle(steps)
    wanted = len(steps) if os.environ.get("MIRRORD_KILLS") == "all" else _SOME
    struck, missed = 0, list[str]()  # no two runs are alike: this one may lack a step of the first
    for step, count in steps[: 3 * wanted]:
        if struck == wanted:
            break
        if any(kill_at(lab, kind, step, count) for _ in range(_TRIES)):
            struck += 1
        else:
            missed.append(f"{step} ({count})")
    print(f"{kind.__name__}: {len(steps)} steps, {struck} struck, not met: {missed}")
    assert 2 * struck >= wanted
