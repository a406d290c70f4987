"""Hostile upstreams against a real daemon: what enters a mirror, and what the daemon does."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from forge import serving
from gitrepos import Upstream, git
from waiting import until

from mirrord.git.errors import failure, retry_after_seconds
from mirrord.model import utc_now
from mirrord.telemetry import masked

pytestmark = [pytest.mark.root]

FILE, LINK, DIRECTORY, SUBMODULE = b"100644", b"120000", b"40000", b"160000"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 9\n" % (b"1" * 64)
ODD = b"\x1b[31mred\nline\xff\xe2\x80\xae"
Entry = tuple[bytes, bytes, bytes]


class Trees:
    """Writes trees that no git writes, each as the commit of a branch."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self._blobs = 0

    def _object(self, kind: str, raw: bytes) -> bytes:
        words = ("hash-object", "-t", kind, "-w", "--stdin", "--literally")
        return bytes.fromhex(self.upstream.git(*words, stdin=raw))

    def tree(self, *entries: Entry) -> bytes:
        return self._object(
            "tree", b"".join(mode + b" " + name + b"\0" + oid for mode, name, oid in entries)
        )

    def blob(self, data: bytes | None = None) -> bytes:
        self._blobs += 1
        return self._object("blob", b"%d\n" % self._blobs if data is None else data)

    def directory(self) -> bytes:
        return self.tree((FILE, b"config", self.blob()))

    def branch(self, name: str, *entries: Entry) -> None:
        commit = self.upstream.git("commit-tree", "-m", name, self.tree(*entries).hex())
        # a file of its own: git itself refuses some of the names
        (self.upstream.path / ".git/refs/heads" / name).write_text(f"{commit}\n")


def refused(trees: Trees) -> dict[str, list[Entry]]:
    """What git's fsck refuses: it is mirrored, and not checked out."""
    names = {
        "dotgit": b".git", "upper": b".GIT", "dotdot": b"..", "dot": b".", "short": b"git~1",
        "ignorable": ".g\u200cit".encode(), "stream": b".git::$INDEX_ALLOCATION", "slash": b"a/b",
    }  # fmt: skip
    made = {branch: [(DIRECTORY, name, trees.directory())] for branch, name in names.items()}
    twice = (LINK, b"a", trees.blob(b"/etc"))
    return {
        **made,
        "link-and-directory": [twice, (DIRECTORY, b"a", trees.directory())],
        "twice": [twice, twice],
        "unsorted": [(FILE, b"b", trees.blob()), (FILE, b"a", trees.blob())],
        "modules-link": [(LINK, b".gitmodules", trees.blob(b"/etc/passwd"))],
        "module-url": [(FILE, b".gitmodules", trees.blob(_module("x", "url = -u./payload")))],
        "module-path": [(FILE, b".gitmodules", trees.blob(_module("x", "path = -u./payload")))],
        "module-update": [(FILE, b".gitmodules", trees.blob(_module("y", "update = !id")))],
        "module-name": [(FILE, b".gitmodules", trees.blob(_module("../../x", "url = u")))],
    }


def confused(trees: Trees) -> dict[str, list[Entry]]:
    """What enters no mirror: a directory of main's, called a file; this branch alone is to blame."""
    return {
        "confused": [(FILE, b"a", bytes.fromhex(trees.upstream.git("rev-parse", "main:src")))],
    }


def _module(name: str, setting: str) -> bytes:
    return f'[submodule "{name}"]\n\tpath = s\n\turl = https://h/x\n\t{setting}\n'.encode()


def unservable(trees: Trees) -> dict[str, list[Entry]]:
    """What git takes, and no file system holds."""
    return {
        "device": [(b"20000", b"a", trees.blob())],
        "no-mode": [(b"0", b"a", trees.blob())],
        "long-name": [(FILE, b"n" * 300, trees.blob())],
        "link-to-nothing": [(LINK, b"a", trees.blob(b""))],
        "link-with-nul": [(LINK, b"a", trees.blob(b"a\0b"))],
        "link-too-long": [(LINK, b"a", trees.blob(b"x" * 5000))],
    }


def served(trees: Trees) -> dict[str, list[Entry]]:
    """What is odd and harmless."""
    filters = trees.blob(b"* filter=lfs diff=lfs merge=lfs working-tree-encoding=lfs\n")
    return {
        "pointer": [(FILE, b".gitattributes", filters), (FILE, b"a", trees.blob(POINTER))],
        "odd-name": [(FILE, ODD, trees.blob())],
        "set-uid": [(b"104755", b"a", trees.blob())],
        "submodule": [(SUBMODULE, b"-u", b"\1" * 20)],
        "rules-link": [(LINK, b".gitattributes", trees.blob(b"/etc/passwd"))],
        "\x9b31m\u202eref": [(FILE, b"a", trees.blob())],
    }


