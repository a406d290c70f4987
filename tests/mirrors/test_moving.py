"""A mirror that exists follows another upstream."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from forge import serving
from gitrepos import Upstream
from mirror_parts import NAME, Builder, House
from waiting import until

from mirrord.errors import MirrordError, UpstreamLossError
from mirrord.mirrors.upstreams.upstream import parse_upstream
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


def test_a_redirect_to_another_history_moves_nothing(
    house: Builder, make_upstream: Callable[..., Upstream]
) -> None:
    """The old name was taken by somebody else: told, until it is accepted."""
    upstream = make_upstream("owner+name")
    upstream.commit({"a": "1"})
    tip = upstream.commit({"a": "2"})
    stranger = make_upstream("stranger")
    strange = stranger.commit({"b": "1"})
    continued = upstream.copy(upstream.path.with_name("continued"))
    newest = continued.commit({"a": "3"})

    async def body(it: House) -> None:
        with serving(upstream.path.parent) as forge:
            await it.mirrors.add("owner/name", f"{forge.url}/owner+name/.git")
            await it.mirrors.sync(NAME)
            forge.renamed["/owner+name/"] = "/stranger/"
            with pytest.raises(UpstreamLossError, match=r"redirects to .*another history"):
                await it.mirrors.sync(NAME)
            assert (await it.mirrors.resolve(NAME, "main")).commit == tip
            forge.renamed["/owner+name/"] = "/continued/"
            await it.mirrors.sync(NAME)
            assert (await it.mirrors.resolve(NAME, "main")).commit == newest
            forge.renamed["/owner+name/"] = "/stranger/"
            await it.mirrors.sync(NAME, accept_loss=True)
            assert (await it.mirrors.resolve(NAME, "main")).commit == strange

    house.run(body)


@pytest.mark.root
def test_a_url_that_was_changed_while_no_daemon_ran_is_followed(
    make_upstream: Callable[..., Upstream],
) -> None:
    """With the same proof as a reload's; a mirror with a URL of its own stays where it is."""
    upstream = make_upstream("up")
    upstream.commit({"a": "1"})
    root = upstream.path.parent
    (root / "old").symlink_to(root)
    (root / "new").symlink_to(root)
    config = "[upstream]\nurl = 'file://{}/{}/{{name}}'\n"
    with daemon(config.format(root, "old")) as running:
        for repo, url in (("o/up", None), ("own/up", f"file://{root}/up")):
            add = {"repo": repo} | ({"url": url} if url else {})
            _finished(running, running.json("POST", "/v1/mirrors", add))
        running.stop()
        running.write_config(config.format(root, "new"))
        running.start()
        until(lambda: "/new/" in running.json("GET", "/v1/mirrors/o__up")["url"], bound_s=60)
        assert running.json("GET", "/v1/mirrors/own__up")["url"] == f"file://{root}/up"
        log = running.json("GET", "/v1/mirrors/o__up/refs/log")
        assert f"upstream set to file://{root}/new/up" in log[0]["summary"]
        running.stop()
        running.write_config(config.format(root, "absent"))
        running.start()
        listed = "/v1/operations"
        until(lambda: _states(running, listed) == ["failed"], bound_s=60)
        assert "/new/" in running.json("GET", "/v1/mirrors/o__up")["url"]


def _states(running: Daemon, path: str) -> list[str]:
    operations = running.json("GET", path)
    return [it["state"] for it in operations if it["kind"] == "mirror.set-url"]


def _finished(running: Daemon, operation: dict[str, Any]) -> None:
    path = f"/v1/operations/{operation['id']}"
    until(lambda: running.json("GET", path)["state"] == "done", bound_s=60)
