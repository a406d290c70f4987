"""The pool backend on its own: making, resetting and moving trees with real git, as root, for
another user.
"""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from checkout_parts import (
    NAME,
    USER,
    Pool,
    as_user,
    deeds,
    destroy,
    passable_directory,
    running_pool,
)
from gitrepos import Upstream, git
from waiting import BOUND_S

from mirrord.checkouts.lease import Lease
from mirrord.model import CommitId, History
from mirrord.trees import pooled
from mirrord.trees import scan as scanning
from mirrord.trees.manifest import Entries, Manifest, clock_ns
from mirrord.trees.pooled import PoolPaths
from mirrord.trees.scan import ScanResult, examine, scan

pytestmark = pytest.mark.root


@pytest.fixture
def run_pool(make_upstream: Callable[[str], Upstream]) -> Callable[..., None]:
    def run(story: Callable[[Pool, list[str]], Awaitable[None]], commits: int = 4) -> None:
        async def main() -> None:
            upstream = make_upstream("upstream")
            ids = upstream.history(commits)
            with passable_directory() as state:
                async with running_pool(state, upstream) as pool:
                    await story(pool, ids)

        anyio.run(main)

    return run


def test_a_checkout_is_its_owners_and_git_works_in_it(run_pool: Callable[..., None]) -> None:
    """Another user's git finds a clean tree at the base commit that it owns, without complaints
    about ownership.
    """

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[2])
        assert as_user(lease.tree_path, "status", "--porcelain", "--ignored") == ""
        assert as_user(lease.tree_path, "rev-parse", "HEAD") == ids[2]
        assert as_user(lease.tree_path, "write-tree") == lease.base.tree
        assert len(as_user(lease.tree_path, "log", "--format=%H").splitlines()) == 3
        as_user(lease.tree_path, "commit", "--allow-empty", "--quiet", "--message", "mine")
        assert {
            path.lstat().st_uid
            for path in lease.tree_path.rglob("*")
            if ".git/objects/pack" not in str(path)
        } == {USER}

    run_pool(story)


def test_a_damaged_template_is_left_alone(run_pool: Callable[..., None]) -> None:
    """A tree is copied from its template; where that is damaged, it is written from git's."""

    async def story(pool: Pool, ids: list[str]) -> None:
        template = await pool.backend.templates.ensure(NAME, CommitId(ids[2]), History.SEALED)
        pages = [layer.files / "docs/page0.txt" for layer in template.files]
        next(page for page in pages if page.exists()).write_text("damaged")
        lease = await pool.checkout(ids[2])
        assert "damaged" not in (lease.tree_path / "docs/page0.txt").read_text()
        assert as_user(lease.tree_path, "diff-files") == ""
        assert as_user(lease.tree_path, "write-tree") == lease.base.tree

    run_pool(story)


def test_reset_moves_to_another_commit_by_the_difference(run_pool: Callable[..., None]) -> None:
    """A file that both commits have keeps its inode."""

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[0])
        inode = (lease.tree_path / "docs/page0.txt").stat().st_ino
        proof = await pool.reset(lease, ids[3])
        assert proof.head == ids[3]
        assert (lease.tree_path / "docs/page0.txt").stat().st_ino == inode
        assert as_user(lease.tree_path, "rev-parse", "HEAD", "HEAD^{tree}").split() == [
            ids[3],
            proof.tree,
        ]
        assert as_user(lease.tree_path, "status", "--porcelain", "--ignored") == ""

    run_pool(story)


def packs_of(lease: Lease) -> dict[str, tuple[int, int]]:
    return {
        path.name: (path.stat().st_ino, path.stat().st_size)
        for path in (lease.tree_path / ".git/objects/pack").iterdir()
    }


async def settle(pool: Pool, lease: Lease) -> None:
    """Reset once all files are older than what a tick of the clock could hide."""
    await anyio.sleep(0.1)
    await pool.reset(lease, lease.base.commit)


@pytest.mark.parametrize("uid", [USER, 0])
def test_a_reset_with_nothing_changed_writes_nothing(
    run_pool: Callable[..., None], uid: int
) -> None:
    """No file is opened for writing, no pack is linked or copied: not for another user, and not for
    root.
    """

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[2], uid=uid)
        await settle(pool, lease)
        packs, place = packs_of(lease), await pool.place(lease, ids[2])
        with deeds() as done:
            proof = pooled.make_clean(place, ids[2], lease.base.tree)
        assert done == []
        assert (proof.files_restored, proof.files_removed) == (0, 0)
        assert packs_of(lease) == packs

    run_pool(story)