def add(running: Daemon, url: str, repo: str = "up/stream") -> dict[str, Any]:
    """Add a mirror, and wait for its first sync."""
    asked = running.json("POST", "/v1/mirrors", {"repo": repo, "url": url})
    path = f"/v1/operations/{asked['id']}"
    until(lambda: running.json("GET", path)["state"] in {"done", "failed"})
    answer: dict[str, Any] = running.json("GET", path)
    return answer


def must_be_whole(running: Daemon) -> None:
    assert running.json("GET", "/v1/health")["status"] in {"ok", "degraded"}
    assert not [line for line in running.log_lines if line["event"] == "request.crashed"]
    assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with daemon("[checkouts]\nprewarm = false\n") as made:
        yield made


def test_what_enters_a_mirror_and_what_is_checked_out(
    make_upstream: Callable[[str], Upstream], running: Daemon
) -> None:
    """Each hostile branch is a fault and does not keep others out; impossible names are refused."""
    upstream = make_upstream("up")
    upstream.commit({"README": "plain\n", "src/a.py": "a\n"})
    trees = Trees(upstream)
    kinds = [confused(trees), {**refused(trees), **unservable(trees)}, served(trees)]
    for branch, entries in [each for kind in kinds for each in kind.items()]:
        trees.branch(branch, *entries)
    (upstream.path / ".git/HEAD").write_text("ref: refs/heads/../../../etc/passwd\n")
    upstream.git("symbolic-ref", "HEAD", "refs/heads/nowhere")
    assert add(running, upstream.url)["state"] == "done", running.log
    shown = running.json("GET", "/v1/mirrors/up__stream")
    faults = {it["ref"].removeprefix("refs/heads/"): it["reason"] for it in shown["ref_faults"]}
    assert faults.keys() == kinds[0].keys(), faults.get("main")
    mirror = running.state_dir / "mirrors/up__stream"
    taken = git(mirror, "for-each-ref", "--format=%(refname:strip=2)", "refs/heads").split()
    assert {*taken} == {"main", *kinds[1], *kinds[2]}
    for branch in kinds[1]:
        for backend in ("overlay", "pool"):
            body = {"mirror": "up/stream", "commit": f"refs/heads/{branch}", "backend": backend}
            status, _, content = running.request("POST", "/v1/checkouts", body)
            assert (status, json.loads(content)["code"]) == (424, "commit-unservable"), content
    paths = {}
    for branch in kinds[2]:
        body = {"mirror": "up/stream", "commit": f"refs/heads/{branch}"}
        made = running.json("POST", "/v1/checkouts", body)
        paths[branch] = Path(made["path"])
        assert running.request("POST", f"/v1/checkouts/{made['id']}/reset", {})[0] == 200
        assert running.get(f"/v1/checkouts/{made['id']}/diff")[2] == b""
    assert (paths["pointer"] / "a").read_bytes() == POINTER
    assert ODD in os.listdir(os.fsencode(paths["odd-name"]))
    assert stat.S_IMODE((paths["set-uid"] / "a").stat().st_mode) == 0o755
    assert list((paths["submodule"] / "-u").iterdir()) == []
    must_be_whole(running)
    for words in (["mirror", "show", "up/stream"], ["ref", "log", "up/stream"], ["status"]):
        _must_be_printable(running, *words)
    assert all(line.isprintable() for line in running.log.splitlines())


def _must_be_printable(running: Daemon, *words: str) -> str:
    """Nothing that a terminal acts on reaches one."""
    command = [sys.executable, "-m", "mirrord", "--socket", str(running.socket), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    said = done.stdout + done.stderr
    assert all(line.isprintable() for line in said.splitlines()), said
    return said


def test_nothing_that_a_local_upstream_says_runs(
    make_upstream: Callable[[str], Upstream], running: Daemon, tmp_path: Path
) -> None:
    """Its configuration, hooks, alternates and missing objects may be any writer's."""
    upstream, canary = make_upstream("local"), tmp_path / "canary"
    upstream.commit({"README": "1\n"})
    run = f"touch {canary}; false"
    for key in (
        "core.fsmonitor", "core.sshCommand", "core.alternateRefsCommand", "core.pager",
        "uploadpack.packObjectsHook", "remote.origin.uploadpack", "remote.evil.vcs", "alias.fetch",
        "core.gitProxy", "credential.helper", "filter.lfs.process", "diff.external",
    ):  # fmt: skip
        upstream.git("config", key, run)
    upstream.git("config", "remote.origin.url", f"ext::sh -c touch% {canary}")
    upstream.git("config", "remote.origin.promisor", "true")
    upstream.git("config", "extensions.partialClone", "origin")
    hooks = upstream.path / ".git/hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-upload-pack", "reference-transaction", "pre-receive", "post-index-change"):
        (hooks / name).write_text(f"#!/bin/sh\n{run}\n")
        (hooks / name).chmod(0o755)
    blob = upstream.git("rev-parse", "HEAD:README")
    (upstream.path / ".git/objects" / blob[:2] / blob[2:]).unlink()  # would be fetched lazily
    assert (
        add(running, upstream.url, "lo/cal")["state"] == "failed"
        or running.json("GET", "/v1/mirrors/lo__cal")["ref_faults"]
    )
    assert not canary.exists()
    must_be_whole(running)


