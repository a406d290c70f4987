"""Preparing in the background: the base commits of a dataset, oldest first, while there is room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from pathlib import Path

import anyio
import pytest
from gitrepos import Upstream, git

from mirrord import config
from mirrord.catalog import Catalog, DatasetHead, InstanceRow, MirrorRow, encode_row
from mirrord.engine import prewarm
from mirrord.engine.prewarm import Prewarm
from mirrord.git.command import Git, priority_prefix
from mirrord.host.trash import Trash
from mirrord.jobs.events import Events
from mirrord.jobs.operations import Operations
from mirrord.model import CommitId, CommitRole, DatasetName, Direction, History, MirrorName
from mirrord.protocol import Progress, ProgressSink
from mirrord.templates.builder import StoreBuilder
from mirrord.workers.pool import Workers

pytestmark = pytest.mark.anyio
NAME = MirrorName("owner", "name")
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Site:
    """A mirror of four commits and one absent, all recorded by one dataset; what was prepared, in
    order.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        upstream = Upstream(root / "upstream")
        self.line = [CommitId(oid) for oid in upstream.history(4)]
        git(root, "clone", "-q", "--mirror", upstream.url, str(root / "mirror.git"))
        self.prepared: list[CommitId] = []
        self.priorities: set[tuple[str, ...]] = set()
        self.room = 100
        self.prewarm: Prewarm | None = None
        self.on_prepared: Callable[[], Awaitable[None]] | None = None
        self.settings = config.load(None)
        self.operations = Operations(Events())
        self.workers = Workers(size=1)
        self.stores = StoreBuilder(
            state_dir=root,
            git=Git(home=root / "home"),
            workers=self.workers,
            mirrors_path=lambda name: root / "mirror.git",
            trash=Trash(),
        )

    async def run(self, *, then_room: int = 0) -> dict[str, int]:
        """The result of the last operation; `then_room` is the room there is when it is resumed."""
        catalog = await Catalog.open(self.root / "catalog.sqlite3", self.workers)
        try:
            await self._record(catalog)
            self.prewarm = prewarm = Prewarm(
                settings=lambda: self.settings,
                catalog=catalog,
                operations=self.operations,
                prepare=self._prepare,
                oldest_first=self.stores.oldest_first,
                is_full=self.is_full,
            )
            prewarm.start(DatasetName("tiny"))
            (operation,) = self.operations.list()
            ended = await self.operations.wait(operation.id)
            await prewarm.resume()
            if then_room:
                self.room = then_room
                await prewarm.resume()
                (resumed,) = (each for each in self.operations.list() if each.id != operation.id)
                ended = await self.operations.wait(resumed.id)
            assert len(self.operations.list()) == 1 + bool(then_room)
            assert ended.result is not None, ended.error
            return ended.result
        finally:
            await catalog.close()
            await self.workers.close()

    async def _record(self, catalog: Catalog) -> None:
        await catalog.put_mirror(MirrorRow(name=NAME, url="file:///nowhere", added_at=NOW))
        commits = [CommitId("1" * 40), *self.line]
        rows = [
            InstanceRow(
                f"i{n}",
                "",
                NAME,
                commit,
                Direction.FORWARD,
                ((commit, CommitRole.BASE),),
                None,
                None,
                (),
                (),
            )
            for n, commit in enumerate(commits)
        ]
        (self.root / "spool").write_bytes(b"".join(encode_row(row) for row in rows))
        head = DatasetHead(
            name=DatasetName("tiny"),
            format="swe-bench",
            source="tiny.jsonl",
            sha256="0" * 64,
            imported_at=NOW,
            fault_count=0,
            faults=[],
            rules={},
            refused={},
        )
        await catalog.replace_dataset(head, self.root / "spool")

    async def _prepare(self, name: MirrorName, commit: CommitId, history: History) -> None:
        self.priorities.add(priority_prefix())
        await self.stores.ensure(name, commit, history)
        self.prepared.append(commit)
        if self.on_prepared:
            await self.on_prepared()

    async def is_full(self) -> bool:
        return len(self.prepared) >= self.room


