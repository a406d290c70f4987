"""A fleet whose catalog is behind PgBouncer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pooler
import postgresql
import pytest
from daemon_fleet import Fleet, done, eventually, refs, rows, well_ended
from daemons import Daemon
from gitrepos import Upstream

pytestmark = pytest.mark.slow


def test_a_fleet_works_through_a_pooler_of_transactions(
    server: postgresql.Server, fleet: Fleet, upstream: Upstream
) -> None:
    """Its two connections serve more sessions, and none leaves a lock on one."""
    with pooler.pooling(server, "transaction", 2) as made:
        a, b = nodes = [fleet.make(catalog=made.url(fleet.catalog)) for _ in range(2)]
        done(a, "POST", "/v1/mirrors", {"repo": "owner/name"})
        commit = upstream.git("rev-parse", "HEAD~2")
        done(a, "POST", "/v1/datasets?name=d&filename=d.jsonl", rows(commit))
        eventually(lambda: b.get("/v1/instances/i-0")[0] == 200)
        with ThreadPoolExecutor(8) as pool:
            made_by = list(pool.map(_check_out, nodes * 4, range(8)))
        assert made_by == [201] * 8
        newest = upstream.commit({"new": "line\n"})
        # one of them asks the forge, under a lock of the catalog
        started = [node.json("POST", "/v1/mirrors/owner__name/sync") for node in nodes]
        for node, operation in zip(nodes, started, strict=True):
            well_ended(node, operation)
            eventually(partial(_has, node, newest))
        catalog = fleet.catalog.rpartition("/")[2]
        clients, servers = (
            [row for row in made.show(what) if row["database"] == catalog]
            for what in ("CLIENTS", "SERVERS")
        )
        assert len(servers) <= 2 < len(clients)
        query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        eventually(lambda: server.execute_in(fleet.catalog, query) == [(0,)], 20)
        made.stop()
        assert a.request("POST", "/v1/pins", _pin(newest))[0] == 503
        made.start()
        eventually(lambda: a.request("POST", "/v1/pins", _pin(newest))[0] == 201, 30)
        eventually(lambda: f"refs/mirrord/pins/person/0/{newest}" in refs(b))
        assert [node.json("GET", "/v1/health")["status"] for node in nodes] == ["ok", "ok"]


def _pin(commit: str) -> dict[str, str]:
    return {"mirror": "owner/name", "commit": commit, "reason": "paper"}


def _check_out(node: Daemon, _: int) -> int:
    body = {"mirror": "owner/name", "commit": "main"}
    return node.request("POST", "/v1/checkouts", body)[0]


def _has(node: Daemon, commit: str) -> bool:
    return commit in refs(node)
