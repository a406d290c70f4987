"""`GET /v1/activity`: current activity."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from anyone import ask_as
from daemons import Daemon, daemon

from mirrord import Client
from mirrord.protocol import Activity

GROUP, MEMBER, STRANGER = 1, 34561, 34562


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with daemon(start=False) as made:
        made.write_config('[access]\ngroup = "daemon"\n')
        made.start()
        yield made


def test_requests_are_counted_by_endpoint(running: Daemon) -> None:
    """The running request does not count yet; totals count all requests."""
    with Client(running.socket) as client:
        before = client.activity().requests.requests
        for _ in range(3):
            client.health()
        found = client.activity()
    health = next(each for each in found.endpoints if each.endpoint == "health")
    assert health.requests >= 3
    assert health.failed <= health.requests - 3  # those before it had opened
    assert health.p50_s is not None and health.p99_s is not None and health.p50_s <= health.p99_s
    assert found.requests.requests == sum(each.requests for each in found.endpoints) >= before + 3
    assert 0 < found.window_s <= 65
    assert found.connections >= 1
    assert found.disk_bytes > found.disk_free_bytes > 0
    assert found.history == []


@pytest.mark.root
def test_others_see_their_own_part(running: Daemon) -> None:
    """A member sees its own rows; a stranger is refused."""
    with Client(running.socket) as client:
        operations = client.activity().operations
        assert operations == []
        client.health()
        assert {each.uid for each in client.activity().owners} == {0}
        (status, body), (refused, _) = (
            ask_as(uid, running.socket, ("GET", "activity?history=true", None), groups=groups)[0]
            for uid, groups in ((MEMBER, [GROUP]), (STRANGER, []))
        )
    found = Activity.from_json(json.loads(body))
    assert (status, refused) == (200, 403)
    assert {each.uid for each in found.owners} == {MEMBER}
