"""Attacks of a local user who is in no group of mirrord's, and of a member of the access group."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from mount_table import mount_lines

from .scene import MEMBER, OWNER, STRANGER, VICTIM, Scene, attack, denied, must

_PARAMETERS = {"name": "x", "id": "x", "commit": "1" * 40, "key": "x"}


@attack(STRANGER)
def state_is_read(at: Scene) -> str:
    """Every directory below the state, and the configuration."""
    names = ("mirrors", "templates", "leases", "checkouts", "quarantine", "datasets")
    places = [at.state / name for name in names] + [at.state / "catalog.sqlite3", at.config]
    return denied(*(partial(os.open, place, os.O_RDONLY) for place in places if place != Path()))


@attack(STRANGER)
def another_tree_is_read(at: Scene) -> str:
    path = at.victim["path"]
    return denied(lambda: os.listdir(path), lambda: Path(path, "secret").read_text())


@attack(STRANGER)
def mounts_tell_of_checkouts(at: Scene) -> str:
    lines = [line for line in mount_lines() if "overlay" in line]
    told = [line for line in lines if at.commit[:12] in line or "templates" in line]
    must(not told, str(told[:1]))
    return "options of overlays are given to the kernel by descriptor"


@attack(STRANGER)
def every_route_is_asked(at: Scene) -> str:
    """All but health, with plausible parameters."""
    answered = []
    for method, path in at.routes:
        path = path.format_map({**dict.fromkeys(_names(path), "x"), **_PARAMETERS})
        status, _ = at.ask(method, path, {} if method == "POST" else None)
        if path != "/v1/health" and not 400 <= status < 500:
            answered.append(f"{method} {path}: {status}")
    must(not answered, str(answered))
    return f"refused at {len(at.routes) - 1} routes"


def _names(path: str) -> list[str]:
    return [part[1:].split("}")[0] for part in path.split("/") if part.startswith("{")]


@attack(STRANGER)
def private_sockets_are_connected(at: Scene) -> str:
    """Of the mount service, of builds, and of docker's plugin."""
    places = [
        *at.socket.parent.glob("*.sock"),
        at.socket.parent / "mount.sock",
        at.socket.parent / "build.sock",
        Path("/run/docker/plugins/mirrord.sock"),
    ]

    def connect(path: Path, kind: int) -> None:
        with socket.socket(socket.AF_UNIX, kind) as connection:
            connection.connect(str(path))

    kinds = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
    others = [path for path in places if path != at.socket]
    return denied(*(partial(connect, path, kind) for path in others for kind in kinds))


@attack(STRANGER)
def the_daemon_is_looked_into(at: Scene) -> str:
    """Memory, environment, descriptors, root directory; signals and ptrace."""
    pids = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_daemon(entry)
    ]
    if not pids:
        return "it is not seen in /proc"
    libc = ctypes.CDLL(None, use_errno=True)

    def trace(pid: int) -> None:
        if libc.ptrace(16, pid, 0, 0) == -1:  # PTRACE_ATTACH
            raise OSError(ctypes.get_errno(), "ptrace")

    tries: list[Callable[[], object]] = []
    for pid in pids:
        for name in ("mem", "environ"):
            tries.append(partial(os.open, f"/proc/{pid}/{name}", os.O_RDONLY))
        for name in ("fd", "root"):
            tries.append(partial(os.listdir, f"/proc/{pid}/{name}"))
        tries += [partial(os.kill, pid, signal.SIGTERM), partial(trace, pid)]
    return denied(*tries)


def _is_daemon(entry: Path) -> bool:
    try:
        return b"mirrord.daemon" in (entry / "cmdline").read_bytes()
    except OSError:
        return False


@attack(STRANGER)
def connections_are_hoarded(at: Scene) -> str:
    """Three hundred at a time, kept open."""
    with ExitStack() as held:
        kept = 0
        for _ in range(300):
            connection = held.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(10)
            try:
                connection.connect(str(at.socket))
                connection.sendall(b"GET /v1/health HTTP/1.1\r\nhost: m\r\n\r\n")
                kept += b" 200 " in connection.recv(64)
            except OSError:
                continue
        must(kept <= 64, f"{kept} of 300 were kept")
        return f"{300 - kept} of 300 refused"


@attack(MEMBER)
def commits_and_answers_are_asked_for(at: Scene) -> str:
    """Everything that is an administrator's: other histories, views, pins, mirrors, reloads, audits."""
    start = {"mirror": at.mirror, "commit": at.commit}
    return at.refused(
        ("POST", "/v1/checkouts", {**start, "view": "grader"}),
        ("POST", "/v1/checkouts", {**start, "history": "linked"}),
        ("POST", "/v1/checkouts", {**start, "commit": "refs/mirrord/history"}),
        ("POST", "/v1/checkouts", {**start, "commit": "HEAD@{1}"}),
        ("POST", "/v1/pins", start),
        ("GET", "/v1/pins", None),
        ("POST", "/v1/mirrors", {"repo": "a/b", "url": "file:///etc"}),
        ("DELETE", f"/v1/mirrors/{at.mirror}", None),
        ("POST", f"/v1/mirrors/{at.mirror}/sync", {}),
        ("POST", "/v1/reload", {}),
        ("POST", "/v1/audits", {}),
        ("GET", "/v1/instances", None),
        ("POST", "/v1/gc", {}),
    )