@pytest.mark.parametrize("uid", [USER, 0])
def test_a_move_writes_only_differences(run_pool: Callable[..., None], uid: int) -> None:
    """One file more: that file, HEAD, the index, the packs that are new, and the manifest; what
    both commits have stays.
    """

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[1], uid=uid)
        await settle(pool, lease)
        packs, place = packs_of(lease), await pool.place(lease, ids[2])
        with deeds() as done:
            pooled.make_clean(place, ids[2], pool.tree_of(ids[2]))
        changed = git(pool.mirror, "diff", "--name-only", ids[1], ids[2]).split()
        new = packs_of(lease).keys() - packs.keys()
        put = {f"write {name}" for name in new}
        written = {
            f"write {Path(name).name}" for name in (*changed, "HEAD", "index", "manifest.spare")
        }
        assert set(done) == written | put
        assert packs.items() <= packs_of(lease).items()

    run_pool(story)


@pytest.mark.parametrize("uid", [USER, 0])
def test_a_reset_of_one_file_writes_that_file(run_pool: Callable[..., None], uid: int) -> None:
    """The index is still valid, though it names another inode; the packs stay where they are."""

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[1], uid=uid)
        await settle(pool, lease)
        packs, place = packs_of(lease), await pool.place(lease, ids[1])
        (lease.tree_path / "README").write_text("changed")
        with deeds() as done:
            proof = pooled.make_clean(place, ids[1], lease.base.tree)
        assert set(done) == {"write README", "write manifest.spare"}
        assert proof.files_restored == 1
        assert as_user(lease.tree_path, "diff-files", uid=uid) == ""
        assert packs_of(lease) == packs

    run_pool(story)


@pytest.mark.parametrize(("slack_ns", "later_ns"), [(0, 0), (2 * 10**9, 10**9)])
def test_a_file_of_the_tick_of_a_scan_stays_racy(
    run_pool: Callable[..., None], monkeypatch: pytest.MonkeyPatch, slack_ns: int, later_ns: int
) -> None:
    """Though what was written after it is read back later: a change in that tick would have the
    ctime that is on record.
    """

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[1])
        place = await pool.place(lease, ids[2])
        manifest = Manifest.load(place.manifest)
        young_ns = manifest.files[b"docs/page0.txt"].ctime_ns
        manifest.settled(young_ns).save(place.manifest)
        ticks = iter([young_ns + later_ns])
        monkeypatch.setattr(scanning, "clock_ns", lambda: next(ticks, clock_ns() + 10**10))
        monkeypatch.setattr(Manifest, "slack_ns", slack_ns)
        pooled.make_clean(place, ids[2], pool.tree_of(ids[2]))
        after = Manifest.load(place.manifest)
        assert after.files[b"docs/page0.txt"].ctime_ns == young_ns >= after.racy_from_ns

    run_pool(story)


def test_files_of_a_move_are_read_back_once(
    run_pool: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next scan reads none of it again, where it was written more than a tick of the clock
    before.
    """

    def examine_later(*given: Any) -> ScanResult:
        time.sleep(0.05)
        return examine(*given)

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[0])
        await settle(pool, lease)
        place = await pool.place(lease, ids[3])
        monkeypatch.setattr(pooled, "examine", examine_later)
        pooled.make_clean(place, ids[3], pool.tree_of(ids[3]))
        assert scan(place.tree, Manifest.load(place.manifest)).hashed == 0

    run_pool(story)


def test_root_cannot_hide_a_change_behind_its_clock(run_pool: Callable[..., None]) -> None:
    """Root's files are read: a stat that is all as it was proves nothing."""

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[1], uid=0)
        await settle(pool, lease)
        place = await pool.place(lease, ids[1])
        (lease.tree_path / "README").write_text("forged")
        pack = next((lease.tree_path / ".git/objects/pack").glob("*.pack"))
        with pack.open("r+b") as file:
            file.seek(20)
            file.write(b"forged")
        forge_record(place)
        proof = pooled.make_clean(place, ids[1], lease.base.tree)
        assert proof.files_restored == 1
        assert git(lease.tree_path, "status", "--porcelain", "--ignored") == ""
        git(lease.tree_path, "fsck", "--full", "--strict")

    run_pool(story)


def forge_record(place: PoolPaths) -> None:
    """Make the record agree with every stat on disk, as a clock that is set back would."""
    manifest = Manifest.load(place.manifest)
    parts = [
        {
            path: entry.with_stat(os.lstat(os.fsencode(place.tree) + b"/" + path))
            for path, entry in part.items()
        }
        for part in (manifest.files, manifest.control)
    ]
    replace(
        manifest, files=Entries(parts[0]), control=parts[1], recorded_ns=time.time_ns() + 10**9
    ).save(place.manifest)


