"""Upstream URLs, and the limits of upstream hosts."""

from __future__ import annotations

import anyio
import pytest

from mirrord.errors import InvalidUrlError, UpstreamThrottledError, UpstreamUnavailableError
from mirrord.mirrors.upstreams.upstream import HostLimits, parse_upstream, upstream_url
from mirrord.model import MirrorName


@pytest.mark.parametrize(
    ("text", "url", "host", "username", "password"),
    [
        ("https://github.com/o/n.git", "https://github.com/o/n.git", "github.com", None, None),
        ("https://me:p%40ss@host:8443/o/n", "https://host:8443/o/n", "host:8443", "me", "p@ss"),
        ("https://token@host/o/n", "https://host/o/n", "host", "token", None),
        ("ssh://git@host:22/o/n", "ssh://git@host:22/o/n", "host:22", None, None),
        ("ssh://git:pw@host/o/n", "ssh://git@host/o/n", "host", None, None),
        ("git@host:o/n.git", "git@host:o/n.git", "host", None, None),
        ("git://host/o/n", "git://host/o/n", "host", None, None),
        ("file:///srv/o+n", "file:///srv/o+n", "local", None, None),
        ("/srv/o+n", "/srv/o+n", "local", None, None),
    ],
)
def test_an_upstream_is_split_from_its_secrets(
    text: str, url: str, host: str, username: str | None, password: str | None
) -> None:
    """Neither command lines nor messages have a secret."""
    upstream = parse_upstream(text)
    assert (upstream.remote.url, upstream.host) == (url, host)
    assert (upstream.remote.username, upstream.remote.password) == (username, password)
    for secret in ("p%40ss", "p@ss", "token", ":pw"):
        assert secret not in f"{upstream.shown} {upstream!r} {url}"


@pytest.mark.parametrize(
    "text",
    [
        "", "relative/path", "../up", "ext::sh -c evil", "ext::evil", "fd::3",
        "--upload-pack=evil", "ftp://host/x", "https://",
        "https:///x", "https://host:port/x", "ssh://-oProxyCommand=evil/x", "ssh://-evil@host/x",
        "-host:path", "git@host:-path",
        "https://host/a b", "https://host/a\nb", "file://other/x", "file:x", "https:x", "x" * 5000,
        "https://ho st/x",
    ],
)  # fmt: skip
def test_what_is_no_upstream_is_refused(text: str) -> None:
    with pytest.raises(InvalidUrlError) as caught:
        parse_upstream(text)
    assert caught.value.hint


@pytest.mark.parametrize("password", ["ab/cds3cret", "12/abs3cret", "a:b/s3cret", "p@/s3cret"])
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(password: str) -> None:
    """git takes what follows its `/` for a path; it would be in the catalog and on command lines."""
    with pytest.raises(InvalidUrlError) as caught:
        parse_upstream(f"https://user:{password}@host/x.git")
    assert "s3cret" not in str(caught.value.problem())


def test_a_template_is_filled_in() -> None:
    assert (
        upstream_url("file:///some/{owner}+{name}", MirrorName("psf", "requests"))
        == "file:///some/psf+requests"
    )


def test_a_host_that_is_unwell_is_tried_one_at_a_time_after_a_pause() -> None:
    """The pause doubles; a success forgets. A directory of this machine is never paused."""
    now = 0.0
    hosts = HostLimits(concurrency=lambda: 5, clock=lambda: now, chance=lambda: 0.5)

    async def fail(name: str = "host") -> None:
        with pytest.raises(UpstreamUnavailableError):
            async with hosts.turn(name):
                raise UpstreamUnavailableError("cannot: it was cut")

    async def main() -> None:
        nonlocal now
        await fail()
        assert hosts.pause_s("host") == 2
        with pytest.raises(UpstreamUnavailableError, match="left alone for another 2 s"):
            async with hosts.turn("host"):
                raise AssertionError("it was asked")
        now = 2
        await fail()
        assert hosts.pause_s("host") == 4
        now = 6
        most = running = 0

        async def ask() -> None:
            nonlocal most, running
            async with hosts.turn("host"):
                running += 1
                most = max(most, running)
                await anyio.sleep(0.01)
                running -= 1

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask)
        assert most == 1
        await fail()
        assert hosts.pause_s("host") == 2
        await fail("local")
        assert hosts.pause_s("local") == 0

    anyio.run(main)


def test_a_host_that_throttles_is_left_alone_as_long_as_it_asks() -> None:
    """Without a Retry-After the wait doubles; a success forgets."""
    now = 0.0
    hosts = HostLimits(concurrency=lambda: 2, clock=lambda: now, chance=lambda: 0.5)

    async def refuse(retry_after_s: float | None) -> None:
        with pytest.raises(UpstreamThrottledError):
            async with hosts.turn("host"):
                raise UpstreamThrottledError("cannot", retry_after_s=retry_after_s)

    async def waits() -> float:
        try:
            async with hosts.turn("host"):
                return 0.0
        except UpstreamThrottledError as error:
            return float(error.facts["retry_after_s"])

    async def main() -> None:
        nonlocal now
        await refuse(100)
        assert await waits() == 110
        now = 111
        await refuse(None)
        assert await waits() == 60
        async with hosts.turn("other"):
            now = 172
        assert await waits() == 0
        await refuse(None)
        assert await waits() == 30

    anyio.run(main)
