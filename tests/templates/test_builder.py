"""The `.git` of a sealed checkout: it holds its closure, works as a user expects, and leads nowhere else."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from gitrepos import Upstream, git
from waiting import BOUND_S

from mirrord.errors import CommitNotFoundError, InvalidRequestError
from mirrord.git.command import Git
from mirrord.git.graphs import graph_commits
from mirrord.host.trash import Trash
from mirrord.model import CommitId, History, MirrorName
from mirrord.seal.verify import verify_seal
from mirrord.templates import builder as builder_module
from mirrord.templates.builder import StoreBuilder
from mirrord.templates.store import SealedStore
from mirrord.templates.tags import Tag
from mirrord.workers.pool import Workers

pytestmark = pytest.mark.slow

NAME = MirrorName("owner", "name")
ABSENT = CommitId("1" * 40)


class Site:
    """A mirror with eight commits, tags on the third (nested, annotated, light) and the seventh, and stores built from it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.upstream = Upstream(root / "upstream")
        self.line = [CommitId(oid) for oid in self.upstream.history(8)]
        tag = self.upstream.git
        tag("tag", "light", self.line[2])
        tag("tag", "-a", "-m", "release", "v1.0", self.line[2])
        tag("tag", "-a", "-m", "nested", "nested", "v1.0")
        tag("tag", "-a", "-m", "later", "v2.0", self.line[6])
        tag("tag", "-a", "-m", "a tree", "tree", f"{self.line[1]}^{{tree}}")
        self.mirror = root / "mirror.git"
        git(root, "clone", "-q", "--mirror", self.upstream.url, str(self.mirror))

    def run(self, body: Callable[[StoreBuilder], Awaitable[None]]) -> None:
        async def main() -> None:
            workers = Workers(size=1)
            stores = StoreBuilder(
                state_dir=self.root,
                git=Git(home=self.root / "home"),
                workers=workers,
                mirrors_path=lambda name: self.mirror,
                trash=Trash(),
            )
            try:
                await stores.open()
                await body(stores)
            finally:
                await workers.close()

        anyio.run(main)

    def build(self, commit: CommitId, history: History = History.SEALED) -> SealedStore:
        built: list[SealedStore] = []

        async def body(stores: StoreBuilder) -> None:
            built.append(await stores.ensure(NAME, commit, history))

        self.run(body)
        return built[0]

    def checkout(self, store: SealedStore) -> Path:
        """A private copy with a tree and an index, as a user gets it."""
        path = self.root / "checkout"
        shutil.copytree(store.path, path)
        git(path, "reset", "-q", "--hard")
        return path


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_sealed_store_is_sealed(site: Site) -> None:
    """Judged by verify_seal against the mirror and by itself; fsck finds nothing."""
    store = site.build(site.line[4])
    assert (store.head, store.tree) == (
        site.line[4],
        site.upstream.git("rev-parse", f"{site.line[4]}^{{tree}}"),
    )
    assert verify_seal(store.path, site.line[4], site.mirror).leaks == []
    assert verify_seal(store.path, site.line[4]).sealed
    assert git(store.path, "fsck", "--full", "--strict") == ""


def test_tags_that_moved_are_not_remembered(site: Site) -> None:
    """As many are held after eight moves, each with stores and packs of its own, as after four."""

    async def body(stores: StoreBuilder) -> None:
        held = []
        for number, commit in enumerate(site.line):
            git(site.mirror, "tag", "-f", "light", site.line[-1 - number])
            await stores.ensure(NAME, commit, History.SEALED)
            if number % 4 == 3:
                gc.collect()
                held.append(sum(type(each) is Tag for each in gc.get_objects()))
        assert 0 < held[1] <= held[0]
        await stores.remove_mirror(NAME)
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) is Tag]

    site.run(body)


def test_tags_on_ancestors_are_there_and_no_others(site: Site) -> None:
    """Light, annotated and nested ones, all as refs to their commit; none on a later commit, none on a tree."""
    store = site.build(site.line[4])
    assert git(store.path, "tag").split() == ["light", "nested", "v1.0"]
    assert (store.git / "packed-refs").read_text().count(site.line[2]) == 3
    assert git(store.path, "describe", "--tags", "--match=v*") == f"v1.0-2-g{site.line[4][:7]}"
    assert site.build(site.line[1]).tag_count == 0
    assert site.build(site.line[7]).tag_count == 4


