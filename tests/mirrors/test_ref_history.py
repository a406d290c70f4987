"""The ref history by hand: what upstream looked like at a time, who moved, what was lost and what
is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from gitrepos import Upstream, git
from mirror_parts import NAME, Builder, House

from mirrord.errors import InvalidRequestError, NotFoundError
from mirrord.mirrors.history import read_record
from mirrord.mirrors.repository import HISTORY

pytestmark = pytest.mark.slow

DAYS = ("2024-01-01T12:00:00Z", "2024-02-01T12:00:00Z", "2024-03-01T12:00:00Z")


class Told:
    """A mirror with three records, a month apart: first sight; a force push and a deleted tag; a
    new branch.
    """

    def __init__(self, it: House, upstream: Upstream) -> None:
        self.it, self.upstream = it, upstream
        self.tips: list[str] = []
        self.records: list[str] = []

    async def tell(self) -> None:
        self.upstream.git("tag", "-a", "v1", "-m", "one")
        self.tag = self.upstream.git("rev-parse", "v1")
        await self.it.mirrors.add("owner/name", self.upstream.url)
        await self._sync()
        self.upstream.git("reset", "--quiet", "--hard", "HEAD~2")
        self.upstream.commit({"rewritten": "1"})
        self.upstream.git("tag", "-d", "v1")
        await self._sync()
        self.upstream.commit({"further": "1"})
        self.upstream.git("branch", "topic")
        await self._sync()
        self._date()

    async def _sync(self) -> None:
        self.tips.append(self.upstream.git("rev-parse", "main"))
        await self.it.mirrors.sync(NAME)

    def _date(self) -> None:
        """The same records, with the times that the tests speak of."""
        path = self.it.mirrors.path(NAME)
        old = git(path, "rev-list", "--reverse", HISTORY).splitlines()
        for commit, day in zip(old, DAYS, strict=True):
            message = git(path, "log", "-1", "--format=%B", commit).encode()
            parent = ("-p", self.records[-1]) if self.records else ()
            env = {"GIT_COMMITTER_DATE": day, "GIT_AUTHOR_DATE": day}
            self.records.append(
                git(path, "commit-tree", f"{commit}^{{tree}}", *parent, stdin=message, env=env)
            )
        git(path, "update-ref", HISTORY, self.records[-1])


def told(
    tmp_path: Path, upstream: Upstream, check: Callable[[Told], Awaitable[None]], **settings: object
) -> None:
    async def body(it: House) -> None:
        story = Told(it, upstream)
        await story.tell()
        await check(story)

    builder = Builder(tmp_path, f"file://{upstream.path.parent}/{{owner}}+{{name}}")
    builder.values |= settings
    builder.run(body)


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("owner+name")
    made.history(4)
    return made


def test_the_log_says_when_and_what(tmp_path: Path, upstream: Upstream) -> None:
    async def check(it: Told) -> None:
        log = await it.it.mirrors.refs_log(NAME)
        assert [record.id for record in log] == it.records[::-1]
        assert [f"{record.at:%Y-%m-%dT%H:%M:%SZ}" for record in log] == list(DAYS[::-1])
        wanted = ["sync: 1 created, 1 forwarded", "sync: 1 forced, 1 deleted", "sync: 2 created"]
        assert [record.summary for record in log] == wanted
        assert [record.ref_count for record in log] == [2, 1, 2]

    told(tmp_path, upstream, check)


@pytest.mark.parametrize(
    ("at", "number"),
    [
        ("2024-01-01T12:00:00Z", 0),
        ("2024-01-31", 0),
        ("2024-02-01T12:59:59+01:00", 0),
        ("2024-02-01T13:00:00+01:00", 1),
        ("2024-02-28 23:59", 1),
        ("2030-01-01", 2),
        ("latest", 2),
    ],
)
def test_a_time_names_the_record_that_stood_then(
    tmp_path: Path, upstream: Upstream, at: str, number: int
) -> None:
    """Times without a zone are UTC; `latest` is the newest. The record's refs are those of upstream
    at that time.
    """

    async def check(it: Told) -> None:
        diff = await it.it.mirrors.refs_diff(NAME, at, at)
        assert (diff.a, diff.b, diff.changes) == (it.records[number], it.records[number], [])
        record = await read_record(it.it.mirrors.repository(NAME), diff.a)
        main = record.followed["refs/heads/main"]
        assert (main, record.head) == (it.tips[number], "refs/heads/main")

    told(tmp_path, upstream, check)


def test_a_diff_tells_who_moved_and_what_is_kept(tmp_path: Path, upstream: Upstream) -> None:
    """Forward moves lose nothing; a forced one and a deletion do, and the old tips are held by kept
    refs.
    """

    async def check(it: Told) -> None:
        diff = await it.it.mirrors.refs_diff(NAME, it.records[0][:10], it.records[1])
        seen = {
            change.ref: (change.kind, change.old, change.new, change.kept)
            for change in diff.changes
        }
        assert seen == {
            "refs/heads/main": ("forced", it.tips[0], it.tips[1], True),
            "refs/tags/v1": ("deleted", it.tag, None, True),
        }
        later = {
            change.ref: change.kind
            for change in (await it.it.mirrors.refs_diff(NAME, DAYS[1], "latest")).changes
        }
        assert later == {"refs/heads/main": "forwarded", "refs/heads/topic": "created"}

    told(tmp_path, upstream, check)


def test_refs_are_put_back_and_forth(tmp_path: Path, upstream: Upstream) -> None:
    """By a time; the figures follow; the restore is itself a record, and can be undone; the next
    sync follows upstream.
    """

    async def check(it: Told) -> None:
        mirrors = it.it.mirrors
        await mirrors.refs_restore(NAME, "2024-01-15")
        assert (await mirrors.resolve(NAME, "main"))[0] == it.tips[0]
        assert (await mirrors.resolve(NAME, "v1"))[0] == it.tips[0]
        shown = await mirrors.describe(NAME)
        refs = await mirrors.repository(NAME).all_refs()
        assert shown.kept_count == sum(ref.startswith("refs/mirrord/kept/") for ref in refs)
        assert shown.ref_count == 2
        log = await mirrors.refs_log(NAME)
        assert log[0].summary.startswith(f"restore {it.records[0][:12]}")
        await mirrors.refs_restore(NAME, log[1].id)
        assert (await mirrors.resolve(NAME, "main"))[0] == it.tips[2]
        await mirrors.refs_restore(NAME, DAYS[0])
        await mirrors.sync(NAME)
        assert (await mirrors.resolve(NAME, "main"))[0] == it.tips[2]

    told(tmp_path, upstream, check)


def test_a_record_that_is_not_there_is_told(tmp_path: Path, upstream: Upstream) -> None:
    """A time before the first says which the first is; rubbish says how to write a time."""

    async def check(it: Told) -> None:
        with pytest.raises(NotFoundError, match="the first one is of 2024-01-01T12:00:00Z"):
            await it.it.mirrors.refs_diff(NAME, "2001-01-01", "latest")
        with pytest.raises(NotFoundError, match="none matches"):
            await it.it.mirrors.refs_restore(NAME, "abcdef0123")
        with pytest.raises(InvalidRequestError):
            await it.it.mirrors.refs_diff(NAME, "yesterday", "latest")

    told(tmp_path, upstream, check)
