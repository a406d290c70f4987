"""The few endpoints of the Hugging Face Hub that huggingface_hub calls, over real HTTP on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
LATER = "beef" + "0" * 36


@dataclass
class HubDataset:
    """One dataset: its files by commit, its branches, and the token that it needs."""

    files: Mapping[str, Mapping[str, bytes]]
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str | None = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.seen.append(f"{self.command} {path}")
        parts = path.removeprefix("/api").strip("/").split("/")
        dataset = self.server.datasets.get("/".join(parts[1:3]))
        allowed = dataset and (
            dataset.token is None or self.headers.get("authorization") == f"Bearer {dataset.token}"
        )
        if dataset is None or not allowed or len(parts) < 5:
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        commit = dataset.refs.get(parts[4], parts[4])
        files = dataset.files.get(commit)
        if files is None:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif parts[3] == "revision":
            value = {"id": "/".join(parts[1:3]), "sha": commit, "siblings": []}
            self._answer(200, json.dumps(value).encode(), {})
        elif parts[3] == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in files.items()
            ]
            self._answer(200, json.dumps(tree).encode(), {})
        else:
            data = files["/".join(parts[5:])]
            self._answer(200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit})

    def _answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, datasets: Mapping[str, HubDataset]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.datasets = datasets
        self.seen: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub(datasets: Mapping[str, HubDataset]) -> Iterator[Hub]:
    with Hub(datasets) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
