"""Odd values in every path parameter and query of the socket and of the web page; a sync that meets what nobody expected."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon
from gitrepos import Upstream
from waiting import until
from web_daemon import ask, page, page_daemon

from mirrord import Client
from mirrord.api.table import ENDPOINTS, Endpoint
from mirrord.errors import InternalError
from mirrord.web.pages import ROUTES

pytestmark = [pytest.mark.slow, pytest.mark.root]

VALUES = [
    "a%20b", "%00", "%ff", "caf%e9", "..%2f..%2fetc", "%2e%2e", "%E2%80%A8", "%ED%A0%80", "%F0%9F%98%80", "%0a%0d", "%22", "'", "%25",
    "-", "--help", "%7e", "a__b", "a" * 300, "%e9" * 300, "*", "%5c", "1e9", "refs%2fheads%2fmain", "@", "o__r@main",
]  # fmt: skip
QUERIES = [
    "page=%00", "page=-1", "page=1e9", "find=%ff", "find=%00", "find=%ED%A0%80", "state=%22",
    "mirror=a%20b", "renew=%0a", "a" * 900,
]  # fmt: skip
WITH_PARAMETERS = [each for each in ENDPOINTS if each.parameters]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, int]]:
    root = tmp_path_factory.mktemp("odd")
    Upstream(root / "o__r").commit({"a": "1\n"})
    with page_daemon(f'[upstream]\nurl = "file://{root}/{{owner}}__{{name}}"\n') as made:
        yield made


@pytest.mark.parametrize("endpoint", WITH_PARAMETERS, ids=lambda each: each.name)
def test_no_value_of_a_path_is_a_bug(served: tuple[Daemon, int], endpoint: Endpoint) -> None:
    """Each gets an error that the document has at that endpoint; the daemon's request checks that."""
    daemon, _ = served
    for value in VALUES:
        path = re.sub(r"\{\w+\}", value, endpoint.path)
        status, _, body = daemon.request(endpoint.method, path, {} if endpoint.json_body else None)
        assert status < 500 or status in (501, 503), (endpoint.method, path, body)
        if body.startswith(b"{"):
            json.dumps(json.loads(body.decode()), ensure_ascii=False).encode()
    assert "request.crashed" not in daemon.log


def test_no_path_of_the_page_is_a_bug(served: tuple[Daemon, int]) -> None:
    daemon, port = served
    for route in ROUTES:
        pattern = route.pattern.pattern
        for value in VALUES if "(" in pattern else [""]:
            path = re.sub(r"\(.*\)", value, pattern)
            status, _, body = ask(port, path)
            assert status in (200, 404), (path, body)
            body.decode()
        for query in QUERIES:
            path = f"{re.sub(r'[(].*[)]', 'x', pattern)}?{query}"
            assert ask(port, path)[0] in (200, 404), path
    assert "page.crashed" not in daemon.log


def test_an_unexpected_error_of_a_sync_stands_on_the_mirror(served: tuple[Daemon, int]) -> None:
    """On its row, in health, in the list and on the page; the next good sync removes it."""
    daemon, port = served
    with Client(str(daemon.socket)) as client:
        client.wait(client.add_mirror("o/r"))
        before = client.get_mirror("o__r")
        assert before.state == "ready"
        journal = Path(daemon.state_dir, "mirrors/o__r/mirrord-transaction")
        journal.mkdir()  # as a heavy hand may; nothing expects a directory there
        with pytest.raises(InternalError):
            client.wait(client.sync_mirror("o__r"))
        after = client.get_mirror("o__r")
        assert after.error is not None
        assert (after.state, after.error.code) == ("failed", "internal")
        assert after.attempted_at and before.attempted_at
        assert after.attempted_at > before.attempted_at
        assert after.synced_at == before.synced_at
        until(lambda: any("o__r: an unexpected" in each for each in client.health().reasons))
        assert client.status().mirrors[0].state == "failed"
        assert any(each.name == "mirror.failed" for each in client.events(after="0", follow=False))
        assert "last tried" in page(port, "/mirrors/o__r")
        journal.rmdir()
        client.wait(client.sync_mirror("o__r"))
        assert client.get_mirror("o__r").state == "ready"
        until(lambda: not any("unexpected" in each for each in client.health().reasons))
