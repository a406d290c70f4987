"""A mirror that exists follows another upstream."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import Upstream
from mirror_parts import NAME, Builder, House

from mirrord.errors import MirrordError, UpstreamLossError
from mirrord.mirrors.upstream import parse_upstream
from mirrord.model import CommitId

pytestmark = pytest.mark.slow


@pytest.fixture
def house(tmp_path: Path) -> Builder:
    return Builder(tmp_path, f"file://{tmp_path}/{{owner}}+{{name}}")


def test_a_moved_upstream_is_followed_and_a_stranger_is_not(
    house: Builder, make_upstream: Callable[..., Upstream]
) -> None:
    """One that lacks a pinned commit is refused by name; the change is in the ref history."""
    upstream = make_upstream()
    pinned = upstream.commit({"a": "1"})
    upstream.commit({"a": "2"})
    upstream.git("branch", "side", pinned)
    moved = upstream.copy(upstream.path.with_name("moved")).path
    stranger = upstream.path.with_name("stranger")
    other = upstream.copy(stranger)
    other.git("branch", "-D", "side")
    other.git("checkout", "--quiet", "--orphan", "new")
    strange = other.commit({"b": "1"})
    for branch in ("main", "side"):
        other.git("branch", "-D", branch, check=False)
    other.git("reflog", "expire", "--expire=now", "--all")
    other.git("gc", "--quiet", "--prune=now")

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", upstream.url)
        await it.mirrors.sync(NAME)
        await it.mirrors.pin(NAME, [CommitId(pinned)], owner="person/0", reason="test")
        with pytest.raises(UpstreamLossError, match=pinned):
            await it.mirrors.set_url(NAME, f"file://{stranger}")
        with pytest.raises(MirrordError):
            await it.mirrors.set_url(NAME, f"file://{stranger}-absent")
        assert (await it.mirrors.get(str(NAME))).url == parse_upstream(upstream.url).url
        before = await it.mirrors.refs_log(NAME)
        shutil.rmtree(upstream.path)
        await it.mirrors.set_url(NAME, f"file://{moved}")
        assert not (await it.mirrors.sync(NAME)).changed
        newest, *rest = await it.mirrors.refs_log(NAME)
        assert rest == before
        assert f"upstream set to file://{moved}" in newest.summary
        await it.mirrors.set_url(NAME, f"file://{stranger}", accept_loss=True)
        await it.mirrors.sync(NAME, accept_loss=True)
        assert (await it.mirrors.resolve(NAME, "new")).commit == strange
        assert (await it.mirrors.resolve(NAME, pinned)).commit == pinned

    house.run(body)