def test_a_store_has_no_other_files(site: Site) -> None:
    """No remote, alternates, reflog, hook, description or index; each directory more is one to make for every first checkout."""
    store = site.build(site.line[4])
    names = {
        path.relative_to(store.git).as_posix()
        for path in store.git.rglob("*")
        if path.parent.name != "pack"
    }
    assert names == {"HEAD", "config", "packed-refs", "info", "objects", "objects/pack", "refs"}
    assert set(store.packs) == {path.name for path in (store.git / "objects/pack").glob("*.pack")}


def test_a_user_can_work_in_it(site: Site) -> None:
    """status, log, blame, describe, commit, stash, diff and gc."""
    path = site.checkout(site.build(site.line[4]))
    assert git(path, "status", "--porcelain") == ""
    assert git(path, "log", "--format=%H").split() == site.line[4::-1]
    assert git(path, "blame", "-s", "docs/page3.txt").startswith(site.line[3][:7])
    (path / "README").write_text("changed\n")
    assert "+changed" in git(path, "diff")
    git(path, "stash", "-q")
    git(path, "stash", "pop", "-q")
    git(path, "commit", "-qam", "mine")
    git(path, "gc", "-q", "--prune=now")
    assert git(path, "fsck", "--full") == ""
    assert git(path, "rev-parse", "HEAD~1") == site.line[4]


def test_a_later_commit_cannot_be_read(site: Site) -> None:
    path = site.checkout(site.build(site.line[4]))
    for name in (site.line[5], "v2.0", "main", "origin/main"):
        with pytest.raises(AssertionError):
            git(path, "cat-file", "-e", f"{name}^{{commit}}")


def test_squashed_is_one_deterministic_commit(site: Site) -> None:
    """No parents, no tags, the tree of the base, nothing else; the same id each time, and nothing of upstream in its message."""
    store = site.build(site.line[4], History.SQUASHED)
    path = site.checkout(store)
    assert git(path, "rev-list", "--all", "HEAD") == store.head
    assert (
        git(path, "rev-parse", "HEAD^{tree}")
        == store.tree
        == site.upstream.git("rev-parse", f"{site.line[4]}^{{tree}}")
    )
    assert git(path, "tag") == ""
    assert git(path, "log", "--format=%an %ct") == "mirrord " + site.upstream.git(
        "log", "-1", "--format=%ct", site.line[4]
    )
    assert verify_seal(store.path, site.line[4], site.mirror).leaks == []
    assert verify_seal(store.path, store.head).leaks == []
    shutil.rmtree(site.root / "templates")
    assert site.build(site.line[4], History.SQUASHED).head == store.head
    assert site.line[3] not in git(path, "cat-file", "commit", "HEAD")


def test_stores_share_packs_and_one_users_gc_harms_no_other(site: Site) -> None:
    """Packs are hard links; deleting or repacking in one checkout leaves the others whole."""
    first, second = site.build(site.line[4]), site.build(site.line[5])
    shared = set(first.packs) & set(second.packs)
    assert shared
    name = shared.pop()
    assert (first.git / "objects/pack" / name).samefile(second.git / "objects/pack" / name)
    shutil.rmtree(first.git / "objects/pack")
    assert git(second.path, "fsck", "--full") == ""


def test_a_store_is_built_once_however_many_ask(site: Site) -> None:
    async def body(stores: StoreBuilder) -> None:
        found: list[SealedStore] = []

        async def ask() -> None:
            found.append(await stores.ensure(NAME, site.line[4], History.SEALED))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)
        assert len({id(store) for store in found}) == 1
        assert stores.find(NAME, site.line[4], History.SEALED) is found[0]

    site.run(body)


def test_a_store_is_found_again_and_rebuilt_when_it_was_deleted(site: Site) -> None:
    """By another daemon, and after its directory was deleted by hand."""
    store = site.build(site.line[4])

    async def body(stores: StoreBuilder) -> None:
        assert stores.find(NAME, site.line[4], History.SEALED) == store
        shutil.rmtree(store.git)
        assert stores.find(NAME, site.line[4], History.SEALED) is None
        assert await stores.ensure(NAME, site.line[4], History.SEALED) == store
        await stores.remove(stores.discard(store))
        assert stores.find(NAME, site.line[4], History.SEALED) is None
        await stores.ensure(NAME, site.line[4], History.SEALED)
        await stores.remove_mirror(NAME)
        assert list((site.root / "templates/owner__name").iterdir()) == []

    site.run(body)


