"""Closure packs: their union is the closure and nothing else, they are shared, and chains stay short."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from gitrepos import Upstream, git
from waiting import BOUND_S

from mirrord.errors import CommitNotFoundError, CommitUnservableError, CorruptObjectError
from mirrord.git import command
from mirrord.git.command import Git
from mirrord.git.packs import PackIndex
from mirrord.host import children
from mirrord.host.children import Popen
from mirrord.host.trash import Trash
from mirrord.jobs.operations import Deferred, answering
from mirrord.model import CommitId, MirrorName
from mirrord.templates import chains
from mirrord.templates import packer as packing_module
from mirrord.templates.closures import Closures
from mirrord.templates.packer import PackFile, check_written
from mirrord.templates.store import BUILDING, remove_leftovers
from mirrord.workers.pool import Workers

pytestmark = pytest.mark.slow

NAME = MirrorName("owner", "name")


class Site:
    """A bare mirror of an upstream, and the closure packs built from it."""

    def __init__(self, root: Path) -> None:
        self.upstream = Upstream(root / "upstream")
        self.root = root
        self.mirror = root / "mirror.git"
        self.recorded: list[CommitId] = []
        self.answers_at_once = False

    def clone(self) -> None:
        shutil.rmtree(self.mirror, ignore_errors=True)
        git(self.root, "clone", "-q", "--mirror", self.upstream.url, str(self.mirror))

    def run(self, body: Callable[[Closures], Awaitable[None]]) -> None:
        async def main() -> None:
            workers = Workers(size=1)
            afterwards = Deferred()
            try:
                git = Git(home=self.root / "home")
                closures = Closures(
                    root=self.root / "templates",
                    git=git,
                    workers=workers,
                    trash=Trash(),
                    deferred=afterwards,
                    mirrors_path=lambda name: self.mirror,
                    recorded=self._recorded,
                    shared=None,
                )
                with nullcontext() if self.answers_at_once else answering():
                    await body(closures)
            finally:
                await afterwards.close()
                await workers.close()

        anyio.run(main)

    async def _recorded(self, name: MirrorName) -> list[CommitId]:
        return self.recorded

    def closure(self, commit: str) -> set[str]:
        return {
            line[:40] for line in git(self.mirror, "rev-list", "--objects", commit).splitlines()
        }


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def objects_of(packs: tuple[PackFile, ...]) -> set[str]:
    return {oid.hex() for pack in packs for oid in PackIndex(pack.index)}


def test_the_union_of_a_chain_is_exactly_the_closure(site: Site) -> None:
    """For every commit of a history with merges, in an order that jumps about."""
    line = site.upstream.history(4)
    site.upstream.git("checkout", "-q", "-b", "topic", line[1])
    topic = site.upstream.commit({"topic.txt": "topic\n"})
    site.upstream.git("checkout", "-q", "main")
    site.upstream.git("merge", "-q", "--no-ff", "-m", "merge", "topic")
    merge = site.upstream.git("rev-parse", "HEAD")
    revert = site.upstream.commit({"topic.txt": None})
    site.clone()

    async def body(closures: Closures) -> None:
        for commit in (line[2], merge, topic, revert, line[0], line[3]):
            packs = await closures.ensure(NAME, CommitId(commit))
            assert objects_of(packs) == site.closure(commit)

    site.run(body)


def test_the_root_is_the_oldest_recorded_commit_of_the_line(site: Site) -> None:
    """Asked for the newest first, an older recorded commit still needs no pack of its own closure."""
    line = [CommitId(oid) for oid in site.upstream.history(8)]
    site.clone()
    site.recorded = [line[2], line[5]]

    async def body(closures: Closures) -> None:
        newest = await closures.ensure(NAME, line[7])
        assert [pack.path.parent.name for pack in newest] == [line[2], line[7]]
        middle = await closures.ensure(NAME, line[5])
        assert [pack.path.parent.name for pack in middle] == [line[2], line[5]]
        assert [pack.path for pack in await closures.ensure(NAME, line[2])] == [newest[0].path]

    site.run(body)


def test_chains_stay_short_and_share_waypoints(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many commits along one line: no chain is longer than the limit, and little is packed twice."""
    monkeypatch.setattr(chains, "STRIDES", (16, 4))
    monkeypatch.setattr(chains, "CHAIN_LIMIT", 8)
    line = [CommitId(oid) for oid in site.upstream.history(40)]
    site.clone()
    site.recorded = line[:1]

    async def body(closures: Closures) -> None:
        packs = [await closures.ensure(NAME, commit) for commit in (*line[1::3], *line[::5])]
        assert max(map(len, packs)) <= 8
        last = await closures.ensure(NAME, line[-1])
        assert objects_of(last) == site.closure(line[-1])
        kept = {pack.path: pack.object_count for chain in packs for pack in chain}
        assert sum(kept.values()) < 4 * len(site.closure(line[-1]))

    site.run(body)


