"""What a removed mirror may leave: nothing that keeps it from being added again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from daemons import daemon
from gitrepos import Upstream
from mirror_parts import NAME, Builder, House
from waiting import BOUND_S

from mirrord import Client
from mirrord.errors import MirrorNotFoundError, UpstreamNotFoundError


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    upstream = make_upstream("owner+name")
    upstream.history(3)
    return upstream


@pytest.fixture
def house(tmp_path: Path, upstream: Upstream) -> Builder:
    return Builder(tmp_path, f"file://{tmp_path}/upstreams/{{owner}}+{{name}}")


def leave_stub(root: Path) -> None:
    for directory in ("objects/pack", "refs", "worktrees"):
        (root / "state/mirrors/owner__name" / directory).mkdir(parents=True)


def test_a_stub_is_no_mirror_after_a_start(house: Builder, tmp_path: Path) -> None:
    leave_stub(tmp_path)

    async def body(it: House) -> None:
        with pytest.raises(MirrorNotFoundError):
            await it.mirrors.get("owner/name")
        assert not it.mirrors.path(NAME).exists()
        await it.mirrors.add("owner/name")
        assert (await it.mirrors.sync(NAME)).ref_count == 1

    house.run(body)


def test_a_stub_is_cloned_over_while_the_daemon_runs(house: Builder, tmp_path: Path) -> None:
    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        await it.mirrors.sync(NAME)
        await it.mirrors.remove(NAME)
        leave_stub(tmp_path)
        await it.mirrors.add("owner/name")
        assert (await it.mirrors.sync(NAME)).ref_count == 1
        assert (await it.mirrors.describe(NAME)).state == "ready"

    house.run(body)


def test_a_mirror_that_lost_a_part_is_no_stub(house: Builder, tmp_path: Path) -> None:
    """Its objects are the audit's to save."""

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        await it.mirrors.sync(NAME)
        for name in ("HEAD", "packed-refs", "config"):
            (it.mirrors.path(NAME) / name).unlink(missing_ok=True)
        assert not it.mirrors.repository(NAME).is_stub()

    house.run(body)


@pytest.mark.slow
def test_a_name_that_upstream_never_had_is_not_asked_for_by_the_clock(
    tmp_path: Path, upstream: Upstream
) -> None:
    """The list says so; one that was synced once is asked for at every turn, and a person may
    always ask.
    """
    text = f'[upstream]\nurl = "file://{upstream.path.parent}/{{owner}}+{{name}}"\n'
    text += '[sync]\ninterval = "1s"\njitter = "0s"\n'
    with daemon(text) as running, Client(running.socket) as client:
        for repo in ("owner/name", "owner/nmae"):
            with suppress(UpstreamNotFoundError):
                client.wait(client.add_mirror(repo))
        seen = {mirror.name: mirror.attempted_at for mirror in client.list_mirrors()}
        deadline = time.monotonic() + BOUND_S
        while True:
            there = {mirror.name: mirror for mirror in client.list_mirrors()}
            asked = [
                op
                for op in client.list_operations()
                if op.kind == "mirror.sync" and op.subject == "owner__name"
            ]
            if len(asked) >= 3:
                break
            assert time.monotonic() < deadline, "nothing is synced by the clock"
            time.sleep(0.2)
        mistyped = there["owner__nmae"]
        assert (mistyped.state, mistyped.error and mistyped.error.code) == (
            "failed",
            "upstream-not-found",
        )
        assert mistyped.attempted_at == seen["owner__nmae"]
        upstream.path.rename(upstream.path.with_name("owner+nmae"))
        client.wait(client.sync_mirror("owner/nmae"))
        assert client.get_mirror("owner/nmae").state == "ready"
