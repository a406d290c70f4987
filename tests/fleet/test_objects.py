"""The object store, on a directory."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import s3

from mirrord.errors import InvalidUrlError, ResourceError, StoreDamagedError, StoreUnavailableError
from mirrord.fleet import objects
from mirrord.fleet.objects import Blob, ObjectStore


def test_the_library_is_loaded_only_where_a_store_is_used() -> None:
    """It is an extra: without it, everything else of the program works."""
    parts = "cli.main, mirrord.daemon.main, mirrord.doctor, mirrord.doctor.installer"
    code = f"import sys, mirrord.{parts}; sys.exit('obstore' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def blob(content: bytes) -> Blob:
    return Blob(hashlib.sha256(content).hexdigest(), len(content))


@s3.OF_EACH_KIND
def test_what_is_there_is_never_written_again(store: ObjectStore, tmp_path: Path) -> None:
    assert store.put("a/b", b"first")
    assert not store.put("a/b", b"second")
    assert store.get("a/b", limit_bytes=5) == b"first"
    (tmp_path / "file").write_bytes(b"third")
    assert not store.put_file("a/b", tmp_path / "file")
    assert store.put_file("a/c", tmp_path / "file")
    assert sorted(it.key for it in store.iterate("a/")) == ["a/b", "a/c"]
    assert [it.size_bytes for it in store.iterate("a/")] == [5, 5]
    store.delete(["a/b", "a/b", "never"])
    assert store.get("a/b", limit_bytes=5) is None
    assert list(store.iterate("nothing/")) == []


def test_a_directory_is_private(tmp_path: Path) -> None:
    ObjectStore(f"file://{tmp_path}/with%20blank").put("a", b"")
    assert (tmp_path / "with blank").stat().st_mode & 0o777 == 0o700


@s3.OF_EACH_KIND
def test_a_large_file_goes_in_parts_and_once(store: ObjectStore, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 65
    (tmp_path / "large").write_bytes(content)
    assert store.put_file("large", tmp_path / "large")
    assert not store.put_file("large", tmp_path / "large")
    store.download("large", tmp_path / "back", blob(content))
    assert (tmp_path / "back").read_bytes() == content


@s3.OF_EACH_KIND
def test_other_bytes_are_never_left_behind(store: ObjectStore, tmp_path: Path) -> None:
    store.put("a", b"content")
    for wrong in (blob(b"Content"), blob(b"conten"), blob(b"contents")):
        with pytest.raises(StoreDamagedError, match="checksum or size mismatch"):
            store.download("a", tmp_path / "a", wrong)
        assert not (tmp_path / "a").exists()
    with pytest.raises(StoreDamagedError, match="gone"):
        store.download("b", tmp_path / "b", blob(b""))
    with pytest.raises(StoreDamagedError, match="allowed"):
        store.get("a", limit_bytes=6)


@s3.OF_EACH_KIND
def test_a_store_is_tried_and_left_as_it_was(store: ObjectStore) -> None:
    store.check()
    assert list(store.iterate("checks/")) == []


@pytest.mark.parametrize("url", ["s4://bucket", "gs:///"])
def test_an_url_of_no_store_is_refused(url: str) -> None:
    with pytest.raises((InvalidUrlError, ResourceError)):
        ObjectStore(url).check()


class Careless(BaseHTTPRequestHandler):
    """An S3 that keeps what it is sent, and has not heard of conditions."""

    protocol_version = "HTTP/1.1"
    kept: ClassVar[dict[str, bytes]] = {}

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", '"1"')
        self.send_header("last-modified", "Mon, 23 Nov 2026 09:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.kept[self.path] = self.rfile.read(int(self.headers["content-length"]))
        self._answer(200)

    def do_GET(self) -> None:
        self._answer(200, self.kept[self.path])

    def do_POST(self) -> None:  # DeleteObjects
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(200, b"<DeleteResult></DeleteResult>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Careless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    yield "s3://bucket/prefix"
    server.shutdown()
    server.server_close()


def test_a_store_that_ignores_conditions_is_refused(careless: str) -> None:
    with pytest.raises(ResourceError, match="ignores conditional writes"):
        ObjectStore(careless).check()


def test_a_store_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(StoreUnavailableError, match="s3://bucket"):
        ObjectStore("s3://bucket").put("a", b"")


def test_a_store_that_accepts_and_never_answers_is_told_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(objects._CLIENT, "read_timeout", "2s")
    monkeypatch.setitem(objects._OPTIONS["retry_config"], "max_retries", 0)
    monkeypatch.setattr(objects, "_SILENT_S", 0.1)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        store = ObjectStore("s3://bucket")
        assert not store.is_silent()
        putting = threads.submit(store.put, "a", b"")
        while not store.is_silent():
            assert not putting.done()
            time.sleep(0.01)
        with pytest.raises(StoreUnavailableError):
            putting.result()
        assert not store.is_silent()