async def test_base_commits_are_prepared_oldest_first(tmp_path: Path) -> None:
    """One that the mirror lacks is counted, and the rest is prepared."""
    site = Site(tmp_path)
    assert await site.run() == {"prepared": 4, "failed": 1, "left": 0}
    assert site.prepared == site.line
    assert all("nice" in words for words in site.priorities)
    roots = {
        path.parent.name
        for path in (tmp_path / "templates").glob("*/packs/*/layer.json")
        if '"base": null' in path.read_text()
    }
    assert len(roots) == 1


async def test_commits_of_a_mirror_that_was_never_synced_are_counted(tmp_path: Path) -> None:
    """They fail one by one, so that those of other mirrors are prepared."""
    site = Site(tmp_path)
    (tmp_path / "mirror.git").rename(tmp_path / "elsewhere.git")
    assert await site.run() == {"prepared": 0, "failed": 5, "left": 0}


async def test_nothing_is_prepared_where_it_would_push_out_the_old(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.room = 0
    assert await site.run() == {"prepared": 0, "failed": 0, "left": 5}


async def test_it_goes_on_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an eviction, say; as long as there is none it is not tried. What was prepared before is
    not prepared again.
    """
    monkeypatch.setattr(prewarm, "_CHECK_EVERY", 1)
    site = Site(tmp_path)
    site.room = 1
    assert await site.run(then_room=100) == {"prepared": 3, "failed": 1, "left": 0}
    assert site.prepared == site.line


async def test_a_removal_of_a_mirror_waits_for_what_is_being_prepared_and_goes_before_the_rest(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    removed_after: list[int] = []

    async def remove() -> None:
        assert site.prewarm
        async with site.prewarm.paused(NAME):
            removed_after.append(len(site.prepared))

    async def once() -> None:
        site.on_prepared = None
        tasks.start_soon(remove)
        await anyio.sleep(0.05)
        assert removed_after == [], "a store was being built"

    site.on_prepared = once
    async with anyio.create_task_group() as tasks:
        await site.run()
    assert removed_after == [1]


async def test_nothing_starts_where_the_settings_say_no(tmp_path: Path) -> None:
    site = Site(tmp_path)
    checkouts = site.settings.checkouts.model_copy(update={"prewarm": False})
    site.settings = site.settings.model_copy(update={"checkouts": checkouts})
    Prewarm(
        settings=lambda: site.settings,
        catalog=None,  # type: ignore[arg-type]
        operations=site.operations,
        prepare=site._prepare,
        oldest_first=site.stores.oldest_first,
        is_full=site.is_full,
    ).start(DatasetName("tiny"))
    assert site.operations.list() == []


async def test_who_asks_for_the_same_joins_and_may_leave(tmp_path: Path) -> None:
    """Each commit is prepared once for all; one caller that is cancelled takes nobody with it."""
    site = Site(tmp_path)
    site.settings = site.settings.model_copy(
        update={"checkouts": site.settings.checkouts.model_copy(update={"prewarm": False})}
    )
    shared = Prewarm(
        settings=lambda: site.settings,
        catalog=None,  # type: ignore[arg-type]
        operations=site.operations,
        prepare=site._prepare,
        oldest_first=site.stores.oldest_first,
        is_full=site.is_full,
    )
    commits = await shared.ordered([(NAME, commit) for commit in reversed(site.line)])
    assert commits == [(NAME, commit) for commit in site.line]
    seen: list[Progress] = []

    async def ask(progress: ProgressSink) -> object:
        return await shared.run(DatasetName("tiny"), commits, progress)

    first, other, last = (
        site.operations.start("dataset.prepare", "tiny", run)
        for run in (ask, ask, lambda _: ask(seen.append))
    )

    async def leave() -> None:
        assert (await site.operations.cancel(first.id)).state == "cancelled"

    async def leave_soon() -> None:
        site.on_prepared = None
        tasks.start_soon(leave)

    site.on_prepared = leave_soon
    async with anyio.create_task_group() as tasks:
        ended = [await site.operations.wait(each.id) for each in (other, last)]
    await site.workers.close()
    assert [each.result for each in ended] == [{"prepared": 4, "failed": 0, "left": 0}] * 2
    assert site.prepared == site.line
    assert (seen[-1].done, seen[-1].total) == (4, 4)