@attack(MEMBER)
def other_owners_are_named(at: Scene) -> str:
    start = {"mirror": at.mirror, "commit": at.commit}
    daemon = at.state.stat().st_uid
    owners = (0, daemon, VICTIM, OWNER, -1, 2**32 - 1, 2**32)
    return at.refused(*(("POST", "/v1/checkouts", {**start, "owner": uid}) for uid in owners))


def _deeds(at: Scene, checkout: str) -> list[tuple[str, str, object]]:
    base = f"/v1/checkouts/{checkout}"
    return [
        ("GET", base, None), ("GET", f"{base}/diff", None), ("GET", f"{base}/receipt", None),
        ("GET", f"{base}/snapshots", None), ("POST", f"{base}/reset", {}),
        ("POST", f"{base}/renew", {}), ("POST", f"{base}/attach", {}), ("POST", f"{base}/fork", {}),
        ("POST", f"{base}/snapshots", {}), ("POST", f"{base}/layers", {"name": "x"}),
        ("POST", f"{base}/grade", {}), ("DELETE", base, None),
    ]  # fmt: skip


@attack(MEMBER)
def another_checkout_is_used_by_a_member(at: Scene) -> str:
    return at.refused(*_deeds(at, at.victim["id"]))


@attack(OWNER)
def another_checkout_is_used_by_an_owner(at: Scene) -> str:
    listed = json.loads(at.ask("GET", "/v1/checkouts")[1])
    must([each["id"] for each in listed] == [at.own["id"]], f"listed: {listed}")
    return at.refused(*_deeds(at, at.victim["id"]))


@attack(MEMBER)
def names_traverse(at: Scene) -> str:
    """In paths, ids and names; encoded, doubly encoded, and raw."""
    ids = ("..", "%2e%2e", "%2e%2e%2f%2e%2e%2fetc", "..%2F..", "%252e", "x%00y", "\xff", "a" * 5000)
    requests: list[tuple[str, str, object]]
    requests = [("GET", f"/v1/checkouts/{name}/diff", None) for name in ids]
    requests += [("GET", f"/v1/datasets/{name}", None) for name in ids]
    requests += [("GET", "/v1/checkouts/../../../etc/passwd", None), ("GET", "//v1//mirrors", None)]
    requests += [("POST", "/v1/checkouts", {"mirror": "../../etc", "commit": at.commit})]
    requests += [("POST", "/v1/checkouts", {"instance": f"../../x@{at.commit}"})]
    return at.refused(*requests)


@attack(MEMBER)
def garbage_is_sent(at: Scene) -> str:
    """A thousand times; descriptors too."""
    chance = random.Random(1)
    heads = (b"", b"GET ", b"GET / HTTP/1.1\r\n", b"POST /v1/checkouts HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
             b"POST /v1/checkouts HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n")  # fmt: skip
    for turn in range(1000):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            try:
                connection.connect(str(at.socket))
                data = chance.choice(heads) + chance.randbytes(chance.randrange(1, 200))
                fds = struct.pack("16i", *[connection.fileno()] * 16)
                connection.sendmsg(
                    [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if turn % 9 == 0 else []
                )
            except OSError:
                continue
    at.must_live()
    return "400 or a hang-up each time; health is ok"


@attack(MEMBER)
def leases_are_hoarded(at: Scene) -> str:
    start = {"mirror": at.mirror, "commit": at.commit, "ttl": "366d"}
    status, answer = at.ask("POST", "/v1/checkouts", start)
    if status == 201:
        made = json.loads(answer)
        at.ask("DELETE", f"/v1/checkouts/{made['id']}")
        length = datetime.fromisoformat(made["expires_at"]) - datetime.fromisoformat(
            made["created_at"]
        )
        must(length < timedelta(days=30), f"for {length}")
        return f"shortened to {made['expires_at']}"
    must(400 <= status < 500, f"{status} {answer[:200]!r}")
    return f"{status} {json.loads(answer)['code']}"


@attack(MEMBER)
def a_receipt_is_forged(at: Scene) -> str:
    start = {"mirror": at.mirror, "commit": at.commit, "ttl": "1m"}
    status, answer = at.ask("POST", "/v1/checkouts", start)
    must(status == 201, f"{status} {answer[:200]!r}")
    identity = json.loads(answer)["id"]
    receipt = json.loads(at.ask("GET", f"/v1/checkouts/{identity}/receipt")[1])
    at.ask("DELETE", f"/v1/checkouts/{identity}")
    status, answer = at.ask("POST", "/v1/receipts/verify", {**receipt, "tree": "1" * 40})
    must(status == 200 and not json.loads(answer)["holds"], f"{status} {answer[:300]!r}")
    return "it does not hold"


@attack(MEMBER)
def bodies_fill_the_memory(at: Scene) -> str:
    """Long ones, ones that say they are endless, and fifty that never come."""
    seen = set()
    with ExitStack() as held:
        for _ in range(50):
            connection = held.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(at.socket))
            head = b"POST /v1/checkouts HTTP/1.1\r\nhost: m\r\ncontent-length: 900000\r\n\r\n{"
            connection.sendall(head)
        for length in (2 * 1024**2, 10**15):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(20)
                connection.connect(str(at.socket))
                said = f"POST /v1/checkouts HTTP/1.1\r\nhost: m\r\ncontent-length: {length}\r\n\r\n"
                connection.sendall(said.encode())
                seen.add(connection.recv(4096).split()[1])
        at.must_live()
    must(seen == {b"413"}, f"{seen}")
    return "413; fifty that wait keep nobody out"
