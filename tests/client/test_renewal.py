"""Leases under a working client: renewed while their handles are held, and not a moment longer. A real daemon."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import until

from mirrord import AsyncClient, CheckoutNotFoundError, Client

pytestmark = pytest.mark.slow

TTL = 4
"""Seconds. A renewal is due after a third of it: this machine may be away for as long as the rest."""
LONGER = 5


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    upstreams = tmp_path_factory.mktemp("upstreams")
    Upstream(upstreams / "o__r").history(2)
    text = f'[upstream]\nurl = "file://{upstreams}/{{owner}}__{{name}}"\n[checkouts]\nbackend = "pool"\n'
    with daemon(text) as started:
        with Client(started.socket) as client:
            client.wait(client.add_mirror("o/r"))
        yield started


@pytest.fixture
def client(running: Daemon) -> Iterator[Client]:
    with Client(running.socket) as made:
        yield made


def _is_there(running: Daemon, checkout: str) -> bool:
    return running.request("GET", f"/v1/checkouts/{checkout}")[0] == 200


def _renewers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mirrord-renewal"]


def test_a_lease_does_not_end_under_who_holds_it(running: Daemon, client: Client) -> None:
    """By one thread for all of a client's, which ends with the last of them."""
    with (
        client.checkout("o__r@main", ttl=TTL) as first,
        client.checkout("o__r@main", ttl=TTL) as second,
    ):
        began = first.expires_at
        (first.path / "edited").write_text("mine")
        time.sleep(LONGER)
        assert _is_there(running, first.id)
        assert _is_there(running, second.id)
        assert first.expires_at - began > timedelta(seconds=TTL)
        assert b"edited" in first.diff()
        assert len(_renewers()) == 1
    until(lambda: not _renewers())


def test_a_lease_does_not_end_under_a_task_that_holds_it(running: Daemon) -> None:
    """By one task for all of a client's; closing the client leaves none."""

    async def scene() -> None:
        async with AsyncClient(running.socket) as client:
            async with (
                client.checkout("o__r@main", ttl=TTL) as first,
                client.checkout("o__r@main", ttl=TTL) as second,
            ):
                await asyncio.sleep(LONGER)
                assert _is_there(running, first.id)
                assert _is_there(running, second.id)
                assert [task.get_name() for task in asyncio.all_tasks()].count(
                    "mirrord-renewal"
                ) == 1
            kept = await client.checkout("o__r@main", ttl=TTL)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await asyncio.to_thread(until, lambda: not _is_there(running, kept.id))

    asyncio.run(scene())


def test_a_lease_is_renewed_at_a_third_of_its_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at every turn."""
    asked: list[str] = []
    renew = client.renew_checkout

    def counted(checkout: str, ttl: Any = None) -> Any:
        asked.append(checkout)
        return renew(checkout, ttl)

    monkeypatch.setattr(client, "renew_checkout", counted)
    began = time.monotonic()
    with client.checkout("o__r@main", ttl=3):
        until(lambda: len(asked) >= 2)
    assert len(asked) <= time.monotonic() - began


def test_who_does_not_want_it_keeps_the_deadline(running: Daemon, client: Client) -> None:
    """No thread is started either. A handle opened by its id belongs to another, who renews it."""
    checkout = client.checkout("o__r@main", ttl=TTL, auto_renew=False)
    opened = client.open_checkout(checkout.id)
    assert not _renewers()
    until(lambda: not _is_there(running, checkout.id))
    assert opened.id == checkout.id


def test_a_handle_that_nobody_has_any_longer_is_not_renewed(
    running: Daemon, client: Client
) -> None:
    """Its lease ends as it says."""
    forgotten = client.checkout("o__r@main", ttl=TTL).id
    gc.collect()
    until(lambda: not _is_there(running, forgotten))


def test_a_lease_made_shorter_by_hand_is_renewed_in_time(running: Daemon, client: Client) -> None:
    """The next turn follows the lease, not the one before."""
    with client.checkout("o__r@main", ttl=600) as checkout:
        checkout.renew(TTL)
        time.sleep(LONGER)
        assert _is_there(running, checkout.id)


def test_a_lease_that_is_gone_is_told_once_and_left(
    running: Daemon, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """With the time it had: `expires_at` stays at what was true last."""
    with caplog.at_level(logging.WARNING, "mirrord"):
        checkout = client.checkout("o__r@main", ttl=TTL)
        assert running.request("DELETE", f"/v1/checkouts/{checkout.id}")[0] == 204
        until(lambda: caplog.records)
        time.sleep(TTL)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"cannot renew checkout {checkout.id}, which expires at {checkout.expires_at}: "
    )
    with pytest.raises(CheckoutNotFoundError):
        checkout.diff()


def test_a_release_ends_the_renewal_without_a_word(
    running: Daemon, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """By the handle, or by the client with its id."""
    with caplog.at_level(logging.WARNING, "mirrord"):
        one, two = client.checkout("o__r@main", ttl=TTL), client.checkout("o__r@main", ttl=TTL)
        one.release()
        client.release_checkout(two.id)
        until(lambda: not _renewers())
        time.sleep(TTL)
    assert not caplog.records


def test_the_lease_of_a_client_that_was_killed_ends(running: Daemon) -> None:
    """Nobody renews it any longer; and a client that ends without a release does not hang on its thread."""
    script = textwrap.dedent("""
        import sys, time
        from mirrord import Client
        client = Client(sys.argv[1])
        checkout = client.checkout("o__r@main", ttl=float(sys.argv[3]))
        print(checkout.id, flush=True)
        time.sleep(float(sys.argv[2]))
    """)
    start = [sys.executable, "-c", script, str(running.socket)]
    with subprocess.Popen([*start, "60", str(TTL)], stdout=subprocess.PIPE, text=True) as working:
        assert working.stdout is not None
        held = working.stdout.readline().strip()
        time.sleep(LONGER)
        assert _is_there(running, held)
        os.kill(working.pid, signal.SIGKILL)
    until(lambda: not _is_there(running, held))
    ended = subprocess.run([*start, "0", str(TTL)], capture_output=True, check=False, timeout=90)
    assert ended.returncode == 0


def test_renewal_goes_on_after_a_restart_of_the_daemon(tmp_path: Path) -> None:
    """The next turn comes, or waits for it."""
    Upstream(tmp_path / "o__r").history(1)
    text = f'[upstream]\nurl = "file://{tmp_path}/{{owner}}__{{name}}"\n[checkouts]\nbackend = "pool"\n'
    with daemon(text) as restarted, Client(restarted.socket) as client:
        client.wait(client.add_mirror("o/r"))
        with client.checkout("o__r@main", ttl=24) as checkout:
            began = checkout.expires_at
            restarted.stop()
            restarted.start()
            until(lambda: checkout.expires_at > began)
            assert _is_there(restarted, checkout.id)
