"""What killed gits leave in a mirror: found by name and holder, finished or removed, and never in
the way of the next one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import pytest
from gitrepos import Upstream, git
from mirror_parts import NAME, Builder, House

from mirrord.mirrors.maintenance import remove_stale_files
from mirrord.model import CommitId

_LEFT = (
    "packed-refs.new", "packed-refs.lock", "refs/heads/main.lock", "objects/pack/tmp_pack_a1B2c3",
    "objects/pack/.tmp-77-pack-x.idx", "objects/pack/multi-pack-index.lock",
    "objects/info/packs_a1B2c3",
    "objects/info/commit-graphs/tmp_graph_a1B2c3",
)  # fmt: skip


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("owner+name")
    made.history(4)
    return made


@pytest.fixture
def house(tmp_path: Path, upstream: Upstream) -> Builder:
    return Builder(tmp_path, f"file://{upstream.path.parent}/{{owner}}+{{name}}").synced()


@pytest.fixture
def mirror(tmp_path: Path, house: Builder) -> Path:
    return tmp_path / "state/mirrors" / str(NAME)


def _leave(mirror: Path, names: Iterable[str] = _LEFT) -> None:
    for name in names:
        (mirror / name).parent.mkdir(parents=True, exist_ok=True)
        (mirror / name).write_text("")


def test_a_start_removes_what_killed_gits_left(house: Builder, mirror: Path) -> None:
    """And refs can be packed, moved and deleted again."""
    _leave(mirror)

    async def body(it: House) -> None:
        assert [name for name in _LEFT if (mirror / name).exists()] == []
        await it.mirrors.maintain(NAME)

    house.run(body)


def test_a_stale_lock_stops_no_first_operation(
    house: Builder, mirror: Path, upstream: Upstream
) -> None:
    """A git that something else killed left it while the daemon ran."""
    new = upstream.commit({"new": "new"})

    async def body(it: House) -> None:
        _leave(mirror, ["refs/heads/main.lock"])
        await it.mirrors.sync(NAME)
        assert git(mirror, "rev-parse", "main") == new
        _leave(mirror)
        assert await it.mirrors.pin(NAME, [CommitId(new)], owner="person/1", reason="x") == {}
        _leave(mirror)
        await it.mirrors.maintain(NAME)
        assert [name for name in _LEFT if (mirror / name).exists()] == []

    house.run(body)


def test_what_a_process_holds_stays(mirror: Path) -> None:
    """It is at work."""
    _leave(mirror)
    with (mirror / "packed-refs.new").open("a"):
        remove_stale_files(mirror, timedelta())
        assert (mirror / "packed-refs.new").exists()
    remove_stale_files(mirror, timedelta())
    assert not (mirror / "packed-refs.new").exists()


def test_a_pack_of_a_repack_that_died_just_now_is_not_in_the_way(
    house: Builder, mirror: Path
) -> None:
    """Its name says which process it was; one that lives may be about to rename it, and holds
    nothing open then.
    """

    async def body(it: House) -> None:
        command = ["git", "-C", str(mirror), "cat-file", "--batch-check"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        ) as living:
            assert living.stdin and living.stdout
            living.stdin.write(b"HEAD\n")
            assert b"commit" in living.stdout.readline()  # it is git by now
            of_living = mirror / f"objects/pack/.tmp-{living.pid}-pack-{'1' * 40}.pack"
            of_living.write_bytes(b"PACK")
            remove_stale_files(mirror, timedelta())
            assert of_living.exists()
            living.stdin.close()
            os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOWAIT)
            remove_stale_files(mirror, timedelta())
            assert not of_living.exists()  # its process is dead, but not reaped
            of_living.write_bytes(b"PACK")
        await it.mirrors.maintain(NAME)
        assert not of_living.exists()

    house.run(body)


def test_the_locks_of_linked_worktrees_are_their_owners(mirror: Path) -> None:
    """A commit with an editor open holds its index.lock closed."""
    lock = mirror / "worktrees/one/index.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    remove_stale_files(mirror, timedelta())
    assert lock.exists()


def test_a_git_that_dies_leaves_nothing_in_the_way_of_the_next(
    house: Builder, mirror: Path, upstream: Upstream
) -> None:
    """Without a restart, and at any age of the lock."""
    commit = CommitId(upstream.git("rev-parse", "HEAD"))

    async def body(it: House) -> None:
        # as one that was killed a moment ago left it
        lock = mirror / "refs/mirrord/history.lock"
        lock.parent.mkdir(exist_ok=True)
        lock.write_text("")
        upstream.commit({"new": "1"})
        await it.mirrors.sync(NAME)
        assert await it.mirrors.pin(NAME, [commit], owner="person/1", reason="") == {}

    house.run(body)


def test_a_pin_does_not_write_over_the_journal_of_a_killed_sync(
    house: Builder, mirror: Path, upstream: Upstream
) -> None:
    """The journal says which tip is to be kept: without it that tip would be lost."""
    old, new = upstream.git("rev-parse", "HEAD"), upstream.git("rev-parse", "HEAD~2")

    async def body(it: House) -> None:
        journal = f"update refs/heads/main {new} {old}\ncreate refs/mirrord/kept/{old} {old}\n"
        (mirror / "mirrord-transaction").write_text(journal)
        git(mirror, "update-ref", "refs/heads/main", new)  # killed here: moved, and not yet kept
        await it.mirrors.pin(NAME, [CommitId(new)], owner="person/1", reason="")
        assert git(mirror, "rev-parse", f"refs/mirrord/kept/{old}") == old
        assert not (mirror / "mirrord-transaction").exists()

    house.run(body)


def test_a_pack_without_an_index_is_indexed_at_a_start(house: Builder, mirror: Path) -> None:
    """A kill between the two renames leaves that; git does not see such a pack, and an audit calls
    it damage.
    """
    for index in (mirror / "objects/pack").glob("*.idx"):
        index.unlink()

    async def body(_: House) -> None:
        git(mirror, "fsck", "--full")

    house.run(body)


def test_a_damaged_pack_without_an_index_is_left_to_the_audit(house: Builder, mirror: Path) -> None:
    """The daemon starts all the same."""
    pack = mirror / "objects/pack" / f"pack-{'1' * 40}.pack"
    pack.write_bytes(b"PACK" + bytes(40))

    async def body(it: House) -> None:
        assert (await it.mirrors.describe(NAME)).state == "ready"
        assert pack.exists()

    house.run(body)


def test_maintenance_leaves_the_files_of_a_running_import_alone(
    house: Builder, tmp_path: Path
) -> None:
    """Only a start can tell leftovers from files in use."""
    quarantine = tmp_path / "state/quarantine"

    async def body(it: House) -> None:
        (quarantine / "upload-running").mkdir()
        await it.mirrors.maintain(NAME)
        assert (quarantine / "upload-running").exists()

    house.run(body)

    async def later(_: House) -> None:
        assert list(quarantine.iterdir()) == []

    house.run(later)