def test_an_older_neighbour_shares_the_root(site: Site) -> None:
    """With nothing recorded the root lies below what is asked for first."""
    line = [CommitId(oid) for oid in site.upstream.history(6)]
    site.clone()

    async def body(closures: Closures) -> None:
        newer = await closures.ensure(NAME, line[5])
        older = await closures.ensure(NAME, line[2])
        assert older[0] == newer[0]
        assert objects_of(older) == site.closure(line[2])

    site.run(body)


def test_variants_of_one_commit_share_their_parent(site: Site) -> None:
    """From the second one on each adds no more than its own commit, tree and blob."""
    line = site.upstream.history(5)
    variants = []
    for number in range(4):
        site.upstream.git("checkout", "-q", "-B", f"variant{number}", line[4])
        variants.append(CommitId(site.upstream.commit({"README": f"variant {number}\n"})))
    site.clone()

    async def body(closures: Closures) -> None:
        chains = [await closures.ensure(NAME, variant) for variant in variants]
        assert [pack.object_count for pack in (chain[-1] for chain in chains[1:])] == [3, 3, 3]
        for variant, chain in zip(variants, chains, strict=True):
            assert objects_of(chain) == site.closure(variant)

    site.run(body)


def test_packs_are_found_again_by_another_daemon(site: Site) -> None:
    line = [CommitId(oid) for oid in site.upstream.history(3)]
    site.clone()
    built: list[tuple[PackFile, ...]] = []

    async def body(closures: Closures) -> None:
        built.append(await closures.ensure(NAME, line[2]))

    site.run(body)
    inode = built[0][0].path.stat().st_ino
    site.run(body)
    assert built[0] == built[1]
    assert built[1][0].path.stat().st_ino == inode


def test_a_pack_that_was_deleted_is_built_again(site: Site) -> None:
    line = [CommitId(oid) for oid in site.upstream.history(4)]
    site.clone()
    site.recorded = line[:1]

    async def body(closures: Closures) -> None:
        first = await closures.ensure(NAME, line[3])
        shutil.rmtree(first[0].path.parent)
        again = await closures.ensure(NAME, line[3])
        assert objects_of(again) == site.closure(line[3])

    site.run(body)


def test_a_pack_that_a_power_cut_shortened_is_built_again(site: Site) -> None:
    line = [CommitId(oid) for oid in site.upstream.history(2)]
    site.clone()

    async def body(closures: Closures) -> None:
        *_, pack = await closures.ensure(NAME, line[1])
        pack.path.chmod(0o644)
        pack.path.write_bytes(pack.path.read_bytes()[:-8] + bytes(8))

    async def after(closures: Closures) -> None:
        *_, pack = await closures.ensure(NAME, line[1])
        git(site.mirror, "verify-pack", str(pack.index))

    site.run(body)
    site.run(after)