@pytest.mark.parametrize(
    "name", ["HEAD", "config", "packed-refs", "objects/pack/*.pack", "objects/pack/*.idx"]
)
@pytest.mark.parametrize("kept", [0, 0.5])
def test_a_file_torn_by_a_power_failure_is_built_again(site: Site, name: str, kept: float) -> None:
    """Nothing in the store was flushed: it is a cache, and is not served when a file of it is not as long as it was written."""
    store = site.build(site.line[4])
    for file in store.git.glob(name):
        file.chmod(0o644)
        os.truncate(file, int(file.stat().st_size * kept))

    async def after(stores: StoreBuilder) -> None:
        assert stores.find(NAME, site.line[4], History.SEALED) is None
        assert await stores.ensure(NAME, site.line[4], History.SEALED) == store
        assert verify_seal(store.path, site.line[4]).sealed
        git(store.path, "fsck", "--full", "--strict")

    site.run(after)


def test_a_store_gets_the_commit_graph_of_its_large_packs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written behind the first store, linked by the next; of the closure only; one that a power cut tore is written again."""
    monkeypatch.setattr(builder_module, "GRAPH_MIN_OBJECTS", 3)
    built: list[SealedStore] = []

    def graph(store: SealedStore) -> Path:
        return store.git / "objects/info/commit-graph"

    async def body(stores: StoreBuilder) -> None:
        built.append(await stores.ensure(NAME, site.line[3], History.SEALED))
        assert not graph(built[0]).exists()
        with anyio.fail_after(BOUND_S):
            while not list(site.root.glob("templates/*/packs/*/commit-graph")):
                await anyio.sleep(0.02)
        await stores.remove(stores.discard(built[0]))
        built.append(await stores.ensure(NAME, site.line[3], History.SEALED))

    async def after(stores: StoreBuilder) -> None:
        assert stores.find(NAME, site.line[3], History.SEALED) is None
        await stores.ensure(NAME, site.line[3], History.SEALED)

    site.run(body)
    assert {oid.hex() for oid in graph_commits(graph(built[1]))} <= set(site.line[:4])
    git(built[1].path, "commit-graph", "verify")
    assert verify_seal(built[1].path, site.line[3]).sealed
    graph(built[1]).chmod(0o644)
    os.truncate(graph(built[1]), 100)
    site.run(after)
    assert verify_seal(built[1].path, site.line[3]).sealed


def test_leftovers_of_a_killed_build_are_removed_at_the_start(site: Site) -> None:
    store = site.build(site.line[4])
    (store.path.parent / ".building-x").mkdir()
    half = store.path.parent / f"sealed-{site.line[5]}"
    shutil.copytree(store.path, half)

    async def body(stores: StoreBuilder) -> None:
        assert not (store.path.parent / ".building-x").exists()
        assert stores.find(NAME, site.line[5], History.SEALED) is None
        assert (await stores.ensure(NAME, site.line[5], History.SEALED)).head == site.line[5]
        assert verify_seal(half, site.line[5]).sealed

    site.run(body)


def test_a_damaged_tag_is_left_out(site: Site) -> None:
    """It is no reason to refuse the checkout."""
    tag = git(site.mirror, "rev-parse", "v1.0")
    objects = [
        line[:40] for line in git(site.mirror, "rev-list", "--objects", "--all").splitlines()
    ]
    old = list((site.mirror / "objects/pack").iterdir())
    keep = "\n".join(oid for oid in objects if oid != tag).encode()
    git(site.mirror, "pack-objects", "-q", str(site.mirror / "objects/pack/pack"), stdin=keep)
    for file in old:
        file.unlink()
    assert git(site.build(site.line[4]).path, "tag").split() == ["light"]


def test_a_store_that_cannot_be_built_is_an_error(site: Site) -> None:
    async def body(stores: StoreBuilder) -> None:
        with pytest.raises(CommitNotFoundError):
            await stores.ensure(NAME, ABSENT, History.SEALED)
        with pytest.raises(CommitNotFoundError):
            await stores.ensure(NAME, ABSENT, History.SQUASHED)
        with pytest.raises(InvalidRequestError):
            await stores.ensure(NAME, site.line[1], History.LINKED)
        assert not list((site.root / "templates").rglob("*.json"))

    site.run(body)
