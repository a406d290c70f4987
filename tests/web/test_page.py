"""The read-only web page: access and content."""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path

import anyio
import pytest
from daemons import Daemon, daemon, parse_response
from ports import free_port
from waiting import until
from web_daemon import IMAGE, SCRIPT, World, ask, exchange, furnished, page, page_daemon, walk

from mirrord.catalog import Catalog
from mirrord.web.figures import Point, chart
from mirrord.web.server import MAX_CONNECTIONS
from mirrord.web.views import public_upstream

pytestmark = pytest.mark.slow

_VOID = {"meta", "link", "input", "img", "br"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with furnished(tmp_path_factory.mktemp("web")) as made:
        yield made


class _Outline(HTMLParser):
    """Collects unclosed elements, all elements and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [str(value) for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# -- what is shown ---------------------------------------------------------------------------------


def test_every_page_is_sound_and_has_what_it_is_about(world: World) -> None:
    pages = walk(world.port)
    assert {path.partition("?")[0].split("/")[1] for path in pages} == {
        *(
            "",
            "mirrors",
            "datasets",
            "checkouts",
            "environments",
            "audits",
            "reports",
            "receipts",
            "activity",
        ),
        *("style.css", "icon.svg"),
    }
    for path, text in pages.items():
        if path not in {"/style.css", "/icon.svg"}:
            outline = _Outline()
            outline.feed(text)
            assert outline.open == [], path
            assert len(set(outline.ids)) == len(outline.ids), path
            assert {"main", "h1", "nav", "title"} <= outline.elements, path
    assert "upstream-not-found" in pages["/mirrors"]
    assert "121 of 123" in pages["/datasets"]
    assert "upstream lacks the base commit" in pages["/datasets/rows"]
    assert world.base[:12] in pages["/datasets/rows"]
    assert "o__r-7" in pages["/checkouts"]
    assert "2 findings" in pages["/audits"]
    assert {"Rehearsal of 5", "2 ready", "2 failed", "interrupted"} <= set(
        re.findall(r"Rehearsal of 5|2 ready|2 failed|interrupted", pages["/reports"])
    )


def test_a_report_names_mirrors_and_instances_that_there_are(world: World) -> None:
    """By their public ids; unknown ids could reveal a commit."""
    text = page(world.port, _reports(world)[0])
    assert re.findall(r'href="/mirrors/([^"]+)"', text) == ["o__r"]
    assert re.findall(r"<tr><td>(o__[^<]*)</td><td>([^<]*)</td>", text)[-1] == (
        "o__r-lost",
        "checkout",
    )
    assert "covers 4 of 5" in text and "&lt;script&gt;" in text
    assert "forgotten" not in text


def test_a_grading_names_no_instance(world: World) -> None:
    """An agent must not learn the result of its prediction."""
    text = page(world.port, _reports(world)[1])
    assert {"2 prepared", "Refused"} <= set(re.findall(r"2 prepared|Refused", text))
    assert "o__r-8" not in text


def _reports(world: World) -> list[str]:
    """The newest first."""
    return re.findall(r'href="(/reports/[^"]+)"', page(world.port, "/reports"))


def test_hostile_names_stay_text(world: World) -> None:
    """In names of instances, branches and files; characters that reorder text are escaped."""
    pages = walk(world.port)
    outline = _Outline()
    for path, text in pages.items():
        if path != "/icon.svg":
            outline.feed(text)
    assert "script" not in outline.elements
    assert not {name for name in outline.attributes if name.startswith("on") or name == "style"}
    told = "".join(pages.values())
    assert "&lt;script&gt;document.title" in told
    assert "&lt;img src=x onerror=alert(1)&gt;\\u202e" in told
    assert SCRIPT not in told and IMAGE not in told


def test_instances_are_found_by_state_mirror_and_name(world: World) -> None:
    def rows(query: str) -> list[str]:
        text = page(world.port, f"/datasets/rows?{query}")
        return re.findall(r"<tr><td>(o__[^<]*)</td>", text)

    assert len(rows("")) == len(rows("page=0")) == len(rows("page=x")) == 100
    assert len(rows("page=2")) == len(rows("page=99")) == 23
    assert rows("find=R-11") == ["o__r-11", *(f"o__r-11{n}" for n in range(10))]
    assert rows("state=not%20pinned&mirror=o__R") == ["o__r-lost"]
    assert rows("find=%25") == rows("state=no%20branch") == []


def test_two_thousand_mirrors_are_paged_with_problems_first() -> None:
    with daemon(start=False) as made:
        port = free_port()
        made.write_config(f'[sync]\ninterval = "0"\n[web]\nlisten = "127.0.0.1:{port}"\n')
        made.state_dir.mkdir(mode=0o711)
        anyio.run(_make_catalog, made.state_dir / "catalog.sqlite3")
        _put_mirrors(made.state_dir / "catalog.sqlite3")
        made.start()
        first = re.findall(r'href="/mirrors/(o__[^"]+)"', page(port, "/mirrors"))
        assert (len(first), first[:2]) == (100, ["o__m1234", "o__m0000"])
        last = re.findall(r'href="/mirrors/(o__[^"]+)"', page(port, "/mirrors?page=20"))
        assert last[-1] == "o__m1999"
        assert re.findall(r'href="/mirrors/(o__[^"]+)"', page(port, "/mirrors?find=O/M123")) == [
            "o__m1234", *(f"o__m123{n}" for n in (0, 1, 2, 3, 5, 6, 7, 8, 9)),
        ]  # fmt: skip


async def _make_catalog(path: Path) -> None:
    catalog = await Catalog.open(path)
    await catalog.close()


def _put_mirrors(path: Path) -> None:
    """In one transaction, because each waits for the disk."""
    failed = json.dumps({"code": "upstream-failed", "title": "", "detail": ""})
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "INSERT INTO mirrors (key, name, url, added_at, ref_faults, error)"
            " VALUES (?1, ?1, 'https://x.example/o', '2026-01-01 00:00:00', '[]', ?2)",
            [(f"o__m{n:04}", failed if n == 1234 else None) for n in range(2000)],
        )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:word@x.example/a/b.git?token=1", "x.example/a/b.git"),
        ("ssh://git@x.example:22/a/b", "x.example/a/b"),
        ("git@x.example:a/b.git", "x.example/a/b.git"),
        ("file:///home/me/b", "a path on this host"),
        ("/home/me:x/b", "a path on this host"),
    ],
)
def test_an_upstream_is_shown_without_user_query_and_path(url: str, shown: str) -> None:
    assert public_upstream(url) == shown


def test_a_plot_breaks_where_nothing_was_measured() -> None:
    at = [datetime(2026, 1, 1, hour, tzinfo=timezone.utc) for hour in range(6)]
    values = (0.001, 0.1, None, 0.01, None)
    points = [Point(time, value) for time, value in zip(at, values, strict=False)]
    drawn = chart("t", {"a": points}, at[5], str, log=True)
    assert drawn.lines[0].paths == ["0.0,100.0 200.0,0.0", "600.0,50.0 600.0,50.0"]
    assert drawn.summary == "a 0.01; highest 0.1, lowest 0.001"
    assert [tick.label for tick in drawn.hours] == ["00:00", "02:30", "05:00"]
    assert chart("t", {"a": []}, at[0], str).lines[0].paths == []


# -- who may ask for what --------------------------------------------------------------------------


def test_answers_are_for_reading_and_allow_nothing(world: World) -> None:
    for path in ("/", "/absent", "/style.css", "/metrics"):
        status, headers, body = ask(world.port, path)
        assert status == (404 if path == "/absent" else 200)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert {"set-cookie", "location"}.isdisjoint(headers)
        if path != "/metrics":  # which counts the processor's time
            without = ask(world.port, path, "HEAD")
            assert (without[0], without[2]) == (status, b"")
            assert without[1]["content-length"] == str(len(body))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_is_changed_from_here(world: World, method: str) -> None:
    for path in ("/", "/v1/reload", "/v1/checkouts"):
        status, headers, _ = ask(world.port, path, method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert ask(world.port, "/v1/status")[0] == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("127.0.0.1", 200), ("127.0.0.1:9", 200), ("localhost:8780", 200), ("LocalHost.", 200)),
        *(("evil.example", 421), ("127.0.0.1.evil.example", 421), ("[::1]:80", 421), ("", 421)),
        *(("127.1", 421), ("localhost@evil.example", 421), ("a, localhost", 421), ("[", 421)),
    ],
)
def test_a_request_must_name_a_host_of_ours(world: World, host: str, status: int) -> None:
    """Otherwise DNS rebinding lets other sites read the page."""
    request = f"GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
    assert parse_response(exchange(world.port, request))[0] == status


@pytest.mark.parametrize("lines", ["", "host: localhost\r\nhost: evil.example\r\n"])
def test_a_request_names_one_host(world: World, lines: str) -> None:
    request = f"GET / HTTP/1.1\r\n{lines}connection: close\r\n\r\n".encode()
    assert parse_response(exchange(world.port, request))[0] == 400


def test_prometheus_needs_no_socket(world: World) -> None:
    status, headers, body = ask(world.port, "/metrics")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/plain")
    assert b"\nmirrord_up 0.0\n" in body  # not all that is recorded can be served


# -- bounds ----------------------------------------------------------------------------------------


def test_idle_connections_keep_nobody_out(world: World) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 8):
            stack.enter_context(socket.create_connection(("127.0.0.1", world.port)))
        assert ask(world.port, "/")[0] == 200


def test_long_requests_are_refused_and_bodies_not_read(world: World) -> None:
    assert ask(world.port, f"/?{'x' * 1025}")[0] == 400
    assert ask(world.port, f"/?{'&a=1' * 20}")[0] == 400
    big = ask(world.port, "/", x="x" * 70_000)
    assert (big[0], big[1]["connection"]) == (400, "close")
    request = b"GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
    assert b"\r\nconnection: close" in exchange(world.port, request)


def test_many_who_look_at_once_see_the_same_page(world: World) -> None:
    """It is rendered once and cached for a second, and for ten times as long as that took."""
    path, began = "/activity?find=once", time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(lambda _: page(world.port, path), range(32)))
    assert len(set(texts)) <= 2 + time.monotonic() - began


# -- where it listens ------------------------------------------------------------------------------


def _reload(running: Daemon, listen: str, more: str = "", says: str = "") -> None:
    """Move the page and wait until health reports the warning or none; health is cached for a second."""
    running.write_config(f'[web]\nlisten = "{listen}"\n{more}')
    assert running.request("POST", "/v1/reload")[0] == 200

    def warnings() -> str:
        reasons = running.json("GET", "/v1/health")["reasons"]
        return " ".join(reason for reason in reasons if "web page" in reason)

    until(lambda: says in warnings() if says else warnings() == "")


def _is_served(port: int, host: str = "127.0.0.1") -> bool:
    try:
        name = f"[{host}]" if ":" in host else host
        request = f"GET / HTTP/1.1\r\nhost: {name}\r\nconnection: close\r\n\r\n".encode()
        return exchange(port, request, host).startswith(b"HTTP/1.1 200")
    except ConnectionRefusedError:
        return False


def test_the_page_moves_with_the_configuration() -> None:
    first, second = free_port(), free_port()
    with daemon() as running:
        assert not _is_served(first)
        _reload(running, f"127.0.0.1:{first}")
        assert _is_served(first)
        _reload(running, f"[::1]:{second}")
        assert _is_served(second, "::1") and not _is_served(first)
        _reload(running, "")
        assert not _is_served(second, "::1")


def test_another_address_of_the_same_port_takes_its_place() -> None:
    with page_daemon() as (running, port):
        _reload(running, f"0.0.0.0:{port}")
        assert _is_served(port) and _is_served(port, "127.0.0.2")
        _reload(running, f"127.0.0.1:{port}")
        assert _is_served(port) and not _is_served(port, "127.0.0.2")


def test_a_taken_address_is_a_warning_and_the_old_one_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, page_daemon() as (running, port):
        used = taken.getsockname()[1]
        taken_says = f"cannot listen at 127.0.0.1:{used}: address already in use; it is still"
        _reload(running, f"127.0.0.1:{used}", says=taken_says)
        assert _is_served(port)
        _reload(running, f"192.0.2.1:{port}", says="cannot assign requested address; it is still")
        assert _is_served(port)
        _reload(running, f"127.0.0.1:{port}")


def test_a_daemon_starts_without_the_page_that_it_cannot_serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f'[web]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n'
        with daemon(listen) as running:
            status, _, body = running.get("/v1/health")
            assert (status, b"web page cannot listen" in body) == (200, True)


def test_names_of_the_configuration_are_answered_to() -> None:
    with page_daemon(web='hosts = ["CI.example.com"]\n') as (running, port):
        assert ask(port, "/", host="ci.example.com:443")[0] == 200
        assert ask(port, "/", host="other.example.com")[0] == 421
        _reload(running, f"127.0.0.1:{port}", 'hosts = ["other.example.com"]\n')
        until(lambda: ask(port, "/", host="other.example.com")[0] == 200)
