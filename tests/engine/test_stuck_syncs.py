"""Syncs that wait for an upstream which never answers end with what asked for them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from daemons import Daemon, daemon
from waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def stuck() -> Iterator[Daemon]:
    """A daemon with two connections to its upstream, which accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"git://127.0.0.1:{silent.getsockname()[1]}/{{owner}}/{{name}}"
        text = f'[upstream]\nurl = "{url}"\n[sync]\nconcurrency = 2\njitter = "0s"\n'
        with daemon(text) as made:
            yield made


def _rows(*repos: str) -> bytes:
    empty = {"patch": "", "test_patch": "", "base_commit": "1" * 40}
    lines = [json.dumps({"instance_id": repo, "repo": repo, **empty}) for repo in repos]
    return "\n".join(lines).encode() + b"\n"


def _syncing(one: Daemon) -> set[str]:
    operations = one.json("GET", "/v1/operations")
    return {it["subject"] for it in operations if it["state"] == "running"}


def _names(one: Daemon) -> list[str]:
    return [it["name"] for it in one.json("GET", "/v1/mirrors")]


def _import(one: Daemon, *repos: str) -> str:
    """The id of an import whose mirrors are all there, and being synced."""
    operation = one.json("POST", "/v1/datasets?name=d&filename=d.jsonl", _rows(*repos))
    until(lambda: {*_names(one)} >= {repo.replace("/", "__") for repo in repos})
    return str(operation["id"])


def test_a_cancelled_import_ends_the_syncs_that_only_it_asked_for(stuck: Daemon) -> None:
    stuck.request("POST", "/v1/mirrors", {"repo": "o/kept"})
    identity = _import(stuck, "o/kept", "o/new")
    status, _, body = stuck.request("DELETE", f"/v1/operations/{identity}")
    assert (status, json.loads(body)["state"]) == (200, "cancelled")
    assert _names(stuck) == ["o__kept"]
    assert _syncing(stuck) == {"o__kept"}
    stuck.request("POST", "/v1/reload")  # which reads the schedule's mirrors again
    runs = {it["name"] for it in stuck.json("GET", "/v1/status")["jobs"]}
    assert {name for name in runs if name.startswith("sync/")} == {"sync/o__kept"}


def test_the_schedule_syncs_no_mirror_that_an_import_has_just_added(stuck: Daemon) -> None:
    identity = _import(stuck, "o/new")
    stuck.request("POST", "/v1/reload")

    def job() -> Any:
        jobs = stuck.json("GET", "/v1/status")["jobs"]
        return next(it for it in jobs if it["name"] == "sync/o__new")

    until(lambda: job()["last_at"])
    assert _syncing(stuck) == {"d"}
    stuck.request("DELETE", f"/v1/operations/{identity}")
    assert _names(stuck) == []


def test_a_mirror_is_removed_while_its_syncs_wait(stuck: Daemon) -> None:
    """The first holds the mirror's lock; an import that needs the mirror goes on without."""
    stuck.request("POST", "/v1/mirrors", {"repo": "o/one"})
    identity = _import(stuck, "o/one", "o/two")
    assert stuck.request("DELETE", "/v1/mirrors/o__one")[0] == 204
    assert _names(stuck) == ["o__two"]
    assert _syncing(stuck) == {"d"}
    added = next(it for it in stuck.json("GET", "/v1/operations") if it["kind"] == "mirror.add")
    assert (added["state"], added["error"]["code"]) == ("failed", "conflict")
    assert stuck.request("DELETE", "/v1/mirrors/o__two")[0] == 204
    path = f"/v1/operations/{identity}"
    until(lambda: stuck.json("GET", path)["state"] != "running")
    ended = stuck.json("GET", path)
    assert ended["state"] == "done", ended
    assert ended["result"]["dataset"]["unpinned_count"] == 2


def test_a_mirror_that_is_needed_keeps_its_syncs(stuck: Daemon) -> None:
    identity = _import(stuck, "o/one")
    assert stuck.request("DELETE", "/v1/mirrors/o__one")[0] == 204
    until(lambda: stuck.json("GET", f"/v1/operations/{identity}")["state"] == "done")
    sync = stuck.json("POST", "/v1/mirrors", {"repo": "o/one"})
    status, _, body = stuck.request("DELETE", "/v1/mirrors/o__one")
    assert (status, json.loads(body)["used_by"]) == (409, ["dataset d records it"])
    assert stuck.json("GET", f"/v1/operations/{sync['id']}")["state"] == "running"
