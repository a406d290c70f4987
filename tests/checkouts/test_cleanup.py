"""Cleanup that failed because of the disk is retried while the daemon runs, not at the next start."""

from __future__ import annotations

import itertools
import json
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from mirror_parts import NAME, Builder, House
from mounted_templates import busy
from starlette.requests import Request
from waiting import until

from mirrord.api.request import spool_body
from mirrord.engine.timetable import Cleanup
from mirrord.errors import InvalidRequestError
from mirrord.host.trash import Trash
from mirrord.mirrors.quarantine import Quarantine
from mirrord.model import CommitId


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("owner+name")
    made.history(3)
    return made


@pytest.fixture
def house(tmp_path: Path, upstream: Upstream) -> Builder:
    return Builder(tmp_path, f"file://{upstream.path.parent}/{{owner}}+{{name}}").synced()


@contextmanager
def refs_that_stay(mirror: Path) -> Iterator[None]:
    """Somebody holds `packed-refs.lock`: git (2.39) makes loose refs and deletes none."""
    lock = mirror / "packed-refs.lock"
    with lock.open("w"):
        yield
        lock.unlink()


@contextmanager
def half_failing(mirror: Path) -> Iterator[None]:
    """Besides, SQLite takes no new pin, as on a disk that is full."""
    with (
        refs_that_stay(mirror),
        closing(sqlite3.connect(mirror.parent.parent / "catalog.sqlite3")) as connection,
    ):
        connection.execute(
            "CREATE TRIGGER full BEFORE INSERT ON pins BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
        connection.commit()
        yield
        connection.execute("DROP TRIGGER full")
        connection.commit()


def pins_in(mirror: Path) -> list[str]:
    return git(mirror, "for-each-ref", "--format=%(refname)", "refs/mirrord/pins").split()


# -- refs and rows -------------------------------------------------------------------------------


def test_a_pin_that_failed_half_way_is_undone(
    house: Builder, tmp_path: Path, upstream: Upstream
) -> None:
    """The row could not be written, nor the ref taken back."""
    commit, mirror = (
        CommitId(upstream.git("rev-parse", "HEAD")),
        tmp_path / "state/mirrors" / str(NAME),
    )

    async def body(it: House) -> None:
        with half_failing(mirror):
            with pytest.raises(Exception, match="disk full"):
                await it.mirrors.pin(NAME, [commit], owner="person/7", reason="")
            assert len(pins_in(mirror)) == 1
            assert not await it.mirrors.clean_up()
        assert await it.mirrors.clean_up()
        assert (pins_in(mirror), await it.mirrors.list_pins()) == ([], [])

    house.run(body)


def test_a_pin_that_was_made_since_stays(
    house: Builder, tmp_path: Path, upstream: Upstream
) -> None:
    """The retry looks at the state at its own time."""
    commit, mirror = (
        CommitId(upstream.git("rev-parse", "HEAD")),
        tmp_path / "state/mirrors" / str(NAME),
    )

    async def body(it: House) -> None:
        with half_failing(mirror), pytest.raises(Exception, match="disk full"):
            await it.mirrors.pin(NAME, [commit], owner="person/7", reason="")
        assert await it.mirrors.pin(NAME, [commit], owner="person/7", reason="again") == {}
        assert await it.mirrors.clean_up()
        assert [pin.reason for pin in await it.mirrors.list_pins()] == ["again"]
        assert len(pins_in(mirror)) == 1

    house.run(body)


def test_an_unpin_that_failed_half_way_leaves_the_pin_with_its_reason(
    house: Builder, tmp_path: Path, upstream: Upstream
) -> None:
    commit, mirror = (
        CommitId(upstream.git("rev-parse", "HEAD")),
        tmp_path / "state/mirrors" / str(NAME),
    )

    async def body(it: House) -> None:
        await it.mirrors.pin(NAME, [commit], owner="person/7", reason="paper")
        with half_failing(mirror):
            with pytest.raises(Exception, match=r"packed-refs"):
                await it.mirrors.unpin(NAME, [commit], owner="person/7")
            assert await it.mirrors.list_pins() == []
        assert await it.mirrors.clean_up()
        assert [pin.reason for pin in await it.mirrors.list_pins()] == ["paper"]

    house.run(body)


@pytest.mark.root
def test_a_mirror_that_cannot_be_moved_away_is_not_removed(house: Builder, tmp_path: Path) -> None:
    """It keeps its row, and with it its URL."""
    mirror = tmp_path / "state/mirrors" / str(NAME)

    async def body(it: House) -> None:
        with busy(mirror), pytest.raises(OSError, match="busy"):
            await it.mirrors.remove(NAME)
        assert (await it.mirrors.describe(NAME)).state == "ready"
        await it.mirrors.remove(NAME)
        assert not mirror.exists()

    house.run(body)


# -- directories ---------------------------------------------------------------------------------


@pytest.mark.root
def test_what_quarantine_cannot_remove_goes_later(tmp_path: Path) -> None:
    async def body() -> None:
        trash = Trash()
        quarantine = Quarantine(tmp_path, trash)
        await quarantine.clean()
        async with quarantine.directory("fetch") as directory:
            (directory / "inner").mkdir()
            mounted = busy(directory / "inner")
            mounted.__enter__()
        assert directory.exists()
        assert not await trash.retry()
        mounted.__exit__(None, None, None)
        assert await trash.retry()
        assert not directory.exists()

    anyio.run(body)


@pytest.mark.root
def test_an_upload_that_was_cut_off_and_does_not_go_goes_later(tmp_path: Path) -> None:
    """Its client hears of the upload, not of our disk."""

    async def body() -> None:
        trash = Trash()
        quarantine = Quarantine(tmp_path, trash)
        await quarantine.clean()
        messages: Iterator[dict[str, Any]] = iter(
            [
                {"type": "http.request", "body": b"half", "more_body": True},
                {"type": "http.disconnect"},
            ]
        )
        mounted = ExitStack()

        async def receive() -> dict[str, Any]:
            message = next(messages)
            if message["type"] == "http.disconnect":
                mounted.enter_context(busy(*tmp_path.iterdir()))
            return message

        with pytest.raises(InvalidRequestError, match="hung up"):
            await spool_body(Request({"type": "http", "headers": []}, receive), quarantine, 100)
        assert not await trash.retry()
        mounted.close()
        assert await trash.retry()
        assert not any(tmp_path.iterdir())

    anyio.run(body)


def test_what_stays_owed_is_tried_less_and_less() -> None:
    """On a disk that is full for a day nothing is gained by asking every five seconds."""
    tries: list[int] = []

    async def body() -> None:
        async def part() -> bool:
            tries.append(len(tries))
            return len(tries) == 4

        clock = itertools.count(0, 5)
        now = next(clock)
        cleanup = Cleanup([part], clock=lambda: now)
        counts = []
        while now < 65:
            await cleanup.retry()
            counts.append(len(tries))
            now = next(clock)
        assert counts == [1, 2, 2, 3, 3, 3, 3, 4, 5, 6, 6, 7, 7]

    anyio.run(body)


# -- a whole daemon ------------------------------------------------------------------------------


@contextmanager
def daemon_of(upstream: Upstream, more: str = "") -> Iterator[Daemon]:
    with daemon(
        f'[upstream]\nurl = "file://{upstream.path.parent}/{{owner}}+{{name}}"\n{more}'
    ) as it:
        yield it


def finish(it: Daemon, answer: dict[str, Any]) -> dict[str, Any]:
    while answer.get("state") == "running":
        time.sleep(0.02)
        answer = it.json("GET", f"/v1/operations/{answer['id']}")
    return answer


@pytest.mark.slow
def test_stale_pins_go_without_a_restart(upstream: Upstream) -> None:
    """A dataset is removed while its pins cannot be; no start, no sync and no import follows."""
    commit = upstream.git("rev-parse", "HEAD")
    row = json.dumps(
        {
            "instance_id": "a",
            "repo": "owner/name",
            "base_commit": commit,
            "patch": "",
            "test_patch": "",
        }
    ).encode()
    with daemon_of(upstream) as it:
        assert (
            finish(it, it.json("POST", "/v1/datasets?name=lite&filename=lite.jsonl", row))["state"]
            == "done"
        )
        mirror = it.state_dir / "mirrors/owner__name"
        with refs_that_stay(mirror):
            assert it.request("DELETE", "/v1/datasets/lite")[0] == 204
            assert len(pins_in(mirror)) == 1
        until(lambda: not pins_in(mirror) and not any((it.state_dir / "quarantine").iterdir()))
        assert it.json("GET", "/v1/pins") == []


@pytest.mark.root
def test_a_checkout_that_could_not_be_removed_goes_without_a_restart() -> None:
    """A crash left it half-made, with a mount in it."""
    with daemon() as it:
        checkouts = it.state_dir / "checkouts"
        inner = checkouts / "half-made/inner"
        inner.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(inner)], check=True)
        it.kill()
        it.start()
        until(lambda: it.log.count("removal.failed") >= 3)
        time.sleep(3)  # of each backend, the tries that come one after the other
        subprocess.run(["umount", str(checkouts / ".trash-half-made/inner")], check=True)
        until(lambda: not any(checkouts.iterdir()))
