"""What breaks in a fleet: daemons, the catalog's database, the store, clocks. Nothing recorded is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import daemon_fleet
import forge
import link
import postgresql
import psycopg
import pytest
import s3
from daemon_fleet import (
    Fleet,
    become_like,
    checkout,
    done,
    ended,
    eventually,
    have,
    newest,
    refs,
    rows,
    well_ended,
)
from daemons import Daemon
from gitrepos import Upstream

from mirrord import Client

pytestmark = pytest.mark.slow

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
_OWN = '[[mirror]]\nrepo = "owner/name"\n'


def test_a_daemon_that_slept_past_its_claim_publishes_nothing(
    fleet: Fleet, upstream: Upstream
) -> None:
    with forge.serving(upstream.path.parent) as web:
        text = f'[[mirror]]\nrepo = "owner/name"\nurl = "{web.url}/owner+name"\n'
        a, b, c, d = (fleet.make(text) for _ in range(4))
        done(a, "POST", "/v1/mirrors/owner__name/sync")
        assert checkout(b, mirror="owner/name", commit="main")
        web.delay_s = 3.0
        upstream.commit({"seen": "by a\n"})
        started = a.json("POST", "/v1/mirrors/owner__name/sync")
        eventually(lambda: web.active)
        os.kill(a.pid, signal.SIGSTOP)
        try:
            web.delay_s = 0.0
            upstream.git("reset", "--quiet", "--hard", "HEAD~1")
            seen_by_b = upstream.commit({"seen": "by b\n"})
            done(b, "POST", "/v1/mirrors/owner__name/sync")
            at = newest(fleet)
        finally:
            os.kill(a.pid, signal.SIGCONT)
        eventually(
            lambda: a.json("GET", f"/v1/operations/{started['id']}")["state"] != "running", 60
        )
        assert newest(fleet) >= at
        for node in (c, d):
            assert checkout(node, mirror="owner/name", commit=seen_by_b)
        become_like(b, a, c, d)
        assert seen_by_b in refs(b)


def test_another_daemon_takes_over_what_a_killed_one_synced(
    fleet: Fleet, upstream: Upstream
) -> None:
    with forge.serving(upstream.path.parent) as web:
        text = f'[[mirror]]\nrepo = "owner/name"\nurl = "{web.url}/owner+name"\n'
        a, b = fleet.make(text, interval="4s"), fleet.make(text, interval="4s")
        eventually(lambda: refs(a) or refs(b))
        for node in (a, b):
            assert checkout(node, mirror="owner/name", commit="main")
        web.delay_s = 2.0
        query = "SELECT node FROM claims WHERE key = 'mirror/owner__name' AND node IS NOT NULL"
        holder = eventually(lambda: fleet.server.execute_in(fleet.catalog, query))[0][0]
        nodes = {it["holder"]: it["id"] for it in a.json("GET", "/v1/status")["fleet"]["nodes"]}
        first = next(
            n for n in (a, b) if n.json("GET", "/v1/status")["fleet"]["node"] == nodes[holder]
        )
        first.kill()
        web.delay_s = 0.0
        commit = upstream.commit({"new": "line\n"})
        second = b if first is a else a
        eventually(lambda: commit in refs(second), 60)


def test_without_the_store_a_daemon_serves_and_says_so(
    server: postgresql.Server, tmp_path: Path, upstream: Upstream
) -> None:
    bucket = s3.shared()
    with link.to(bucket.port) as wire:
        environment = bucket.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}"}
        with daemon_fleet.fleet(server, bucket.create(), upstream.path.parent) as fleet:
            a = fleet.make(_OWN, environment=environment)
            done(a, "POST", "/v1/mirrors/owner__name/sync")
            at = newest(fleet)
            wire.cut()
            commit = upstream.commit({"new": "line\n"})
            failed = ended(a, "POST", "/v1/mirrors/owner__name/sync", bound_s=120)
            assert failed["error"]["code"] == "store-unavailable"
            assert checkout(a, mirror="owner/name", commit=commit)
            assert b"the store cannot be reached" in a.get("/v1/health")[2]
            wire.mend()
            eventually(lambda: newest(fleet) > at)
            eventually(lambda: a.get("/v1/health")[0] == 200)
            wire.delay_s = 0.02
            b = fleet.make(environment=environment)
            assert checkout(b, mirror="owner/name", commit=commit)
            assert a.get("/v1/health")[0] == 200


def test_a_store_that_never_answers_keeps_no_request_waiting(
    server: postgresql.Server, upstream: Upstream
) -> None:
    """A pin of what is published needs no store; what needs it goes on as an operation."""
    bucket, heard = s3.shared(), list[bytes]()
    with link.to(bucket.port) as wire:
        environment = bucket.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}"}
        with daemon_fleet.fleet(server, bucket.create(), upstream.path.parent) as fleet:
            a = fleet.make(_OWN, environment=environment)
            done(a, "POST", "/v1/mirrors/owner__name/sync")
            copy = {"repo": "owner/copy", "url": f"file://{upstream.path}"}
            done(a, "POST", "/v1/mirrors", copy)
            published, new = upstream.git("rev-parse", "HEAD~2"), upstream.commit({"new": "line\n"})
            wire.on_data = lambda _, is_request, data: heard.append(data) if is_request else None
            wire.is_silent = True
            status, _, body = a.request("POST", "/v1/pins", _pin_of(published))
            assert (status, len(heard)) == (201, 0), body
            syncing = a.json("POST", "/v1/mirrors/owner__copy/sync")
            eventually(lambda: heard)  # it publishes, under the mirror's lock
            assert a.request("DELETE", "/v1/mirrors/owner__copy")[0] == 204
            sync = a.json("GET", f"/v1/operations/{syncing['id']}")
            assert (sync["state"], sync["error"]["code"]) == ("failed", "conflict")
            status, _, body = a.request("POST", "/v1/pins", _pin_of(new))
            assert (status, json.loads(body)["kind"]) == (202, "pin.add"), body
            status, _, added = a.request("POST", "/v1/mirrors", copy)
            assert (status, json.loads(added)["kind"]) == (202, "mirror.add"), added
            # it counts once its objects are in the store
            assert [it["commit"] for it in a.json("GET", "/v1/pins")] == [published]
            wire.is_silent = False
            assert well_ended(a, json.loads(body))["commit"] == new
            assert well_ended(a, json.loads(added))["changed"]
            assert {it["commit"] for it in a.json("GET", "/v1/pins")} == {published, new}
            b = fleet.make(environment=environment)
            assert checkout(b, mirror="owner/name", commit=published)
            have(f"refs/mirrord/pins/person/0/{new}", b)
            have(f"refs/mirrord/pins/person/0/{published}", b)


def test_what_waits_for_other_work_and_a_silent_store_goes_on_as_an_operation(
    server: postgresql.Server, upstream: Upstream
) -> None:
    """Removals of a pin, a dataset, a mirror, and a reload; what is cancelled is left as it was."""
    bucket, heard = s3.shared(), list[bytes]()
    with link.to(bucket.port) as wire, ThreadPoolExecutor() as pool:
        environment = bucket.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}"}
        with daemon_fleet.fleet(server, bucket.create(), upstream.path.parent) as fleet:
            a = fleet.make(_OWN, environment=environment)
            done(a, "POST", "/v1/mirrors/owner__name/sync")
            copy = {"repo": "owner/copy", "url": f"file://{upstream.path}"}
            done(a, "POST", "/v1/mirrors", copy)
            old, new = upstream.git("rev-parse", "HEAD~2"), upstream.commit({"new": "line\n"})
            assert a.request("POST", "/v1/pins", _pin_of(old))[0] == 201
            done(a, "POST", "/v1/datasets?filename=d.jsonl", rows(old))
            wire.on_data = lambda _, is_request, data: heard.append(data) if is_request else None
            wire.is_silent = True

            def has_heard(name: bytes) -> bool:
                return any(name in data for data in heard)

            def ask(method: str, path: str, body: Any = None) -> Future[Any]:
                return pool.submit(a.request, method, path, body)

            pinning = [ask("POST", "/v1/pins", _pin_of(new, of)) for of in ("name", "copy")]
            for name in (b"owner__name", b"owner__copy"):  # both publish, under their locks
                eventually(partial(has_heard, name))
            a.config.write_text(f'{a.config.read_text()}[[mirror]]\nrepo = "owner/third"\n')
            eventually(partial(has_heard, b"owner__third"))
            asked = [
                ask("DELETE", f"/v1/pins/owner__name/{old}"),
                ask("DELETE", "/v1/datasets/d"),
                ask("DELETE", "/v1/mirrors/owner__copy"),
                ask("POST", "/v1/reload"),
            ]
            with Client(a.socket) as client:
                removing = pool.submit(client.unpin, "owner/name", old)
                answers = [one.result() for one in (*pinning, *asked)]
                assert {status for status, _, _ in answers} == {202}, answers
                begun = [json.loads(body) for _, _, body in answers]
                kinds = ["pin.add", "pin.add", "pin.remove", "dataset.remove", "mirror.remove"]
                assert [it["kind"] for it in begun] == [*kinds, "config.reload"]
                told = [a.json("GET", f"/v1/operations/{it['id']}") for it in begun]
                assert {it["state"] for it in told} == {"running"}
                notes = [it["progress"]["note"] for it in told]
                # the second where records of the mirror were on their way first
                assert {*notes[:2]} <= {"verify the commit and publish it", "look for the commit"}
                assert notes[2:] == [
                    "wait for other work on owner__name",
                    "remove its pins",
                    "wait for other work on owner__copy",
                    "wait for another reload",  # of the file that changed
                ]
                assert a.request("DELETE", f"/v1/operations/{begun[1]['id']}")[0] == 200
                wire.is_silent = False
                assert well_ended(a, begun[0])["commit"] == new
                for removal in begun[2:5]:
                    assert well_ended(a, removal) is None
                assert set(well_ended(a, begun[5])) == {"applied", "refused"}
                removing.result()
            assert [it["commit"] for it in a.json("GET", "/v1/pins")] == [new]
            assert a.json("GET", "/v1/datasets") == []
            mirrors = [it["name"] for it in a.json("GET", "/v1/mirrors")]
            assert mirrors == ["owner__name", "owner__third"]


def _pin_of(commit: str, name: str = "name") -> dict[str, str]:
    return {"mirror": f"owner/{name}", "commit": commit}


def test_a_store_that_has_room_for_little_stays_a_fault(
    server: postgresql.Server, upstream: Upstream
) -> None:
    """Small objects are written all the while; health changes once, when what was refused is there."""
    bucket = s3.shared()
    with link.to(bucket.port) as wire:
        environment = bucket.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}"}
        with daemon_fleet.fleet(server, bucket.create(), upstream.path.parent) as fleet:
            a = fleet.make(_OWN, interval="0s", environment=environment)
            done(a, "POST", "/v1/mirrors/owner__name/sync")
            at, probes = newest(fleet), []
            wire.on_data = lambda _, to_server, data: (
                probes.append(data) if to_server and b"/checks/" in data[:200] else None
            )
            wire.full_from, wire.is_full = 100_000, True
            upstream.commit({"large": random.Random(1).randbytes(300_000).hex()})
            failed = ended(a, "POST", "/v1/mirrors/owner__name/sync", bound_s=120)
            assert failed["error"]["code"] == "store-full"
            while len(probes) < 5:  # each is written and deleted
                assert b"has no room" in a.get("/v1/health")[2]
                time.sleep(0.1)
            wire.is_full = False
            eventually(lambda: a.get("/v1/health")[0] == 200)
            assert newest(fleet) > at


def test_bytes_that_the_store_has_not_kept_move_no_ref(
    fleet: Fleet, upstream: Upstream, tmp_path: Path
) -> None:
    # without rounds, in which the one that has the mirror would repair the store
    a, b = fleet.make(_OWN, interval="0s"), fleet.make(_OWN, interval="0s")
    done(a, "POST", "/v1/mirrors/owner__name/sync")
    assert checkout(b, mirror="owner/name", commit="main")
    before = refs(b)
    kept = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*.pack")}
    os.kill(b.pid, signal.SIGSTOP)
    commit = upstream.commit({"new": "line\n"})
    done(a, "POST", "/v1/mirrors/owner__name/sync")
    fresh = next(p for p in (tmp_path / "store").rglob("*.pack") if p not in kept)
    whole = fresh.read_bytes()
    fresh.write_bytes(whole[: len(whole) // 2])
    os.kill(b.pid, signal.SIGCONT)
    eventually(lambda: "mirror.behind" in b.log, 40)
    assert refs(b) == before
    assert b.json("GET", "/v1/status")["fleet"]["behind"] == ["owner__name"]
    fresh.write_bytes(whole)
    eventually(lambda: commit in refs(b), 30)
    daemon_fleet.sound(b)


def test_a_manifest_that_is_gone_is_published_anew(
    fleet: Fleet, upstream: Upstream, tmp_path: Path
) -> None:
    a = fleet.make(_OWN)
    done(a, "POST", "/v1/mirrors/owner__name/sync")
    for path in (tmp_path / "store/mirrors").rglob("*"):
        if path.is_file():
            path.unlink()
    commit = upstream.commit({"new": "line\n"})
    done(a, "POST", "/v1/mirrors/owner__name/sync")
    b = fleet.make()
    assert checkout(b, mirror="owner/name", commit=commit)
    eventually(lambda: refs(a) == refs(b), 30)
    daemon_fleet.sound(b)


@pytest.mark.skipif(not FAKETIME.exists(), reason="needs libfaketime")
def test_clocks_that_differ_by_minutes_do_not_matter(fleet: Fleet, upstream: Upstream) -> None:
    early = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "-7m", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    early["NO_FAKE_STAT"] = "1"  # with other mtimes Python compiles every module again: 5 s
    a = fleet.make(_OWN, interval="3s", environment=early)
    b = fleet.make(_OWN, interval="3s", environment=early | {"FAKETIME": "+7m"})
    for node in (a, b):
        done(node, "POST", "/v1/mirrors/owner__name/sync")
        commit = upstream.commit({"new": f"{node.pid}\n"})
        eventually(lambda: any(commit in refs(it) for it in (a, b)))  # noqa: B023
    for node in (a, b):  # a moment later it is published, too
        eventually(partial(checkout, node, mirror="owner/name", commit=commit))
    assert "claim.lost" not in a.log + b.log


def test_a_storm_loses_nothing(fleet: Fleet, upstream: Upstream) -> None:
    """Four daemons, killed, paused and cut off at random moments while upstream moves on."""
    seed = int(os.environ.get("MIRRORD_SEED", "17"))
    chance = random.Random(seed)
    nodes = [fleet.make(_OWN, interval="2s") for _ in range(4)]
    done(nodes[0], "POST", "/v1/mirrors/owner__name/sync")
    base = upstream.git("rev-parse", "HEAD~2")
    done(nodes[1], "POST", "/v1/datasets?name=d&filename=d.jsonl", rows(base))
    stop, seen, pinned = threading.Event(), [newest(fleet)], {base}

    def watch() -> None:
        while not stop.wait(0.1):
            if fleet.server.is_up:
                with suppress(psycopg.OperationalError):  # it is stopped meanwhile
                    seen.append(newest(fleet))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        deadline = time.monotonic() + float(os.environ.get("MIRRORD_STORM_S", "8"))
        while time.monotonic() < deadline:
            if chance.random() < 0.3:
                upstream.git("reset", "--quiet", "--hard", "HEAD~1")
            commit = upstream.commit({"file": f"{chance.random()}\n"})
            _break_one(chance, fleet, nodes)
            _start_again(nodes)
            time.sleep(chance.uniform(0.2, 2))
            node = chance.choice(nodes)
            try:
                if (
                    node.request("POST", "/v1/pins", {"mirror": "owner/name", "commit": commit})[0]
                    == 201
                ):
                    pinned.add(commit)
            except OSError:
                pass
    finally:
        stop.set()
        watcher.join()
    for node in nodes:
        eventually(partial(_is_open, node))
    assert seen == sorted(seen), f"a generation went backwards, seed {seed}"
    commit = upstream.commit({"file": "the last one\n"})
    done(nodes[0], "POST", "/v1/mirrors/owner__name/sync")
    for node in nodes:
        assert checkout(node, mirror="owner/name", commit=commit)
        have(commit, node)
        for oid in pinned:
            have(f"/{oid}", node)
        daemon_fleet.sound(node)
    audit = done(nodes[2], "POST", "/v1/audits", {"mirrors": ["owner/name"], "level": "closure"})
    assert audit["open_count"] == 0, audit


def _start_again(nodes: list[Daemon]) -> None:
    """Those that were killed, or that began while the database was away, as systemd would."""
    for node in nodes:
        if node.process is None or node.process.poll() is not None:
            node.start(wait=False)


def _is_open(node: Daemon) -> bool:
    """It may end once more: it began while the database was away, and is slow to say so."""
    _start_again([node])
    return node.is_open()


def _break_one(chance: random.Random, fleet: Fleet, nodes: list[Daemon]) -> None:
    node = chance.choice(nodes)
    match chance.choice(["kill", "kill", "pause", "database", "nothing"]):
        case "kill":
            node.kill()
        case "pause":
            os.kill(node.pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0.5, 4))
            os.kill(node.pid, signal.SIGCONT)
        case "database":
            fleet.server.is_up = False
            fleet.server.stop()
            time.sleep(chance.uniform(0.2, 3))
            fleet.server.start()
            fleet.server.is_up = True
