"""A store, and a database, with a full disk: the daemon serves what it has, and recovers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import daemon_fleet
import link
import postgresql
import psycopg
import pytest
import s3
from daemon_fleet import become_like, checkout, done, ended, eventually, newest, refs, rows
from daemons import Daemon
from faults.disks import SmallDisk, unmount
from gitrepos import Upstream

pytestmark = [pytest.mark.root, pytest.mark.slow]

_OWN = '[[mirror]]\nrepo = "owner/name"\n'
_NO_ROOM = "the store has no room"


class Store:
    """`fill` leaves it without room, `empty` gives it back."""

    def __init__(self, url: str, environment: dict[str, str]) -> None:
        self.url, self.environment = url, environment
        self.fill: Callable[[], None]
        self.empty: Callable[[], None]


@contextmanager
def _directory(path: Path) -> Iterator[Store]:
    path.mkdir()
    disk = SmallDisk(16 * 1024**2)
    disk.mount(path)
    try:
        made = Store(f"file://{path}/below", {})
        made.fill, made.empty = lambda: disk.leave_free(0), disk.empty
        yield made
    finally:
        unmount(path)


@contextmanager
def _bucket(_: Path) -> Iterator[Store]:
    server = s3.shared()
    with link.to(server.port) as wire:
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}"}
        made = Store(server.create(), server.environment | environment)
        made.fill = lambda: setattr(wire, "is_full", True)
        made.empty = lambda: setattr(wire, "is_full", False)
        yield made


def _health(one: Daemon) -> str:
    return one.get("/v1/health")[2].decode()


def _well(one: Daemon) -> bool:
    return one.get("/v1/health")[0] == 200


def _command(one: Daemon, *words: str) -> str:
    command = [sys.executable, "-m", "mirrord", "--config", str(one.config), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _told_no_bug(*nodes: Daemon) -> None:
    for node in nodes:
        assert "Traceback" not in node.log, node.log
        assert '"level":"error"' not in node.log.replace(" ", ""), node.log


@pytest.mark.parametrize("kind", [_directory, _bucket])
def test_a_full_store_delays_news_and_nothing_else(
    kind: Callable[[Path], AbstractContextManager[Store]],
    server: postgresql.Server,
    tmp_path: Path,
    upstream: Upstream,
) -> None:
    with (
        kind(tmp_path / "small") as store,
        daemon_fleet.fleet(server, store.url, upstream.path.parent) as fleet,
    ):
        a, b, c = (fleet.make(_OWN, environment=store.environment) for _ in range(3))
        done(a, "POST", "/v1/mirrors/owner__name/sync")
        base = upstream.git("rev-parse", "HEAD~2")
        for node in (b, c):
            assert checkout(node, mirror="owner/name", commit="main")
            eventually(lambda: '"closures.' in node.log)  # noqa: B023  # its upload has ended
        before, at = refs(a), newest(fleet)
        store.fill()
        commit = upstream.commit({"new": "line\n" * 10})
        failed = ended(b, "POST", "/v1/mirrors/owner__name/sync")
        assert failed["error"]["code"] == "store-full"
        store.fill()  # also with the room of objects that were being written
        # of no ref, so it is not published yet
        lone = upstream.git("commit-tree", "-p", base, "-m", "lone", f"{base}^{{tree}}")
        status, _, body = c.request("POST", "/v1/pins", {"mirror": "owner/name", "commit": lone})
        assert (status, b"store-full" in body) == (507, True), body
        # said by the daemons that met it, and on the others of them
        assert _NO_ROOM in _health(b)
        assert _NO_ROOM in _health(c)
        eventually(lambda: _command(a, "status", "--all").count(_NO_ROOM) == 2)
        # all is served that was, here what upstream has too
        assert checkout(b, mirror="owner/name", commit=commit)
        for node in (a, c):
            assert checkout(node, mirror="owner/name", commit=base)
            assert not checkout(node, mirror="owner/name", commit=commit)
        # nothing was published by half
        assert newest(fleet) == at
        assert {refs(node) for node in (a, c)} == {before}
        assert a.json("GET", "/v1/pins") == []
        store.empty()
        for node in (a, b, c):
            eventually(lambda: commit in refs(node))  # noqa: B023
            eventually(lambda: _well(node))  # noqa: B023
        become_like(b, a, c)
        assert a.json("GET", "/v1/mirrors/owner__name")["error"] is None
        assert c.request("POST", "/v1/pins", {"mirror": "owner/name", "commit": lone})[0] == 201
        _told_no_bug(a, b, c)


def test_a_database_without_room_stops_no_daemon(tmp_path: Path, upstream: Upstream) -> None:
    """First its tables cannot grow, then its log cannot, which ends it."""
    disk, place = SmallDisk(160 * 1024**2), Path(tempfile.mkdtemp(prefix="md-", dir="/tmp"))
    disk.mount(place)
    try:
        with (
            postgresql.running(place) as server,
            daemon_fleet.fleet(server, f"file://{tmp_path}/store", upstream.path.parent) as fleet,
        ):
            _fill_and_empty(disk, fleet, upstream)
    finally:
        unmount(place)
        place.rmdir()


def _fill_and_empty(disk: SmallDisk, fleet: daemon_fleet.Fleet, upstream: Upstream) -> None:
    nodes = [fleet.make(_OWN, interval="3s") for _ in range(3)]
    base = upstream.git("rev-parse", "HEAD~2")
    done(nodes[0], "POST", "/v1/mirrors/owner__name/sync")
    done(nodes[0], "POST", "/v1/datasets?name=d&filename=d.jsonl", rows(base))
    for node in nodes:
        eventually(lambda: checkout(node, instance="i-0"))  # noqa: B023
    disk.leave_free(0)
    large = rows(base, prefix="x", patch="+line\n" * 1_000_000)
    path = "/v1/datasets?name=large&filename=large.jsonl"
    failed = ended(nodes[1], "POST", path, large)
    assert failed["error"]["code"] == "catalog-unavailable", failed
    assert "the catalog's database has no room" in _health(nodes[1])
    assert "the catalog's database has no room" in _command(nodes[1], "status")
    with pytest.raises(psycopg.OperationalError):
        for _ in range(20):
            fleet.server.execute("SELECT pg_switch_wal()", "CREATE TABLE t (n int)", "DROP TABLE t")
    commit = upstream.commit({"new": "line\n"})
    for node in nodes:
        eventually(lambda: "the catalog's database cannot be reached" in _health(node))  # noqa: B023
        got = node.request("POST", "/v1/checkouts", {"instance": "i-0"})
        assert got[0] == 201, (nodes.index(node), got)
    failed = nodes[2].json("POST", "/v1/pins", {"mirror": "owner/name", "commit": base})
    assert failed["code"] == "catalog-unavailable", failed
    assert not any(commit in refs(node) for node in nodes)
    disk.empty()
    with suppress(subprocess.CalledProcessError):  # it ended by itself
        fleet.server.stop()
    fleet.server.start()
    for node in nodes:
        eventually(lambda: commit in refs(node))  # noqa: B023
        eventually(lambda: _well(node))  # noqa: B023
    become_like(nodes[0], *nodes)
    done(nodes[1], "POST", path, large)
    for node in nodes:
        eventually(lambda: checkout(node, instance="x-0"))  # noqa: B023
    _told_no_bug(*nodes)
