"""Attacks from outside of any checkout: on the page, by floods and full disks, by what administrators take in."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import socket
import stat
import subprocess
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from .scene import MEMBER, OWNER, SECRET, STRANGER, Scene, attack, must

_NO_PAGE = "there is no page"
_MIB = 1024**2


def _http(at: Scene, path: str, *, method: str = "GET", host: str = "") -> tuple[int, bytes]:
    address, _, port = at.settings["web"]["listen"].rpartition(":")
    head = f"{method} {path} HTTP/1.1\r\nhost: {host or address}\r\nconnection: close\r\n\r\n"
    with socket.create_connection((address.strip("[]"), int(port)), timeout=20) as connection:
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


@attack(STRANGER)
def the_page_is_asked_by_another_name(at: Scene) -> str:
    """As by a browser that another site's name led here."""
    if not at.settings["web"]["listen"]:
        return _NO_PAGE
    names = ("evil.example", "127.0.0.1.evil.example", "127.1", "2130706433", "localhost@x", "a,b")
    seen = {_http(at, path, host=name)[0] for name in names for path in ("/", "/metrics")}
    must(seen == {421}, f"answered {seen}")
    return f"421 to {len(names)} names"


@attack(STRANGER)
def the_page_is_written_to(at: Scene) -> str:
    if not at.settings["web"]["listen"]:
        return _NO_PAGE
    seen = Counter[int]()
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
        for path in ("/", "/v1/reload", f"/v1/checkouts/{at.victim['id']}", "/mirrors"):
            seen[_http(at, path, method=method)[0]] += 1
    routes = [path for method, path in at.routes if method == "GET" and "{" not in path]
    for path in routes:
        if path != "/metrics":
            seen[_http(at, path)[0]] += 1
    must(set(seen) <= {400, 404, 405}, f"{dict(seen)}")
    return str(dict(seen))


@attack(STRANGER)
def the_page_is_read_for_secrets(at: Scene) -> str:
    """Every page that links lead to."""
    if not at.settings["web"]["listen"]:
        return _NO_PAGE
    left, seen = ["/"], {""}
    secrets = (SECRET, str(at.state), str(at.config), at.victim["path"])
    while left:
        path = left.pop()
        text = _http(at, path)[1].decode()
        told = [word for word in secrets if word != "." and word in text]
        must(not told, f"{path} has {told}")
        seen.add(path)
        links = {link.replace("&amp;", "&") for link in re.findall(r'href="(/[^"#]*)"', text)}
        left += [link for link in links - seen if link not in left and "renew=" not in link]
    return f"nothing on {len(seen) - 1} pages"


@attack(STRANGER)
def the_page_is_kept_busy(at: Scene) -> str:
    """By three hundred connections that ask for nothing."""
    if not at.settings["web"]["listen"]:
        return _NO_PAGE
    address, _, port = at.settings["web"]["listen"].rpartition(":")
    with ExitStack() as held:
        for _ in range(300):
            held.enter_context(socket.create_connection((address.strip("[]"), int(port))))
        status = _http(at, "/")[0]
    must(status == 200, f"{status}")
    at.must_live()
    return "an idle connection makes room for the next"


