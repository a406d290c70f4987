"""The trash: one queue, emptied in the background, with retries."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import pytest
from mounted_templates import busy
from waiting import BOUND_S

from mirrord.host.mounts import may_mount
from mirrord.host.trash import _BACKLOG, Trash, find_trash, remove_trees

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def tree(path: Path) -> Path:
    (path / "inner").mkdir(parents=True)
    (path / "inner/file").write_text("x")
    return path


async def gone(*paths: Path) -> None:
    with anyio.fail_after(BOUND_S):
        while any(path.exists() for path in paths):
            await anyio.sleep(0.01)


async def test_trees_are_removed_in_batches(tmp_path: Path) -> None:
    batches: list[list[Path]] = []

    async def remover(paths: list[Path]) -> dict[Path, str]:
        batches.append(paths)
        return remove_trees(paths)

    trash, trees = Trash(remover), [tree(tmp_path / f"{n}") for n in range(5)]
    trash.add(*trees[:2])
    for each in trees[2:]:
        trash.add(each)
    await gone(*trees)
    assert sorted(path for batch in batches for path in batch) == trees
    assert len(batches) <= 2
    await trash.close()


async def test_a_complete_take_down_needs_no_removal(tmp_path: Path) -> None:
    async def remover(paths: list[Path]) -> dict[Path, str]:
        raise AssertionError(paths)

    async def take_down() -> bool:
        (tmp_path / "layer").rmdir()
        return True

    (tmp_path / "layer").mkdir()
    trash = Trash(remover)
    trash.add(tmp_path / "layer", take_down=take_down)
    await gone(tmp_path / "layer")
    assert await trash.retry()
    await trash.close()


async def test_a_failed_removal_is_retried(tmp_path: Path) -> None:
    tries: list[int] = []

    async def take_down() -> bool:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("busy")
        return False

    trash, there = Trash(), tree(tmp_path / "tree")
    trash.add(there, take_down=take_down)
    with anyio.fail_after(BOUND_S):
        while not tries:
            await anyio.sleep(0.01)
    await trash.keep_up()  # it holds nobody up
    assert not await trash.retry()
    assert there.exists()
    assert await trash.retry()
    assert (len(tries), there.exists()) == (3, False)
    await trash.close()


@pytest.mark.skipif(not may_mount(), reason="mounting needs CAP_SYS_ADMIN")
async def test_a_discarded_tree_frees_its_name_at_once(tmp_path: Path) -> None:
    trash, there = Trash(), tree(tmp_path / "tree")
    with busy(there / "inner/file"):
        trash.discard(there)
        assert not there.exists()
        assert len(find_trash(tmp_path)) == 1
        assert not await trash.retry()
    assert await trash.retry()
    assert not any(tmp_path.iterdir())
    trash.discard(there)  # a missing one is fine


async def test_a_user_does_not_wait_for_anothers_backlog(tmp_path: Path) -> None:
    """Alice has reached her limit; Bob has not."""
    user, may_go = ["alice"], asyncio.Event()

    async def take_down() -> bool:
        await may_go.wait()
        return True

    trash = Trash(whose=lambda: user[0])
    for number in range(_BACKLOG + 1):
        trash.add(tmp_path / f"{number}", take_down=take_down)
    waiting = asyncio.create_task(trash.keep_up())
    await anyio.wait_all_tasks_blocked()
    user[0] = "bob"
    trash.add(tmp_path / "b", take_down=take_down)
    await trash.keep_up()
    assert not waiting.done()
    may_go.set()
    await waiting
    await trash.close()
    assert not trash._backlogs
