"""Scheduled syncs: what upstream does not show any more is asked for rarely, and nothing twice."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from mirrord.catalog import MirrorRow
from mirrord.config.settings import Settings
from mirrord.engine.timetable import Timetable
from mirrord.model import MirrorName, utc_now

NAME = MirrorName("o", "n")
HOUR = timedelta(hours=1)


class Quiet(Timetable):
    async def _finish(self, operation: Any) -> Any:
        return operation


@pytest.mark.parametrize(
    ("code", "was_readable", "attempted", "is_asked"),
    [
        ("upstream-not-found", None, 6 * 24 * HOUR, False),  # a mistyped name
        ("upstream-not-found", None, 8 * 24 * HOUR, True),
        ("upstream-not-found", 10 * HOUR, 9 * HOUR, False),  # as long as it failed for by now
        ("upstream-not-found", 10 * HOUR, 11 * HOUR, True),
        ("upstream-auth", 10 * HOUR, 9 * HOUR, False),
        ("upstream-not-found", 30 * 24 * HOUR, 23 * HOUR, False),  # at least once a day
        ("upstream-not-found", 30 * 24 * HOUR, 25 * HOUR, True),
        ("upstream-unavailable", 10 * HOUR, HOUR, True),
        ("certificate-refused", 10 * HOUR, HOUR, True),
        (None, timedelta(0), timedelta(seconds=1), False),  # by the `mirror add` that made the row
        (None, timedelta(0), timedelta(seconds=11), True),
    ],
)
def test_what_was_asked_for_lately_or_is_not_there_is_left_alone(
    code: str | None, was_readable: timedelta | None, attempted: timedelta, is_asked: bool
) -> None:
    """`was_readable` so long before the last attempt, which was `attempted` ago."""
    at = utc_now() - attempted
    row = MirrorRow(
        name=NAME, url="https://example.com/o/n", added_at=at, attempted_at=at,
        synced_at=None if was_readable is None else at - was_readable,
        error={"code": code} if code else None,
    )  # fmt: skip
    asked: list[MirrorName] = []

    async def find_mirror(_: str) -> MirrorRow:
        return row

    catalog = SimpleNamespace(find_mirror=find_mirror)
    mirrors = SimpleNamespace(catalog=catalog, settings=Settings, is_syncing=lambda _: False)
    work: Any = SimpleNamespace(mirrors=mirrors, sync=asked.append)
    nothing: Any = None
    timetable = Quiet(at, nothing, work, nothing, nothing, nothing)
    anyio.run(timetable._sync, NAME)
    assert asked == [NAME] * is_asked
