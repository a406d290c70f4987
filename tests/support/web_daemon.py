"""A daemon with a page, and plain HTTP to it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from daemons import Daemon, daemon, parse_response
from gitrepos import Upstream, git
from ports import free_port
from waiting import until

from mirrord import Client, ReportKind
from mirrord.errors import UpstreamError
from mirrord.protocol import AddReport

Answer = tuple[int, dict[str, str], bytes]


def exchange(port: int, raw: bytes, host: str = "127.0.0.1") -> bytes:
    """Send bytes, and read until the daemon hangs up."""
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.sendall(raw)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def ask(port: int, path: str, method: str = "GET", host: str | None = None, **more: str) -> Answer:
    """Status, headers in lower case, body."""
    fields = {"host": host or f"127.0.0.1:{port}", "connection": "close", **more}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return parse_response(exchange(port, f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()))


def page(port: int, path: str) -> str:
    status, _, body = ask(port, path)
    assert status == 200, (path, status, body)
    return body.decode()


def walk(port: int) -> dict[str, str]:
    """Every page that links lead to, by path and query; each list with its first link alone."""
    found: dict[str, str] = {}
    left = ["/"]
    while left:
        path = left.pop()
        if path in found:
            continue
        found[path] = page(port, path)
        links = re.findall(r'href="(/[^"#]*)"', found[path])
        left += [link.replace("&amp;", "&") for link in links if "renew=" not in link]
    return found


@contextmanager
def page_daemon(text: str = "", web: str = "") -> Iterator[tuple[Daemon, int]]:
    """A daemon that serves its page at a port of localhost."""
    port = free_port()
    listen = f'[web]\nlisten = "127.0.0.1:{port}"\n{web}'
    with daemon(f"{text}{listen}") as running:
        yield running, port


SCRIPT = "<script>document.title='taken'</script>"
IMAGE = "<img src=x onerror=alert(1)>\u202e"


REPORT = AddReport(
    kind=ReportKind.REHEARSAL, dataset="rows", duration_s=90.0, total=5,
    results={"ready": 2, "failed": 2}, mirrors={"o/r": {"ready": 2}, SCRIPT: {"failed": 2}},
    faults={"o__r-lost": "checkout", f"o__r-{SCRIPT}": "@patch", "o__r-forgotten": "seal"},
)  # fmt: skip

GRADING = AddReport(
    kind=ReportKind.GRADING, total=3, results={"prepared": 2, "refused": 1},
    mirrors={"o__r": {"prepared": 2}}, faults={"o__r-8": "refused"},
)  # fmt: skip


class World(NamedTuple):
    daemon: Daemon
    port: int
    base: str


@contextmanager
def furnished(root: Path) -> Iterator[World]:
    """A daemon with something on every page, much of it named by somebody hostile."""
    upstream = Upstream(root / "o" / "r")
    base = upstream.history(3)[1]
    git(upstream.path, "branch", "-m", "main", SCRIPT.replace(" ", ""))
    text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'
    rows = [
        {"instance_id": f"o__r-{SCRIPT}", "repo": "o/r", "base_commit": base},
        *({"instance_id": f"o__r-{n}", "repo": "o/r", "base_commit": base} for n in range(120)),
        {"instance_id": "o__r-lost", "repo": "o/r", "base_commit": "1" * 40},
        {"instance_id": f"o__absent-{IMAGE[:-1]}", "repo": "o/absent", "base_commit": "2" * 40},
        {"instance_id": "o__r-bad", "repo": "o/r", "base_commit": f"{SCRIPT}: no revision"},
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with page_daemon(text) as (running, port), Client(running.socket) as client:
        client.wait(client.import_dataset(root / "rows.jsonl", name="rows"))
        with suppress(UpstreamError):
            client.wait(client.add_mirror("o/never"))
        client.wait(client.start_audit())
        (running.state_dir / "datasets" / f"{IMAGE}.jsonl").write_text("no row\n")
        until(lambda: any("cannot import" in text for text in client.health().reasons))
        client.add_report(GRADING)
        client.add_report(REPORT)
        held = client.checkout("o__r-7")
        yield World(running, port, base)
        held.release()