def test_an_absent_commit_is_not_found_and_leaves_nothing(site: Site) -> None:
    site.upstream.history(2)
    site.clone()

    async def body(closures: Closures) -> None:
        with pytest.raises(CommitNotFoundError):
            await closures.ensure(NAME, CommitId("1" * 40))
        assert not list((site.root / "templates").rglob("*"))

    site.run(body)


@pytest.mark.parametrize("damage", ["missing", "swapped"])
def test_a_damaged_mirror_serves_nothing(site: Site, damage: str) -> None:
    """A blob that is gone, and one with the bytes of another, which git itself packs without a word."""
    line = [CommitId(oid) for oid in site.upstream.history(3)]
    site.clone()
    pack = next((site.mirror / "objects/pack").glob("*.pack")).rename(site.mirror / "moved")
    shutil.rmtree(site.mirror / "objects/pack")
    git(site.mirror, "unpack-objects", "-q", stdin=pack.read_bytes())
    victim, other = (git(site.mirror, "rev-parse", f"{line[n]}:docs/page{n}.txt") for n in (2, 1))
    file = site.mirror / "objects" / victim[:2] / victim[2:]
    file.unlink()
    if damage == "swapped":
        shutil.copyfile(site.mirror / "objects" / other[:2] / other[2:], file)

    async def body(closures: Closures) -> None:
        with pytest.raises(CommitUnservableError) as caught:
            await closures.ensure(NAME, line[2])
        assert caught.value.facts["commit"] == line[2]
        assert not [
            path
            for path in closures.directory(NAME).iterdir()
            if path.name.startswith((BUILDING, line[2]))
        ]
        assert objects_of(await closures.ensure(NAME, line[1])) == site.closure(line[1])

    site.run(body)


