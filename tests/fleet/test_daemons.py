"""Several daemons on one PostgreSQL and one store: what one has, all have."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import postgresql
import pytest
from daemon_fleet import Fleet, become_like, done, ended, eventually, have, refs, rows, well_ended
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from ports import free_port
from waiting import BOUND_S

pytestmark = pytest.mark.slow


def test_a_second_daemon_serves_what_the_first_one_mirrored(
    fleet: Fleet, upstream: Upstream
) -> None:
    a, b = fleet.make(), fleet.make()
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    commit = upstream.git("rev-parse", "HEAD~2")
    done(a, "POST", "/v1/datasets?name=d&filename=d.jsonl", rows(commit))
    gone = upstream.path.rename(upstream.path.with_name("gone"))  # the forge is not asked any more
    eventually(lambda: b.get("/v1/instances/i-0")[0] == 200)
    stranger = upstream.path.with_name("stranger")
    git(gone, "init", "--quiet", "--bare", "--initial-branch=main", str(stranger))
    git(gone, "push", "--quiet", str(stranger), f"{commit}~1:refs/heads/main")
    set_url = ("POST", "/v1/mirrors/owner__name/url")
    refused = ended(b, *set_url, {"url": f"file://{stranger}"})  # which has nothing on its disk
    assert refused["error"]["code"] == "upstream-loss", refused
    assert refused["error"]["lacking"] == [commit]
    done(b, *set_url, {"url": f"file://{gone}"})
    gone.rename(gone.with_name("gone for good"))
    assert a.json("GET", "/v1/mirrors/owner__name")["url"] == f"file://{gone}"
    status, _, body = b.request("POST", "/v1/checkouts", {"instance": "i-0"})
    assert status == 201, body
    eventually(lambda: refs(b) == refs(a))
    assert "refs/mirrord/pins/dataset/d" in refs(b)
    known = b.json("GET", "/v1/status")["fleet"]
    assert len(known["nodes"]) == 2
    assert known["behind"] == []


def test_a_sync_on_one_daemon_moves_the_refs_of_all(fleet: Fleet, upstream: Upstream) -> None:
    nodes = [fleet.make() for _ in range(4)]
    done(nodes[0], "POST", "/v1/mirrors", {"repo": "owner/name"})
    for node in nodes[1:]:  # it comes when somebody asks for it
        body = {"mirror": "owner/name", "commit": "main"}
        assert node.request("POST", "/v1/checkouts", body)[0] == 201
    first = refs(nodes[0])
    assert {refs(node) for node in nodes} == {first}
    upstream.git("reset", "--quiet", "--hard", "HEAD~2")
    newest = upstream.commit({"new": "line\n"})
    done(nodes[2], "POST", "/v1/mirrors/owner__name/sync")
    assert newest in refs(nodes[2])
    become_like(nodes[2], *nodes)
    # syncs at the same time ask the forge twice at most
    newest = upstream.commit({"newer": "line\n"})
    started = [node.json("POST", "/v1/mirrors/owner__name/sync") for node in nodes]
    results = [well_ended(node, it) for node, it in zip(nodes, started, strict=True)]
    assert all(newest in refs(node) for node in nodes)
    asked = [it for it in results if it["summary"] != "another daemon synced it"]
    assert len(asked) <= 2, results


def test_what_is_due_is_synced_by_one_of_them(fleet: Fleet, upstream: Upstream) -> None:
    nodes = [fleet.make(interval="3s") for _ in range(2)]
    done(nodes[0], "POST", "/v1/mirrors", {"repo": "owner/name"})
    newest = upstream.commit({"new": "line\n"})
    eventually(lambda: any(newest in refs(node) for node in nodes))
    row = fleet.server.execute_in(fleet.catalog, "SELECT ref_count, error FROM mirrors")
    assert len(row) == 1


def test_an_upstream_that_does_not_answer_keeps_no_other_mirror_waiting(
    fleet: Fleet, upstream: Upstream
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/one"
        mirrors = (
            f'[[mirror]]\nrepo = "owner/name"\n[[mirror]]\nrepo = "silent/one"\nurl = "{url}"\n'
        )
        one = fleet.make(mirrors, interval="1s")
        with silent.accept()[0]:  # it was asked, and its round goes on
            have(upstream.commit({"new": "line\n"}), one)


def test_who_asks_for_a_sync_does_not_wait_for_the_longest_of_a_round(
    fleet: Fleet, upstream: Upstream
) -> None:
    one = fleet.make()
    done(one, "POST", "/v1/mirrors", {"repo": "owner/name"})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/one"
        add = {"repo": "silent/one", "url": url}
        other = fleet.make()
        assert other.request("POST", "/v1/mirrors", add)[0] == 202
        with silent.accept()[0] as asked:
            asked.sendall(b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n")
        for node in fleet.nodes:
            node.stop()
        fleet.server.execute_in(fleet.catalog, "UPDATE claims SET due_ms = 0, failures = 0")
        one.start()
        with silent.accept()[0]:  # in one round with the other mirror, which has nothing new
            other.start()
            began = "SELECT 1 FROM claims WHERE key = 'mirror/owner__name' AND node IS NOT NULL"
            assert fleet.server.execute_in(fleet.catalog, began)
            done(other, "POST", "/v1/mirrors/owner__name/sync", bound_s=40)


def test_a_pin_its_end_and_that_of_the_mirror_reach_every_daemon(
    fleet: Fleet, upstream: Upstream
) -> None:
    a, b = fleet.make(), fleet.make()
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    assert b.request("POST", "/v1/checkouts", {"mirror": "owner/name", "commit": "main"})[0] == 201
    # no ref leads to it any more: only the pin keeps it, and only its publication brings it
    commit = upstream.commit({"left": "behind\n"})
    done(a, "POST", "/v1/mirrors/owner__name/sync")
    paper = {"mirror": "owner/name", "commit": commit, "reason": "paper"}
    assert a.request("POST", "/v1/pins", paper)[0] == 201
    ref = f"refs/mirrord/pins/person/0/{commit}"
    eventually(lambda: ref in refs(b))
    assert b.request("DELETE", f"/v1/pins/owner__name/{commit}")[0] == 204
    assert ref not in refs(b)
    eventually(lambda: ref not in refs(a))
    made = b.json("POST", "/v1/checkouts", {"mirror": "owner/name", "commit": "main"})
    assert b.request("DELETE", f"/v1/checkouts/{made['id']}")[0] == 204
    assert a.request("DELETE", "/v1/mirrors/owner__name")[0] == 204
    eventually(lambda: not (b.state_dir / "mirrors/owner__name").exists())
    assert b.json("GET", "/v1/mirrors") == []
    # and continues from what is published should it be added again
    kept = upstream.git("rev-parse", "HEAD")
    upstream.git("reset", "--quiet", "--hard", "HEAD~1")
    done(b, "POST", "/v1/mirrors", {"repo": "owner/name"})
    tips = git(b.state_dir / "mirrors/owner__name", "for-each-ref", "refs/mirrord/kept")
    assert kept in tips


def test_any_page_shows_the_whole_fleet(fleet: Fleet, upstream: Upstream) -> None:
    port = free_port()
    a, b = fleet.make(), fleet.make(f'[web]\nlisten = "127.0.0.1:{port}"\n')
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    audit = done(a, "POST", "/v1/audits", {"mirrors": ["owner/name"]})
    reports = [
        a.json("POST", "/v1/reports", {"kind": kind, "total": 3, "results": {"failed": 3}})
        for kind in ("rehearsal", "grading")
    ]
    done(a, "POST", "/v1/datasets?name=d&filename=d.jsonl", rows(upstream.git("rev-parse", "HEAD")))
    held = a.json("POST", "/v1/checkouts", {"instance": "i-0"})
    receipt = a.get(f"/v1/checkouts/{held['id']}/receipt")[2]
    other = upstream.git("rev-parse", "HEAD~1")
    unlisted = a.json("POST", "/v1/checkouts", {"mirror": "owner/name", "commit": other})
    a.get(f"/v1/checkouts/{unlisted['id']}/receipt")
    eventually(lambda: len(b.json("GET", "/v1/status")["fleet"]["nodes"]) == 2)

    def page(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return str(answer.read(), "utf-8")

    shown = page("/fleet")
    assert shown.count(a.json("GET", "/v1/status")["version"]) >= 2
    assert "(this one)" in shown
    assert "owner__name" in page("/mirrors")
    assert audit["id"] in page("/audits")
    assert all(each["id"] in page("/reports") for each in reports)
    assert "Failed" in page(f"/reports/{reports[1]['id']}")
    assert page("/receipts").count(socket.gethostname()) >= 2
    issued = page(f"/receipts/{hashlib.sha256(receipt).hexdigest()}")
    identity = (a.state_dir / "node").read_text().strip()
    assert all(it in issued for it in (identity, "i-0", upstream.git("rev-parse", "HEAD")))
    assert "(this one)" not in page("/receipts")
    paths = re.findall(r"/receipts/[0-9a-f]{64}", page("/receipts"))
    assert other not in "".join(page(path) for path in paths)
    words = ["--config", str(b.config), "status", "--all"]
    listed = subprocess.run(
        [sys.executable, "-m", "mirrord", *words], check=True, capture_output=True, text=True
    ).stdout
    assert (a.state_dir / "node").read_text().strip() in listed


def test_a_receipt_is_issued_where_the_catalog_cannot_keep_it(
    fleet: Fleet, upstream: Upstream
) -> None:
    a = fleet.make()
    done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
    held = a.json("POST", "/v1/checkouts", {"mirror": "owner/name", "commit": "main"})
    full = "BEGIN RAISE EXCEPTION USING ERRCODE = '53100', MESSAGE = 'no space'; END"
    fleet.server.execute_in(
        fleet.catalog,
        f"CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $${full}$$;"
        "CREATE TRIGGER full_disk BEFORE INSERT ON receipts EXECUTE FUNCTION full_disk()",
    )
    status, _, body = a.get(f"/v1/checkouts/{held['id']}/receipt")
    assert (status, json.loads(body)["checkout"]) == (200, held["id"])
    assert "receipt.not_kept" in a.log


def test_a_catalog_without_a_store_has_one_daemon(server: postgresql.Server, fleet: Fleet) -> None:
    text = f'[catalog]\nurl = "{server.create()}"\n'
    with daemon(text) as first, daemon(text, start=False) as second:
        second.start(wait=False)
        assert second.process is not None
        assert second.process.wait(BOUND_S) == 5
        assert "[store] url" in second.log
        second.process = None
        assert first.get("/v1/health")[0] == 200


def test_a_daemon_that_cannot_reach_its_postgresql_ends_to_be_started_again(
    server: postgresql.Server, fleet: Fleet
) -> None:
    """`RestartPreventExitStatus=` of systemd's unit does not name the status.

    One that runs answers what it knows, and says what it does not.
    """
    a = fleet.make()
    a.json("GET", "/v1/status")
    assert "\nmirrord_instances " in _metrics(a)
    server.stop()
    try:
        reasons = a.json("GET", "/v1/status")["health"]["reasons"]
        assert [reason for reason in reasons if "mirrors and datasets are as of" in reason]
        assert a.json("GET", "/v1/usage")["partial"] == 1
        assert "\nmirrord_checkouts " in _metrics(a)
        assert "\nmirrord_instances " not in _metrics(a)
        a.stop()
        a.start(wait=False)
        assert a.process is not None
        assert a.process.wait(BOUND_S) == 7
    finally:
        server.start()
    a.process = None
    a.start()
    assert a.get("/v1/health")[0] == 200


def _metrics(one: Daemon) -> str:
    status, _, body = one.get("/metrics")
    assert status == 200
    return str(body, "utf-8")


def test_a_catalog_of_sqlite_may_have_a_store(tmp_path: Path, upstream: Upstream) -> None:
    text = f"""
