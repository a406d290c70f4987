"""A daemon with a mirror and a root file system for images; a registry of one image on loopback."""

from __future__ import annotations

import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import images
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import BOUND_S, until

from mirrord import Client
from mirrord.protocol import BuildReport


def long(number: int) -> str:
    """Return content that is not trivial, for a scan."""
    return f"the content of {number}\n" * 20


class Bench:
    """A daemon with a mirror of three commits, and images of the second."""

    def __init__(self, made: Daemon, place: Path) -> None:
        self.made = made
        self.place, self.layers = place, made.root / "state/templates/.environments/.layers"
        self.auth_file = made.root / "auth.json"
        self.auth_file.write_text('{"auths": {}}')
        self.upstream = Upstream(place / "r")
        self.base, self.future = [
            self.upstream.commit({"README": f"{number}\n", "lib/a": long(number), "gone": "x"})
            for number in range(2)
        ]
        self.client = Client(made.socket)
        operation = self.client.wait(self.client.add_mirror("o/r", url=self.upstream.url))
        assert operation.error is None
        self.root = images.root(place / "root")

    def imported(self, source: str, key: str) -> BuildReport:
        ended = self.client.wait(self.client.import_image(source, key=key))
        assert ended.result is not None, ended.error
        return BuildReport.from_json(ended.result)

    def remove(self, key: str) -> None:
        until(lambda: not self.client.get_environment(key).holders)  # of released checkouts
        self.client.remove_environment(key)

    def kept(self) -> set[str]:
        return {path.name for path in self.layers.iterdir() if not path.name.startswith(".trash")}


@contextmanager
def image_bench(place: Path) -> Iterator[Bench]:
    text = '[sync]\ninterval = "0"\n[audit]\ninterval = "0"\n[checkouts]\nprewarm = false\n'
    with daemon(start=False) as made:
        made.write_config(
            f'{text}[access]\ncommits = "any"\n'
            f'[environments]\nauth_file = "{made.root}/auth.json"\n'
        )
        made.start()
        found = Bench(made, place)
        yield found
        found.client.close()


@contextmanager
def static_registry(place: Path) -> Iterator[Registry]:
    """Serve an OCI layout as the repository `o/i`, of any tag."""
    serving = Registry(place)
    running = threading.Thread(target=serving.serve_forever, daemon=True)
    running.start()
    try:
        yield serving
    finally:
        serving.may_answer.set()
        serving.shutdown()
        serving.server_close()


class Registry(http.server.ThreadingHTTPServer):
    """`asked` counts the requests for each blob; one for `held` is answered once `may_answer`."""

    def __init__(self, place: Path) -> None:
        self.place, self.asked, self.held = place, Counter[str](), ""
        self.may_answer = threading.Event()
        super().__init__(("127.0.0.1", 0), _Serving)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Serving(http.server.BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        served, kind, name = self.server, *self.path.split("/")[-2:]
        blobs = served.place / "blobs/sha256"
        content, media = b"{}", "application/json"
        if kind == "manifests" and "/o/i/" in self.path:
            (entry,) = json.loads((served.place / "index.json").read_bytes())["manifests"]
            media = "application/vnd.oci.image.manifest.v1+json"
            content = (blobs / entry["digest"].removeprefix("sha256:")).read_bytes()
        elif kind == "blobs":
            digest = name.removeprefix("sha256:")
            served.asked[digest] += 1
            if digest == served.held:
                served.may_answer.wait(BOUND_S)
            content = (blobs / digest).read_bytes()
        elif kind == "manifests":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass
