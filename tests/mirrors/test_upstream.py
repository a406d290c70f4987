"""Upstream URLs, and asking upstreams politely."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from mirrord.errors import (
    GitFailedError,
    InvalidUrlError,
    MirrordError,
    UpstreamAuthError,
    UpstreamThrottledError,
)
from mirrord.mirrors.bisect import find_bad
from mirrord.mirrors.coalesce import Coalescer, SharedWork
from mirrord.mirrors.refs import is_safe_ref, read_offer
from mirrord.mirrors.upstream import Hosts, parse_upstream, upstream_url
from mirrord.model import MirrorName
from mirrord.protocol import Progress


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
    """What goes on a command line has no secret; what goes into a message has none either."""
    upstream = parse_upstream(text)
    assert (upstream.remote.url, upstream.host) == (url, host)
    assert (upstream.remote.username, upstream.remote.password) == (username, password)
    for secret in ("p%40ss", "p@ss", "token", ":pw"):
        assert secret not in f"{upstream.shown} {upstream!r} {url}"


@pytest.mark.parametrize(
    "text",
    [
        "", "relative/path", "../up", "ext::sh -c evil", "ext::evil", "fd::3", "--upload-pack=evil", "ftp://host/x", "https://",
        "https:///x", "https://host:port/x", "ssh://-oProxyCommand=evil/x", "ssh://-evil@host/x", "-host:path", "git@host:-path",
        "https://host/a b", "https://host/a\nb", "file://other/x", "file:x", "https:x", "x" * 5000, "https://ho st/x",
    ],
)  # fmt: skip
def test_what_is_no_upstream_is_refused(text: str) -> None:
    with pytest.raises(InvalidUrlError) as caught:
        parse_upstream(text)
    assert caught.value.hint


def test_a_template_is_filled_in() -> None:
    assert (
        upstream_url("file:///some/{owner}+{name}", MirrorName("psf", "requests"))
        == "file:///some/psf+requests"
    )


# -- refs -------------------------------------------------------------------------------------------------------------


def test_an_offer_holds_what_was_asked_for() -> None:
    """Peeled tags, other namespaces, ours and hostile names stay out; a hostile name is reported."""
    oid = "a" * 40
    taken = ["refs/heads/main", "refs/pull/1/head", "refs/tags/v1"]
    left = ["refs/tags/v1^{}", "refs/pull/1/merge", "refs/mirrord/history", "refs/replace/x"]
    names = [*taken, *left, "refs/heads/a..b", "refs/heads/main/below"]
    lines = ["ref: refs/heads/main\tHEAD", f"{oid}\tHEAD", *(f"{oid}\t{name}" for name in names)]
    offer = read_offer(lines, ["refs/heads/*", "refs/tags/*", "refs/pull/*/head", "refs/*/x"])
    assert sorted(offer.refs) == taken
    assert offer.head == "refs/heads/main"
    assert sorted(fault.ref for fault in offer.faults) == [
        "refs/heads/a..b",
        "refs/heads/main/below",
    ]


@pytest.mark.parametrize(
    "ref",
    [
        "refs/heads/x.lock", "refs/heads/.x", "refs/heads/x y", "refs/heads/x:", "refs/heads//x", "refs/heads/@{",
        "refs/heads/x/", "refs/heads/" + "x" * 300, "heads/x", "refs/heads/x\x7f",
    ],
)  # fmt: skip
def test_a_name_that_git_refuses_is_not_safe(ref: str) -> None:
    assert not is_safe_ref(ref)


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [set(), {0}, {99}, {3, 50, 51}])
def test_the_bad_ones_are_found_and_the_rest_is_taken(bad: set[int]) -> None:
    """In far fewer attempts than there are items."""
    taken: list[int] = []
    attempts = 0

    async def attempt(some: Sequence[int]) -> None:
        nonlocal attempts
        attempts += 1
        if bad & set(some):
            raise GitFailedError("cannot take them")
        taken.extend(some)

    async def main() -> dict[int, MirrordError]:
        return await find_bad(range(100), attempt, is_theirs=lambda _: True, budget=100, hopeless=8)

    assert anyio.run(main).keys() == bad
    assert sorted(taken) == sorted(set(range(100)) - bad)
    assert attempts <= 2 + 18 * len(bad)


def test_what_shares_a_cause_is_left_out_at_once() -> None:
    """A step for each cause, however many items it stops."""
    attempts: list[int] = []

    async def blame(error: MirrordError, group: Sequence[int]) -> set[int]:
        """An error names a number; whatever is divided by five with that remainder fails."""
        return {item for item in range(100) if item % 5 == error.facts["remainder"]}

    async def attempt(some: Sequence[int]) -> None:
        attempts.append(len(some))
        if found := {item % 5 for item in some} & {1, 3}:
            raise GitFailedError("cannot take them", remainder=min(found))

    async def main() -> dict[int, MirrordError]:
        return await find_bad(
            range(100),
            attempt,
            is_theirs=lambda _: True,
            budget=100,
            hopeless=8,
            blame=blame,
            sort=lambda group: group,
        )

    assert anyio.run(main).keys() == {item for item in range(100) if item % 5 in {1, 3}}
    assert attempts == [100, 80, 60]


def test_single_items_are_tried_beside_each_other_where_there_is_a_lane() -> None:
    """And one after the other where nobody else gives one up; nothing waits for a lane when all is done."""
    most: dict[int, int] = {}

    async def main(lanes: int) -> None:
        free = anyio.CapacityLimiter(lanes)
        active = 0

        async def attempt(some: Sequence[int]) -> None:
            nonlocal active
            active += 1
            most[lanes] = max(most.get(lanes, 0), active)
            await anyio.sleep(0.01)
            active -= 1
            raise GitFailedError("cannot take them")

        @asynccontextmanager
        async def lane() -> AsyncIterator[None]:
            async with free:
                yield

        with anyio.fail_after(5):
            async with free:  # the caller's own
                found = await find_bad(
                    range(6), attempt, is_theirs=lambda _: True, budget=99, hopeless=99, lane=lane
                )
        assert len(found) == 6

    anyio.run(main, 1)
    anyio.run(main, 3)
    assert most == {1: 1, 3: 3}


def test_when_nothing_works_the_search_ends_early() -> None:
    attempts = 0

    async def attempt(some: Sequence[int]) -> None:
        nonlocal attempts
        attempts += 1
        raise GitFailedError("cannot take them")

    async def main() -> dict[int, MirrordError]:
        return await find_bad(
            range(1000), attempt, is_theirs=lambda _: True, budget=400, hopeless=8
        )

    assert len(anyio.run(main)) == 1000
    assert attempts < 60


def test_an_error_that_blames_nobody_is_raised() -> None:
    async def attempt(_: Sequence[int]) -> None:
        raise UpstreamAuthError("cannot enter")

    async def main() -> None:
        await find_bad(
            [1, 2],
            attempt,
            is_theirs=lambda error: not isinstance(error, UpstreamAuthError),
            budget=9,
            hopeless=9,
        )

    with pytest.raises(UpstreamAuthError):
        anyio.run(main)


# -- hosts ------------------------------------------------------------------------------------------------------------


def test_a_host_that_throttles_is_left_alone_as_long_as_it_asks() -> None:
    """Without a Retry-After the wait doubles; a success forgets."""
    now = 0.0
    hosts = Hosts(concurrency=lambda: 2, clock=lambda: now, chance=lambda: 0.5)

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


# -- shared work ----------------------------------------------------------------------------------------------------------


def test_callers_share_progress_and_the_last_one_cancels() -> None:
    async def main() -> None:
        coalescer: Coalescer[int] = Coalescer()
        runs: list[str] = []
        seen: list[int] = []

        async def run(work: SharedWork[int]) -> int:
            runs.append("started")
            work.report(Progress(done=1))
            try:
                await anyio.sleep_forever()
                raise AssertionError
            except BaseException:
                runs.append("cancelled")
                raise

        async with anyio.create_task_group() as outer:
            async with anyio.create_task_group() as inner:
                inner.start_soon(coalescer.join, "k", run, lambda p: seen.append(p.done))
                outer.start_soon(coalescer.join, "k", run)
                await anyio.sleep(0.01)
                inner.cancel_scope.cancel()
            assert runs == ["started"]
            outer.cancel_scope.cancel()
        assert runs == ["started", "cancelled"]
        assert seen == [1]

    anyio.run(main)


def test_callers_after_the_work_was_closed_share_the_next_run() -> None:
    """Whatever was seen before one asked is nobody's answer; the end of all cancels those that wait and those that fly."""

    async def main() -> None:
        coalescer: Coalescer[int] = Coalescer()
        turn = anyio.Lock()
        facts = [0]
        answers: list[tuple[str, int]] = []
        go_on = anyio.Event()

        async def run(work: SharedWork[int]) -> int:
            async with turn:
                work.close()
                seen = facts[-1]
                await go_on.wait()
                return seen

        async def ask(who: str) -> None:
            answers.append((who, await coalescer.join("k", run)))

        async with anyio.create_task_group() as group:
            for who in ("first", "at once"):
                group.start_soon(ask, who)
            await anyio.wait_all_tasks_blocked()
            facts.append(1)
            for who in ("later", "later too"):
                group.start_soon(ask, who)
            await anyio.wait_all_tasks_blocked()
            go_on.set()
        assert answers == [("first", 0), ("at once", 0), ("later", 1), ("later too", 1)]

        go_on = anyio.Event()
        left = []
        for _ in range(2):
            left.append(asyncio.ensure_future(coalescer.join("k", run)))
            await anyio.wait_all_tasks_blocked()
        await coalescer.close()
        await asyncio.wait(left)
        assert all(task.cancelled() for task in left)
        assert not turn.statistics().locked

    anyio.run(main)


def test_work_that_was_cancelled_is_joined_by_nobody() -> None:
    """Also one that was given up before it began."""

    async def main() -> None:
        coalescer: Coalescer[int] = Coalescer()

        async def run(work: SharedWork[int]) -> int:
            await anyio.sleep(0)
            return 7

        for _ in range(2):
            given_up = asyncio.ensure_future(coalescer.join("k", run))
            await asyncio.sleep(0)
            given_up.cancel()
            assert await coalescer.join("k", run) == 7

    anyio.run(main)
