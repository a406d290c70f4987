"""A real HTTP upstream for tests: Python's web server in front of `git http-backend`, with switches for what goes wrong."""

from __future__ import annotations

import base64
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gitrepos import ENV

Answer = tuple[int, dict[str, str], bytes]


class Forge:
    """Serves every repository below `root`. Set the switches at any time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.password: str | None = None
        self.user = "me"
        self.bearer: str | None = None
        self.authorizations: list[str] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.refusal: Answer | None = None  # of every request, while it is set
        self.redirect_to: str | None = None
        self.renamed: dict[str, str] = {}
        self.plain: dict[str, bytes] = {}  # files, as a web server without git has them
        self.delay_s = 0.0
        self.packs_cut = 0  # so many answers with a pack lose their second half
        self.packs_garbled = 0  # so many others have three bytes changed
        self.packs_emptied = 0  # so many others come without a byte
        self.speaks_v2 = True
        self.sent_bytes = 0
        self.requests: list[str] = []
        self.active = 0
        self.most_active = 0
        self.on_request: Callable[[], object] = lambda: None
        self.lock = threading.Lock()
        self.url = ""

    def respond(self, request: BaseHTTPRequestHandler) -> None:
        with self.lock:
            self.requests.append(request.path)
            self.authorizations.append(request.headers.get("Authorization", ""))
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        try:
            answer = self._answer(request)
        finally:
            with self.lock:
                self.active -= 1
        self.sent_bytes += len(answer[2])
        _send(request, *answer)

    def _answer(self, request: BaseHTTPRequestHandler) -> Answer:
        body = _body(request)
        self.on_request()
        time.sleep(self.delay_s)
        if self.refusal:
            return self.refusal
        if self.answers:
            return *self.answers.pop(0), b""
        if self.redirect_to and not request.path.startswith(self.redirect_to):
            return 301, {"Location": request.path.replace("/old.git", self.redirect_to)}, b""
        if self.plain:
            content = self.plain.get(request.path.partition("?")[0])
            return (200 if content else 404), {"Content-Type": "text/plain"}, content or b""
        for old, new in self.renamed.items():
            if request.path.startswith(old):
                return 301, {"Location": request.path.replace(old, new, 1)}, b""
        if self.password and request.headers.get("Authorization") != _basic(
            self.user, self.password
        ):
            return 401, {"WWW-Authenticate": 'Basic realm="forge"'}, b""
        if self.bearer and request.headers.get("Authorization") != f"Bearer {self.bearer}":
            return 401, {"WWW-Authenticate": 'Bearer realm="forge"'}, b""
        return self._run_backend(request, body)

    def _run_backend(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        # a client that takes this for its proxy asks with a whole URL
        path, _, query = re.sub(r"^http://[^/]*", "", request.path).partition("?")
        environment = {
            **ENV,
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": request.command,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": request.headers.get("Git-Protocol", "") if self.speaks_v2 else "",
            "REMOTE_ADDR": "127.0.0.1",
        }
        done = subprocess.run(
            ["git", "http-backend"], env=environment, input=body, capture_output=True, check=False
        )
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
        status = int(headers.pop("Status", "200").split()[0])
        if self.packs_cut and b"packfile\n" in content:
            self.packs_cut -= 1
            content = content[: len(content) // 2]
        elif self.packs_emptied and b"packfile\n" in content:
            self.packs_emptied -= 1
            content = b""
        elif self.packs_garbled and b"packfile\n" in content:
            self.packs_garbled -= 1
            start = content.index(b"PACK") + 16
            content = (
                content[:start]
                + bytes(it ^ 90 for it in content[start : start + 3])
                + content[start + 3 :]
            )
        return status, headers, content


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _body(request: BaseHTTPRequestHandler) -> bytes:
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    body = b""
    while size := int(request.rfile.readline(), 16):
        body += request.rfile.read(size)
        request.rfile.readline()
    request.rfile.readline()
    return body


def _send(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes
) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)


@contextmanager
def serving(root: Path, tls: ssl.SSLContext | None = None) -> Iterator[Forge]:
    """A forge on a free port of loopback; with `tls` at https://localhost."""
    forge = Forge(root)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            forge.respond(self)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def finish_request(self, request: Any, client_address: Any) -> None:
            """The handshake is the thread's: one that fails must not stop the others."""
            if tls is None:
                super().finish_request(request, client_address)
                return
            with suppress(OSError), tls.wrap_socket(request, server_side=True) as wrapped:
                super().finish_request(wrapped, client_address)

    with Server(("127.0.0.1", 0), Handler) as server:
        forge.url = f"http://127.0.0.1:{server.server_port}"
        if tls:
            forge.url = f"https://localhost:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield forge
        finally:
            server.shutdown()
            thread.join()