[store]
url = "file://{tmp_path}/store"
[upstream]
url = "file://{upstream.path.parent}/{{owner}}+{{name}}"
"""
    with daemon(text) as one:
        done(one, "POST", "/v1/mirrors", {"repo": "owner/name"})
        done(
            one,
            "POST",
            "/v1/datasets?name=d&filename=d.jsonl",
            rows(upstream.git("rev-parse", "HEAD")),
        )
        generations = tmp_path / "store/mirrors/owner__name/generations"
        count = len(list(generations.iterdir()))
        assert count
        one.stop()
        one.start()
        done(one, "POST", "/v1/mirrors/owner__name/sync")
        known = one.json("GET", "/v1/status")["fleet"]
        assert known["generations"] == 1
        assert [it["id"] for it in known["nodes"]] in ([], [known["node"]])


def test_a_round_without_news_costs_few_statements(fleet: Fleet, upstream: Upstream) -> None:
    """Mirrors of one upstream; what is asked from one claim of them all to their release."""
    count = 30
    names = "".join(
        f'[[mirror]]\nrepo = "owner/n{number}"\nurl = "{upstream.url}"\n' for number in range(count)
    )
    fleet.server.record(fleet.catalog)
    one = fleet.make(names, interval="15s")
    synced = "SELECT count(*) FROM mirrors WHERE synced_at IS NOT NULL"
    eventually(lambda: fleet.server.execute_in(fleet.catalog, synced) == [(count,)], 90)
    store = sorted((fleet.store_path / "mirrors").rglob("*"))

    def rounds() -> list[int]:
        """How many statements each had."""
        asked = fleet.server.statements()
        batches = (n for n, it in enumerate(asked) if "is_batch=" in it and f"${count}" in it)
        ends = [n for n, it in enumerate(asked) if "due_ms=CASE" in it]
        return [
            min(end for end in ends if end > first) - first
            for first in batches
            if ends and ends[-1] > first
        ]

    found = eventually(rounds, 60)
    assert min(found) < 25, found
    assert sorted((fleet.store_path / "mirrors").rglob("*")) == store
    assert one.get("/v1/health")[0] == 200