@attack(MEMBER)
def requests_come_in_a_flood(at: Scene) -> str:
    """From 24 connections at once, while a stranger asks, too."""
    stop, seen = threading.Event(), Counter[int]()

    def flood() -> None:
        while not stop.is_set():
            seen[at.ask("GET", "/v1/mirrors")[0]] += 1

    threads = [threading.Thread(target=flood) for _ in range(24)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            at.must_live()
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    must(set(seen) <= {200, 429, 503}, f"{dict(seen)}")
    return f"{dict(seen)}; health was answered 20 times"


@attack(OWNER)
def the_disk_is_filled_with_snapshots(at: Scene) -> str:
    bound = re.fullmatch(r"(\d+)MiB", at.settings["access"]["bytes_per_user"])
    if not bound:
        return f"not tried: the bound is {at.settings['access']['bytes_per_user']}"
    (at.tree / "filling").write_bytes(os.urandom(int(bound[1]) * _MIB // 4))
    base = f"/v1/checkouts/{at.own['id']}/snapshots"
    made, status, answer = 0, 201, b""
    while status == 201 and made < 8:
        status, answer = at.ask("POST", base, {"name": f"filling{made}"})
        made += status == 201
    for number in range(made):
        at.ask("DELETE", f"{base}/filling{number}")
    must(status == 507, f"{made} were made: {status} {answer[:200]!r}")
    code: str = json.loads(answer)["code"]
    return f"507 {code} after {made}"


@attack(MEMBER)
def a_support_bundle_is_written(at: Scene) -> str:
    """And tells nothing of other people's checkouts."""
    with tempfile.TemporaryDirectory(prefix="redteam-") as place:
        file = Path(place, "bundle.tar.gz")
        words = [at.mirrord, "--socket", str(at.socket), "doctor", "--report", str(file)]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(words, env=environment, capture_output=True, timeout=35)
        if done.returncode:
            return f"none was written: {done.stderr.decode(errors='replace').strip()[:150]}"
        mode = stat.S_IMODE(file.stat().st_mode)
        must(mode == 0o600, f"its mode is {mode:o}")
        with tarfile.open(file) as archive:
            parts = [archive.extractfile(each) for each in archive]
            content = b"".join(part.read() for part in parts if part)
    told = [word for word in (SECRET, at.commit, at.victim["id"]) if word.encode() in content]
    must(not told, f"{told}")
    return f"nothing in {len(content):,} bytes of mode 0600"


# -- what administrators take in -------------------------------------------------------------------


@attack(0)
def an_upstream_has_an_option_for_a_url(at: Scene) -> str:
    canary = Path("/tmp/redteam-url-ran")
    urls = (
        f"--upload-pack=touch {canary}", f"ext::sh -c touch% {canary}", "-oProxyCommand=touch",
        f"ssh://-oProxyCommand=touch%20{canary}/x", f"fd::17/{canary}", "https://-x/y",
        "file:///etc/../proc/self/root\0", "https://h/\r\nx: y", "git://h:99999/x",
    )  # fmt: skip
    adds = (("POST", "/v1/mirrors", {"repo": "red/team-url", "url": url}) for url in urls)
    seen = at.refused(*adds)
    must(not canary.exists(), "it ran")
    return seen


@attack(0)
def an_upstream_offers_hostile_trees(at: Scene) -> str:
    """`.git`, `..`, `git~1`, `.gitmodules` as a link, a link and a directory of one name."""
    with tempfile.TemporaryDirectory(prefix="redteam-") as place, _serving(Path(place)) as url:
        hostile = _write_upstream(Path(place, "hostile"))
        ended = _add_mirror(at, f"{url}/hostile")
        try:
            must(ended["state"] == "done", f"{ended}")
            refused = set[str]()
            for branch in sorted(hostile):
                body = {"mirror": "red__team", "commit": branch, "owner": OWNER}
                status, answer = at.ask("POST", "/v1/checkouts", body)
                must(status >= 400, f"{branch}: {answer[:200]!r}")
                refused.add(f"{status} {json.loads(answer)['code']}")
            must(not any(code.startswith("5") for code in refused), f"{refused}")
            body = {"mirror": "red__team", "commit": "main", "owner": OWNER}
            status, answer = at.ask("POST", "/v1/checkouts", body)
            must(status == 201, f"main: {answer[:200]!r}")
            made = json.loads(answer)
            names = sorted(entry.name for entry in Path(made["path"]).iterdir())
            at.ask("DELETE", f"/v1/checkouts/{made['id']}")
            pins = json.loads(at.ask("GET", "/v1/pins?mirror=red__team")[1])
            must(not pins, f"planted: {pins}")
            must(names == [".git", "README", "module", "pointer"], f"{names}")
        finally:
            at.ask("DELETE", "/v1/mirrors/red__team")
    return f"{len(hostile)} branches cannot be checked out: {sorted(refused)}; main is served"


def _add_mirror(at: Scene, url: str) -> dict[str, Any]:
    status, answer = at.ask("POST", "/v1/mirrors", {"repo": "red/team", "url": url})
    must(status == 202, f"{status} {answer[:200]!r}")
    return _ended(at, json.loads(answer)["id"])


def _ended(at: Scene, identity: str) -> dict[str, Any]:
    while True:
        operation: dict[str, Any] = json.loads(at.ask("GET", f"/v1/operations/{identity}")[1])
        if operation["state"] not in {"queued", "running"}:
            return operation
        time.sleep(0.1)


@contextmanager
def _serving(place: Path) -> Iterator[str]:
    """git's own server of what is in a directory; nobody else on this host has that port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["git", "daemon", "--export-all", "--listen=127.0.0.1", f"--port={port}", "--reuseaddr"]
    server = subprocess.Popen([*words, f"--base-path={place}", place], stderr=subprocess.DEVNULL)
    try:
        yield f"git://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _git(place: Path, *words: str, stdin: bytes = b"") -> str:
    identity = {
        f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **identity}
    done = subprocess.run(
        ["git", "--git-dir", place, *words],
        env=environment,
        input=stdin,
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip()


def _write_upstream(place: Path) -> set[str]:
    """A repository with a good branch, and hostile ones; answers their names."""
    _git(place, "init", "--quiet", "--bare", "--initial-branch=main")

    def made(kind: str, raw: bytes) -> bytes:
        words = ("hash-object", "-t", kind, "-w", "--stdin", "--literally")
        return bytes.fromhex(_git(place, *words, stdin=raw))

    def branch(name: str, *entries: tuple[bytes, bytes, bytes]) -> None:
        raw = b"".join(mode + b" " + entry + b"\0" + oid for mode, entry, oid in entries)
        commit = _git(place, "commit-tree", "-m", name, made("tree", raw).hex())
        (place / "refs/heads" / name).write_text(f"{commit}\n")

    blob = made("blob", b"x\n")
    tree = made("tree", b"100644 config\0" + blob)
    pointer = made("blob", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    branch(
        "main", (b"100644", b"README", blob), (b"160000", b"module", b"\1" * 20),
        (b"100644", b"pointer", pointer),
    )  # fmt: skip
    names = {"dotgit": b".git", "upper": b".GIT", "dots": b"..", "short": b"git~1", "slash": b"a/b"}
    for name, entry in names.items():
        branch(name, (b"40000", entry, tree))
    branch("both", (b"120000", b"a", blob), (b"40000", b"a", tree))
    branch("link", (b"120000", b".gitmodules", blob))
    url = b'[submodule "x"]\n\tpath = s\n\turl = --upload-pack=touch\n'
    branch("option", (b"100644", b".gitmodules", made("blob", url)))
    (place / "refs/mirrord/pins").mkdir(parents=True)
    (place / "refs/mirrord/pins/planted").write_text((place / "refs/heads/main").read_text())
    return {*names, "both", "link", "option"}


@attack(0)
def a_dataset_is_a_bomb(at: Scene) -> str:
    """A GiB of zeros in a few MiB, endless nesting, names that lead out."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        for _ in range(1024):
            file.write(bytes(_MIB))
    row = {"instance_id": "../../x", "repo": "../../etc", "base_commit": "-x", "patch": ""}
    files = {
        "bomb.jsonl.gz": packed.getvalue(), "nested.json": b"[" * 100_000,
        "names.jsonl": json.dumps(row).encode(), "torn.parquet": b"PAR1" + bytes(100) + b"PAR1",
    }  # fmt: skip
    seen = set()
    for name, content in files.items():
        path = f"/v1/datasets?filename={name}&name=redteam"
        status, answer = at.ask("POST", path, raw=content)
        ended = json.loads(answer) if status != 202 else _ended(at, json.loads(answer)["id"])
        error = ended if status != 202 else ended["error"] or {}
        must(status < 500 and error, f"{name}: {status} {ended}")
        seen.add(error["code"])
    must(seen == {"invalid-dataset"}, f"{seen}")
    at.must_live()
    return f"{len(files)} files: {', '.join(seen)}"


@attack(0)
def a_bundle_is_garbage(at: Scene) -> str:
    """A header that plants refs, without a pack; names that lead out; nothing at all."""
    head = b"# v2 git bundle\n" + b"1" * 40 + b" refs/mirrord/pins/x\n"
    seen = set()
    for content in (
        b"",
        head,
        head + b"\n",
        head + b"\nPACK" + bytes(40),
        head.replace(b"refs", b".."),
    ):
        status, answer = at.ask("POST", "/v1/bundles", raw=content)
        ended = json.loads(answer)
        if status == 202:
            ended = _ended(at, ended["id"])["error"] or {}
        must(status < 500 and ended.get("code"), f"{status} {ended}")
        seen.add(ended["code"])
    return ", ".join(sorted(seen))


@attack(0)
def a_configuration_is_garbage(at: Scene) -> str:
    texts = (
        "\0",
        "[" * 5000,
        "max = 1e400",
        'state_dir = "relative"\n[x]\ny = 1',
        "a = " + "9" * 5000,
    )
    for text in texts:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(text)
            file.flush()
            words = [at.mirrord, "--config", file.name, "config", "check"]
            done = subprocess.run(words, capture_output=True, timeout=20)
        must(done.returncode == 2, f"{text[:30]!r}: {done.returncode} {done.stderr[-200:]!r}")
    return f"status 2, {len(texts)} times"


@attack(0)
def an_upstream_speaks_to_the_terminal(at: Scene) -> str:
    """And redirects to another host, which is to get no password; no answer shows that."""
    word, asked = "hunter22redteam", list[bytes]()
    says = b"ERR \x1b[31mred\x07\x1b]0;owned\x07"
    with _answering(lambda _: b"%04x%s" % (len(says) + 4, says)) as port:
        ended = _add_mirror(at, f"git://127.0.0.1:{port}/x")
        shown = at.ask("GET", "/v1/mirrors/red__team")[1] + json.dumps(ended).encode()
        at.ask("DELETE", "/v1/mirrors/red__team")
    must(ended["state"] == "failed" and b"\\u001b" not in shown, f"{ended}")

    def hear(request: bytes) -> bytes:
        asked.append(request)
        return b"HTTP/1.1 404 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

    with _answering(hear) as there:
        target = f"http://localhost:{there}/x/info/refs?service=git-upload-pack"
        answer = f"HTTP/1.1 302 x\r\nlocation: {target}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        with _answering(lambda _: answer.encode()) as here:
            ended = _add_mirror(at, f"http://me:{word}@127.0.0.1:{here}/x")
            paths = ("mirrors", "mirrors/red__team", "operations", "events?follow=false&after=0")
            shown = b"".join(at.ask("GET", f"/v1/{path}")[1] for path in paths)
            at.ask("DELETE", "/v1/mirrors/red__team")
    must(ended["state"] == "failed", f"{ended}")
    must(word.encode() not in shown, "the password is shown")
    must(
        not [each for each in asked if b"authorization" in each.lower()], "the password went there"
    )
    return f"no escapes; {ended['error']['code']}, {len(asked)} requests at the other host"


@contextmanager
def _answering(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """A server that answers the first bytes of each connection, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()
        listener.settimeout(0.1)

        def serve() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection, suppress(OSError):
                    connection.settimeout(10)
                    connection.sendall(answer(connection.recv(1 << 16)))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join()