def test_a_lying_commit_graph_does_not_change_what_is_packed(site: Site) -> None:
    """With a commit-graph and a bitmap in the mirror the packs are the same, and a hidden hole is found."""
    line = [CommitId(oid) for oid in site.upstream.history(6)]
    site.clone()
    git(site.mirror, "repack", "-adbq")
    git(site.mirror, "commit-graph", "write", "--reachable", "--changed-paths")

    async def body(closures: Closures) -> None:
        assert objects_of(await closures.ensure(NAME, line[3])) == site.closure(line[3])

    async def with_a_hole(closures: Closures) -> None:
        objects = git(site.mirror, "rev-list", "--objects", "--all").splitlines()
        keep = "\n".join(line_[:40] for line_ in objects if not line_.startswith(line[4])).encode()
        old = list((site.mirror / "objects/pack").iterdir())
        git(site.mirror, "pack-objects", "-q", str(site.mirror / "objects/pack/pack"), stdin=keep)
        for file in old:
            file.unlink()
        with pytest.raises(CommitUnservableError):
            await closures.ensure(NAME, line[5])

    site.run(body)
    site.run(with_a_hole)


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    (tmp_path / f"{BUILDING}abc/x").mkdir(parents=True)
    (tmp_path / ("1" * 40)).mkdir()
    assert remove_leftovers(tmp_path, Trash()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["1" * 40]


@pytest.mark.parametrize("suffix", [".pack", ".idx"])
def test_what_is_copied_from_a_damaged_pack_is_hashed(
    site: Site, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """However large: an altered object stops the build, the altered end of an index does not, at
    which git does not look.
    """
    monkeypatch.setattr(packing_module, "VERIFY_MAX_OBJECTS", 5)
    line = [CommitId(oid) for oid in site.upstream.history(3)]
    site.clone()
    file = next((site.mirror / "objects/pack").glob(f"*{suffix}"))
    file.chmod(0o644)

    async def body(closures: Closures) -> None:
        assert objects_of(await closures.ensure(NAME, line[1])) == site.closure(line[1])
        data = bytearray(file.read_bytes())
        data[-1 if suffix == ".idx" else len(data) // 2] ^= 1
        file.write_bytes(data)
        shutil.rmtree(site.root / "templates")
        if suffix == ".pack":
            with pytest.raises(CommitUnservableError):
                await closures.ensure(NAME, line[1])
        else:
            monkeypatch.setattr(command, "start", noted)
            assert objects_of(await closures.ensure(NAME, line[1])) == site.closure(line[1])
            assert "verify-pack" in words

    words: list[str] = []
    start = children.start

    def noted(argv: Sequence[str], *rest: Any) -> Popen:
        words.extend(argv)
        return start(argv, *rest)

    site.run(body)


def count_processes(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    """Note the command of every git that is started from here on."""
    start = children.start
    known = ("rev-list", "pack-objects", "verify-pack", "cat-file")

    def counted(argv: Sequence[str], *rest: Any) -> Popen:
        started.append(next(word for word in argv if word in known))
        return start(argv, *rest)

    monkeypatch.setattr(command, "start", counted)


def test_the_first_closure_costs_two_processes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """One walks, one packs what the first lists while it lists it; a worker finds the root, a thread reads the sources."""
    line = [CommitId(oid) for oid in site.upstream.history(3)]
    site.clone()
    started: list[str] = []

    async def body(closures: Closures) -> None:
        count_processes(monkeypatch, started)
        assert objects_of(await closures.ensure(NAME, line[2])) == site.closure(line[2])

    site.run(body)
    assert sorted(started) == ["pack-objects", "rev-list"]


def test_a_small_pack_of_unchecked_sources_is_hashed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a start of the daemon, which knows of no pack that it was read."""
    monkeypatch.setattr(chains, "SHORT", 4)
    line = [CommitId(oid) for oid in site.upstream.history(20)]
    site.clone()
    site.recorded = line[:1]
    started: list[str] = []

    async def root(closures: Closures) -> None:
        await closures.ensure(NAME, line[0])

    async def wide_step(closures: Closures) -> None:
        count_processes(monkeypatch, started)
        assert objects_of(await closures.ensure(NAME, line[16])) == site.closure(line[16])

    site.run(root)
    site.run(wide_step)
    assert sorted(started) == ["pack-objects", "rev-list", "verify-pack"]


@pytest.mark.parametrize("suffix", [".pack", ".idx"])
def test_a_written_pack_is_read_back(site: Site, suffix: str) -> None:
    line = [CommitId(oid) for oid in site.upstream.history(3)]
    site.clone()

    async def body(closures: Closures) -> None:
        pack = (await closures.ensure(NAME, line[2]))[0]
        check_written(PackIndex(pack.index))
        file = pack.path.with_suffix(suffix)
        file.chmod(0o644)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptObjectError):
            check_written(PackIndex(pack.index))

    site.run(body)


def test_neighbours_of_a_first_commit_find_waypoints_laid(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer waits for a root and one wide step; what is between follows: a neighbour costs one small layer."""
    monkeypatch.setattr(chains, "STRIDES", (16, 4))
    monkeypatch.setattr(chains, "AHEAD_STRIDE", 2)
    monkeypatch.setattr(chains, "ROOT_MARGINS", (16, 32))
    line = [CommitId(oid) for oid in site.upstream.history(20)]
    site.clone()
    site.answers_at_once = True

    async def body(closures: Closures) -> None:
        first = await closures.ensure(NAME, line[19])
        assert [pack.path.parent.name for pack in first] == [line[3], line[19]]
        waypoints = set(line[5:19:2])
        with anyio.fail_after(BOUND_S):
            while laid(closures) != {line[3], line[19], *waypoints}:
                await anyio.sleep(0.01)
        near = await closures.ensure(NAME, line[16])
        assert objects_of(near) == site.closure(line[16])
        assert [pack.path.parent.name for pack in near] == [
            line[3],
            line[7],
            line[11],
            line[15],
            line[16],
        ]
        assert laid(closures) == {line[3], line[19], *waypoints, line[16]}

    site.run(body)


def laid(closures: Closures) -> set[str]:
    return {file.parent.name for file in closures.directory(NAME).glob("[0-9a-f]*/layer.json")}


def test_a_walk_that_fails_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packer has had half of the list by then."""
    line = [CommitId(oid) for oid in site.upstream.history(3)]
    site.clone()
    monkeypatch.setattr(
        packing_module, "WALK", (*packing_module.WALK, "--stdin", "--no-such-option")
    )

    async def body(closures: Closures) -> None:
        with pytest.raises(CommitUnservableError):
            await closures.ensure(NAME, line[2])
        assert not list(closures.directory(NAME).iterdir())

    site.run(body)


def test_a_packer_that_ends_early_does_not_hang_the_walk(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is longer than a pipe holds, and is not read."""
    site.upstream.history(1)
    many = CommitId(
        site.upstream.commit({f"many/{number}.txt": f"{number}\n" for number in range(4000)})
    )
    site.clone()
    monkeypatch.setattr(packing_module, "_PACK", (*packing_module._PACK, "no-such-command"))

    async def body(closures: Closures) -> None:
        with anyio.fail_after(BOUND_S), pytest.raises(CommitUnservableError):
            await closures.ensure(NAME, many)

    site.run(body)


def test_a_near_closure_costs_no_process(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack of a few commits is walked, written and read back by a worker; git is not started."""
    line = [CommitId(oid) for oid in site.upstream.history(30)]
    site.clone()
    started: list[str] = []

    async def body(closures: Closures) -> None:
        await closures.ensure(NAME, line[10])
        count_processes(monkeypatch, started)
        for commit in (line[20], line[15], line[29]):
            packs = await closures.ensure(NAME, commit)
            assert objects_of(packs) == site.closure(commit)
            git(site.mirror, "verify-pack", str(packs[-1].index))

    site.run(body)
    assert not started


def test_the_first_neighbour_below_costs_no_process(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root lies further away than neighbours do; a worker reads as far as that, and makes the way-points."""
    line = [CommitId(oid) for oid in site.upstream.history(100)]
    site.clone()
    started: list[str] = []

    async def body(closures: Closures) -> None:
        await closures.ensure(NAME, line[99])
        count_processes(monkeypatch, started)
        packs = await closures.ensure(NAME, line[80])
        assert objects_of(packs) == site.closure(line[80])

    site.run(body)
    assert not started


def test_a_large_increment_is_packed_by_git(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """One commit may add thousands of files: the worker gives up within its bounds."""
    line = site.upstream.history(2)
    many = CommitId(
        site.upstream.commit({f"many/{number}.txt": f"{number}\n" for number in range(2100)})
    )
    site.clone()

    async def body(closures: Closures) -> None:
        await closures.ensure(NAME, CommitId(line[1]))
        packs = await closures.ensure(NAME, many)
        assert objects_of(packs) == site.closure(many)
        assert packs[-1].object_count > 2100

    site.run(body)


def test_an_increment_follows_merges_moves_and_reverts(site: Site) -> None:
    """A side branch, a directory that moved, a file that became a directory, a submodule, a revert: nothing is left out."""
    line = site.upstream.history(3)
    site.upstream.git("checkout", "-q", "-b", "side", line[0])
    site.upstream.commit({"side/a.txt": "a\n" * 500, "side/deep/b.txt": "b\n"})
    site.upstream.git("checkout", "-q", "main")
    site.upstream.git("merge", "-q", "--no-ff", "-m", "merge", "side")
    site.upstream.git("mv", "side", "moved")
    site.upstream.git("commit", "-q", "-m", "move")
    site.upstream.commit({"README": None, "README/now.txt": "a directory\n"})
    site.upstream.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    site.upstream.git("commit", "-q", "-m", "submodule")
    site.upstream.git("revert", "--no-edit", "HEAD~1")
    tip = CommitId(site.upstream.git("rev-parse", "HEAD"))
    site.clone()

    async def body(closures: Closures) -> None:
        await closures.ensure(NAME, CommitId(line[2]))
        packs = await closures.ensure(NAME, tip)
        assert len(packs) > 1
        assert objects_of(packs) == site.closure(tip)

    site.run(body)
