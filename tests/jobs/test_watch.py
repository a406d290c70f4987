"""The watched directory: what counts as a complete file, and when it is handled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from waiting import BOUND_S

from mirrord.errors import InvalidDatasetError
from mirrord.jobs.watch import Watch, is_complete_name, signature_of

QUIET = timedelta(seconds=0.05)


class Handled:
    """Records handled paths; fails for names that contain `bad`."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    async def __call__(self, path: Path) -> None:
        self.paths.append(path)
        if "bad" in path.name:
            raise InvalidDatasetError("cannot read it")

    async def until(self, count: int) -> None:
        with anyio.fail_after(BOUND_S):
            while len(self.paths) < count:
                await anyio.sleep(0.01)


def run(
    directory: Path,
    story: Callable[[Watch, Handled], Awaitable[None]],
    known: tuple[str, ...] = (),
    interval: timedelta = timedelta(minutes=1),
) -> Handled:
    handled = Handled()

    async def main() -> None:
        signatures = {
            directory / name: signature
            for name in known
            if (signature := signature_of(directory / name))
        }
        watch = Watch(
            directory, is_complete_name, handled, known=signatures, quiet=QUIET, interval=interval
        )
        await watch.open()
        try:
            await story(watch, handled)
        finally:
            await watch.close()

    anyio.run(main)
    return handled


def test_a_file_that_is_there_already_is_handled(tmp_path: Path) -> None:
    """Files written while no daemon ran are found at the start."""
    (tmp_path / "a.jsonl").write_text("{}")
    assert run(tmp_path, lambda _, handled: handled.until(1)).paths == [tmp_path / "a.jsonl"]


def test_a_known_file_is_left_alone_until_it_changes(tmp_path: Path) -> None:
    """A file handled by an earlier daemon is handled again only when it was rewritten."""
    file = tmp_path / "a.jsonl"
    file.write_text("{}")

    async def story(_: Watch, handled: Handled) -> None:
        await anyio.sleep(0.15)
        assert not handled.paths
        file.write_text("{} ")
        await handled.until(1)

    run(tmp_path, story, known=("a.jsonl",))


def test_a_moved_in_file_is_handled_once(tmp_path: Path) -> None:
    """A rename into the directory is one arrival."""
    (tmp_path / "in").mkdir()
    (tmp_path / "outside.jsonl").write_text("{}")

    async def story(_: Watch, handled: Handled) -> None:
        (tmp_path / "outside.jsonl").rename(tmp_path / "in" / "a.jsonl")
        await handled.until(1)
        await anyio.sleep(0.15)

    assert run(tmp_path / "in", story).paths == [tmp_path / "in" / "a.jsonl"]


def test_a_file_that_grows_is_handled_only_when_it_rests(tmp_path: Path) -> None:
    """A slow writer's file is not read before it is complete."""
    file = tmp_path / "a.jsonl"

    async def story(_: Watch, handled: Handled) -> None:
        for n in range(20):
            file.write_text("x" * (n + 1))
            await anyio.sleep(0.01)
        assert not handled.paths
        await handled.until(1)

    run(tmp_path, story)


def test_a_failure_is_not_retried_until_the_file_changes(tmp_path: Path) -> None:
    """An invalid file is handled once, not at every check."""
    file = tmp_path / "bad.jsonl"
    file.write_text("x")

    async def story(_: Watch, handled: Handled) -> None:
        await handled.until(1)
        await anyio.sleep(0.15)
        assert len(handled.paths) == 1
        file.write_text("xy")
        await handled.until(2)

    run(tmp_path, story, interval=timedelta(seconds=0.02))


def test_files_are_found_without_inotify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "_observe", lambda *_: None)

    async def story(_: Watch, handled: Handled) -> None:
        await anyio.sleep(0.1)
        (tmp_path / "a.jsonl").write_text("{}")
        await handled.until(1)

    run(tmp_path, story, interval=timedelta(seconds=0.02))


def test_directories_and_symlinks_are_not_files(tmp_path: Path) -> None:
    """A symlink could point to files that only the daemon may read."""
    (tmp_path / "dir.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
    (tmp_path / "a.jsonl").write_text("{}")
    assert run(tmp_path, lambda _, handled: handled.until(1)).paths == [tmp_path / "a.jsonl"]


@pytest.mark.parametrize(
    "name",
    [
        ".a.jsonl",
        "a.jsonl.tmp",
        "a.part",
        "a.jsonl~",
        "#a.jsonl#",
        "a.json.crdownload",
        "A.PARTIAL",
    ],
)
def test_names_of_unfinished_files_do_not_count(name: str) -> None:
    """Names that editors and copy tools give to unfinished files."""
    assert not is_complete_name(name)
