"""What a removed mirror may leave: nothing that keeps it from being added again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import Upstream
from test_mirrors import NAME, Builder, House

from mirrord.errors import MirrorNotFoundError


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