def test_a_redirect_leads_to_no_other_host(
    make_upstream: Callable[[str], Upstream], running: Daemon
) -> None:
    """Nor to another protocol; the other host sees no password, and nothing of it is mirrored."""
    upstream = make_upstream("there")
    upstream.commit({"README": "internal\n"})
    with serving(upstream.path.parent) as here, serving(upstream.path.parent) as there:
        elsewhere = there.url.replace("127.0.0.1", "localhost") + "/there/.git"
        seen: list[dict[str, str]] = []
        respond = there.respond

        def record(request: Any) -> None:
            seen.append(dict(request.headers))
            respond(request)

        there.respond = record  # type: ignore[method-assign]
        for target in (elsewhere, f"file://{upstream.path}/.git", "ext::sh -c id", "x" * 9000):
            location = f"{target}/info/refs?service=git-upload-pack"
            here.answers = [(302, {"Location": location})] * 3
            name = f"re/direct{len(seen)}{len(target)}"
            ended = add(running, here.url.replace("://", "://me:hunter22@") + "/gone.git", name)
            assert ended["state"] == "failed", target
            assert ended["error"]["code"].startswith("upstream"), ended
            if target == elsewhere:
                assert "redirects to another host" in ended["error"]["detail"]
                assert seen
    assert not [headers for headers in seen if "Authorization" in headers]
    assert b"hunter22" not in running.log.encode()
    assert b"hunter22" not in running.get("/v1/mirrors")[2] + running.get("/v1/operations")[2]
    must_be_whole(running)


@contextmanager
def speaking(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A git:// server that says what it likes; answers its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.recv(4096)
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"git://127.0.0.1:{listener.getsockname()[1]}/x"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _packet(text: bytes) -> bytes:
    return b"%04x" % (len(text) + 4) + text


def _endless_refs(connection: socket.socket) -> None:
    """For ever."""
    connection.sendall(_packet(b"%s refs/heads/a\0 agent=x\n" % (b"1" * 40)))
    lines = b"".join(
        _packet(b"%s refs/heads/%04d%s\n" % (b"1" * 40, n, b"n" * 100)) for n in range(9000)
    )
    while True:
        connection.sendall(lines)


def _escapes(connection: socket.socket) -> None:
    connection.sendall(
        _packet(b"ERR \x1b]0;owned\x07\x1b[31m\xc2\x9b31m https://me:hunter22@h/x\n")
    )


def test_an_upstream_that_never_ends_costs_so_much_and_no_more(running: Daemon) -> None:
    """The git that listens to it has a bound of memory, and the daemon one of output."""
    with speaking(_endless_refs) as url:
        ended = add(running, url, "end/less")
    assert (ended["state"], ended["error"]["code"]) == ("failed", "upstream-failed"), ended
    must_be_whole(running)


def test_what_an_upstream_says_reaches_no_terminal_raw(running: Daemon) -> None:
    with speaking(_escapes) as url:
        said = _must_be_printable(running, "mirror", "add", "es/cape", "--url", url)
    assert "owned" in said
    assert "hunter22" not in said
    _must_be_printable(running, "status")
    _must_be_printable(running, "mirror", "show", "es/cape")


@pytest.mark.timeout(20)
def test_what_an_upstream_says_is_read_in_linear_time() -> None:
    """These held up the event loop for a minute, and for seconds: the lengths are those that upstreams may use."""
    masked("?" * 1300 + "key" * 900)
    masked("a" * 100_000 + "@")
    masked("password" + " " * 100_000)
    line = "fatal: " + "repository '" * 300
    error = failure("ask", 128, "\n".join([line] * 800), upstream=True)
    assert error.code == "upstream-failed"
    offset = "Mon, 01 Jan 2024 00:00:00 +" + "9" * 20
    for value in ("²", "9" * 400, "Mon, 99 Foo", "\x00", offset):
        assert retry_after_seconds(value, now=utc_now()) is None