def test_a_linked_checkout_is_a_worktree_without_a_branch(run_pool: Callable[..., None]) -> None:
    """The mirror lists it, detached and locked; nothing is left of it after it was destroyed."""

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[1], uid=os.getuid(), history=History.LINKED)
        assert git(lease.tree_path, "status", "--porcelain", "--ignored") == ""
        assert git(lease.tree_path, "rev-parse", "HEAD", "main").split() == [ids[1], ids[3]]
        assert git(pool.mirror, "branch", "--list").split() == ["*", "main"]
        await pool.reset(lease, ids[2])
        assert git(lease.tree_path, "rev-parse", "HEAD") == ids[2]
        assert str(lease.tree_path) in git(pool.mirror, "worktree", "list")
        await destroy(pool.backend, pool.leases.release(lease), lease)
        assert str(lease.tree_path) not in git(pool.mirror, "worktree", "list")

    run_pool(story)


def test_a_lost_manifest_means_a_tree_written_again(run_pool: Callable[..., None]) -> None:
    """A reset without a whole manifest trusts nothing that is there."""

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[1])
        (lease.private / "manifest").write_bytes(b"torn")
        (lease.tree_path / "README").write_text("forged")
        proof = await pool.reset(lease, ids[1])
        assert "written again" in proof.method
        assert as_user(lease.tree_path, "status", "--porcelain", "--ignored") == ""

    run_pool(story)


# -- what has to go ------------------------------------------------------------------------------


def test_removed_directories_are_renamed_whole(run_pool: Callable[..., None]) -> None:
    """One rename for a directory of fifty files, one for each file that is replaced; nothing is
    deleted before the answer.
    """

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[1])
        await settle(pool, lease)
        place = await pool.place(lease, ids[1])
        (lease.tree_path / "README").write_text("changed")
        (lease.tree_path / "created").mkdir()
        for number in range(50):
            (lease.tree_path / f"created/{number}").write_text("created")
        proof = pooled.make_clean(place, ids[1], lease.base.tree)
        assert proof.files_removed == 1
        assert stat.S_IMODE(place.trash.stat().st_mode) == 0o700
        assert [len(list(path.iterdir())) for path in place.trash.iterdir() if path.is_dir()] == [
            50
        ]
        assert len(list(place.trash.iterdir())) == len(["created", "README"])

    run_pool(story)


def test_renamed_directories_are_deleted_soon(run_pool: Callable[..., None]) -> None:
    """After the answer; it lies beside the checkouts, in none of them. What a killed removal left
    goes with the adoption.
    """

    async def story(pool: Pool, ids: list[str]) -> None:
        lease = await pool.checkout(ids[1])
        (lease.tree_path / "created/deep").mkdir(parents=True)
        await pool.reset(lease, ids[1])
        assert list(lease.directory.parent.glob(".trash-*"))
        assert os.listdir(lease.directory) == ["tree"]
        await until_gone(lease.directory.parent)
        (lease.directory / ".trash-left/0").mkdir(parents=True)
        await pool.backend.adopt(lease)
        await until_gone(lease.directory)
        assert as_user(lease.tree_path, "status", "--porcelain", "--ignored") == ""

    run_pool(story)


async def until_gone(directory: Path) -> None:
    with anyio.fail_after(BOUND_S):
        while any(path.name.startswith(".trash-") for path in directory.iterdir()):
            await anyio.sleep(0.02)


def test_a_reset_frees_a_disk_that_its_owner_filled(
    make_upstream: Callable[[str], Upstream],
) -> None:
    """Moved away it would still take the room that the reset needs."""

    async def story(pool: Pool) -> None:
        ids = git(pool.mirror, "rev-list", "HEAD").split()
        lease = await pool.checkout(ids[0])
        (lease.tree_path / "README").unlink()
        with suppress(OSError), (lease.tree_path / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        proof = await pool.reset(lease, ids[0])
        assert (proof.files_restored, proof.files_removed) == (1, 1)
        assert as_user(lease.tree_path, "status", "--porcelain", "--ignored") == ""

    async def main(state: Path) -> None:
        upstream = make_upstream("upstream")
        upstream.history(2)
        async with running_pool(state, upstream) as pool:
            await story(pool)

    with passable_directory() as directory:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m,mode=711", "tmpfs", str(directory)], check=True
        )
        try:
            anyio.run(main, directory)
        finally:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
