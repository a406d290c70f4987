"""Builds sealed stores: the `.git` of sealed and squashed checkouts, with nothing else in it.

Owns `templates/<mirror>/gits/`. A store has a detached HEAD, a short configuration, the tags of
ancestors, and closure packs as hard links; no remote, alternates, reflog or hook. Its index is
written with the tree. It is built in a temporary directory and renamed.
"""

import hashlib
import os
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio.to_thread

from ..catalog import Composition
from ..datasets.submodules import has_whole, whole_of
from ..errors import CommitUnservableError, InvalidRequestError
from ..git.command import Git
from ..git.graphs import graph_is_whole
from ..git.objects.modules import compose
from ..host.room import UNBOUNDED, Room
from ..host.trash import Trash, new_trash
from ..jobs.operations import Deferred
from ..model import CommitId, History, MirrorName, Resolved
from ..places import whole_path
from ..presence import exists, matching
from ..telemetry import log
from ..trees.reader import weigh
from ..workers.coalesce import Coalescer
from ..workers.pool import CALL_TIMEOUT, Workers
from . import store as disk
from .closures import Closures, Recorded, nothing_recorded
from .modules import config_of, place_module, place_objects
from .packer import PackFile, together, write_graph
from .store import Filtering, SealedStore, StoreKey, modules_sum
from .tags import Tag, Tags, packed_refs

if TYPE_CHECKING:  # the store's library is an extra, and takes 0.1 s
    from ..fleet.exchange import SharedClosures


CompositionOf = Callable[[MirrorName, CommitId], Awaitable[Composition | None]]


async def no_composition(_name: MirrorName, _commit: CommitId) -> Composition | None:
    return None


GRAPH_MIN_OBJECTS = 20_000  # with fewer, `log`, `blame` and `describe` are as fast without a graph
# git takes a directory without `objects` and `refs` for no repository, even if they are empty
_DIRECTORIES = ("", "info", "objects", "objects/pack", "refs")


class _StoreFiles(NamedTuple):
    head: CommitId
    tree: str
    packs: Sequence[PackFile]
    tags: Sequence[Tag]
    graph: Path | None = None
    config: bytes = disk.CONFIG


@dataclass(kw_only=True, eq=False)
class StoreBuilder:
    """The sealed stores of all mirrors, below `state_dir/templates`.

    `held` counts the users of a store, `used_at` has the time of its last use.
    """

    state_dir: Path
    git: Git
    workers: Workers
    trash: Trash
    mirrors_path: Callable[[MirrorName], Path]
    recorded: Recorded = nothing_recorded
    composition_of: CompositionOf = no_composition
    room: Room = UNBOUNDED
    shared: "SharedClosures | None" = None

    def __post_init__(self) -> None:
        self._root = self.state_dir / "templates"
        self._tags = Tags(self.git)
        self._deferred = Deferred()
        self._closures = Closures(
            root=self._root, git=self.git, workers=self.workers, trash=self.trash,
            deferred=self._deferred, mirrors_path=self.mirrors_path, recorded=self.recorded,
            shared=self.shared,
        )  # fmt: skip
        self.commits, self.known_packs = self._closures.commits, self._closures.known_packs
        self._found: dict[StoreKey, SealedStore] = {}
        self._builds: Coalescer[SealedStore] = Coalescer()
        self._stores: dict[str, dict[Path, SealedStore]] = {}
        self._read: set[str] = set()  # mirrors of which `_stores` has all
        self._building: Counter[str] = Counter()
        self.held: Counter[Path] = Counter()
        self.used_at: dict[Path, float] = {}
        self.hits = self.misses = 0
        self._stats: dict[Path, dict[str, disk.StoreStat]] = {}  # of stores known as intact

    async def open(self) -> None:
        """Remove what killed builds left."""

        def clean_up() -> None:
            for directory in (*matching(self._root, "*/gits"), *matching(self._root, "*/packs")):
                if removed := disk.remove_leftovers(directory, self.trash):
                    log.info("leftovers.removed", directory=str(directory), count=removed)

        await anyio.to_thread.run_sync(clean_up)

    async def close(self) -> None:
        await self._builds.close()
        await self._deferred.close()

    def find(self, name: MirrorName, commit: CommitId, history: History) -> SealedStore | None:
        """Return the finished store, None where it is not on disk."""
        key = (name.key, commit, history)
        cached = self._found.get(key)
        store = cached or disk.load(self.path(name, commit, history), name)
        if store is None or not exists(store.git):
            self._found.pop(key, None)
            return None
        if cached is None:
            self._note(store)
        self.used_at[store.path] = time.time()
        return store

    async def ensure(self, name: MirrorName, commit: CommitId, history: History) -> SealedStore:
        """Return the store, built once for all callers, as long as one of them waits.

        Raises CommitNotFoundError, CommitUnservableError, DiskFullError; InvalidRequestError for
        the linked history.
        """
        if history is History.LINKED:
            raise InvalidRequestError(
                "cannot seal a linked checkout: it shows the whole mirror",
                hint="use history sealed or squashed",
            )
        store = self.find(name, commit, history)
        self.hits += store is not None
        self.misses += store is None
        return store or await self._builds.join(
            f"{name.key} {commit} {history}", lambda _: self._build(name, commit, history)
        )

    async def ensure_intact(self, store: SealedStore) -> SealedStore:
        """Return a store that checkouts borrow from, built again where it is damaged.

        Root of a container that shows it may write to it. A file whose stat changed is read; that
        of a pack also changes with each new link.
        """
        stats, before = disk.stats_of(store), self._stats.get(store.path, {})
        if stats == before:
            return store
        changed = [path for path, seen in stats.items() if before.get(path) != seen]
        damage = await self.workers.run(disk.find_damage, store, changed)
        if damage:
            log.warning("store.damaged", store=str(store.path), damage=damage[:3])
            await self.remove(self.discard(store))
            packs = {Path(path).stem for path in changed if path.endswith((".pack", ".idx"))}
            for pack in packs:  # the closure's own, which is the same file
                for file in matching(self._closures.directory(store.mirror), f"*/{pack}.*"):
                    await self.remove(file.parent)
            return await self.ensure(store.mirror, store.commit, store.history)
        self._stats[store.path] = stats
        return store

    async def oldest_first(self, name: MirrorName, commits: Collection[CommitId]) -> list[CommitId]:
        """Return the order in which stores share most; commits that the mirror lacks come last."""
        done = await self.git.run(
            "rev-list", "--no-walk", "--reverse", "--ignore-missing", "--stdin",
            git_dir=self.mirrors_path(name),
            stdin="".join(f"{commit}\n" for commit in sorted(commits)).encode(),
            doing="order commits",
        )  # fmt: skip
        ordered = [CommitId(line) for line in done.lines]
        return [*ordered, *sorted(set(commits).difference(ordered))]

    # -- what exists -------------------------------------------------------------------------------

    async def list_stores(self, name: MirrorName) -> list[SealedStore]:
        stores = self._stores.setdefault(name.key, {})
        if name.key not in self._read:
            for store, used_at in await anyio.to_thread.run_sync(
                disk.read_records, self._directory(name), name
            ):
                stores.setdefault(store.path, store)
                # a time of the future is of a clock that was wrong
                self.used_at.setdefault(store.path, min(used_at, time.time()))
            self._read.add(name.key)
        return list(stores.values())

    def discard(self, store: SealedStore) -> Path:
        """Take a store out of use at once; returns the path to `remove`, which may wait for the
        disk.
        """
        discarded = new_trash(store.path.parent)
        try:
            store.path.rename(discarded)  # first, so that no checkout mounts a part of it
            store.record.rename(discarded / store.record.name)
        except FileNotFoundError:
            store.record.unlink(missing_ok=True)
        self._found.pop(store.key, None)
        self._stores.get(store.mirror.key, {}).pop(store.path, None)
        self.used_at.pop(store.path, None)
        self._stats.pop(store.path, None)
        return discarded

    async def remove(self, path: Path) -> None:
        """Delete a discarded store, a damaged one, or a pack layer. The packs of a store stay."""
        await anyio.to_thread.run_sync(self.trash.discard, path)

    @contextmanager
    def holding(self, store: SealedStore) -> Iterator[None]:
        """Keep a store on disk inside. Await nothing between `find` and this."""
        path = self.hold(store.path)
        try:
            yield
        finally:
            self.let_go(path)

    def hold(self, path: Path) -> Path:
        """Keep the store at a path on disk until `let_go`."""
        self.held[path] += 1
        return path

    def let_go(self, path: Path) -> None:
        self.held[path] -= 1
        if not self.held[path]:
            del self.held[path]

    async def evict_packs(self, name: MirrorName) -> int:
        """Remove closure packs of no store, unless a build may link one; returns their bytes."""
        await self.list_stores(name)

        def needed() -> set[str] | None:
            if self._building[name.key]:
                return None
            return {pack for store in self._stores[name.key].values() for pack in store.packs}

        return await self._closures.keep_only(name, needed)

    async def evict_composed(self, name: MirrorName) -> int:
        """Remove the composed trees of a mirror of which no store has one; returns their bytes.

        The caller knows that no checkout needs them. The next store composes its tree again.
        """
        path, stores = whole_path(self._root, str(name)), await self.list_stores(name)
        if self._building[name.key] or any(store.whole for store in stores) or not exists(path):
            return 0
        discarded = new_trash(path.parent)
        path.rename(discarded)  # nothing was awaited since the look
        weights = await self.workers.run(weigh, {"": [(discarded,)]}, CALL_TIMEOUT.total_seconds())
        await self.remove(discarded)
        return weights[""].total_bytes

    async def remove_mirror(self, name: MirrorName) -> None:
        """Remove every store and pack of a mirror that was removed."""
        self._found = {key: store for key, store in self._found.items() if key[0] != name.key}
        for path in self._stores.pop(name.key, {}):
            self.used_at.pop(path, None)
        self._read.discard(name.key)
        self._closures.forget(name)
        self._tags.forget(self.mirrors_path(name))
        for directory in (self._directory(name), self._closures.directory(name)):
            for path in matching(directory, "*"):
                await anyio.to_thread.run_sync(self.trash.discard, path)
            with suppress(OSError):  # not empty
                directory.rmdir()

    def path(self, name: MirrorName, commit: CommitId, history: History) -> Path:
        return disk.store_path(self.state_dir, name, commit, history)

    def _directory(self, name: MirrorName) -> Path:
        return self._root / str(name) / "gits"

    def _note(self, store: SealedStore) -> None:
        self._found[store.key] = store
        self._stores.setdefault(store.mirror.key, {})[store.path] = store
        self.used_at[store.path] = time.time()

    # -- building ----------------------------------------------------------------------------------

    async def _build(self, name: MirrorName, commit: CommitId, history: History) -> SealedStore:
        await self.room.ensure(f"seal {commit}")
        directory, target = self._directory(name), self.path(name, commit, history)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._building[name.key] += 1
        try:
            with disk.building(directory, self.trash) as temporary:
                git, scratch = temporary / ".git", temporary / "scratch"
                if history is History.SQUASHED:
                    resolved = await self.commits.get(name, commit)
                    contents = await self._squashed(name, resolved, scratch)
                else:
                    contents = await self._sealed(name, commit)
                composition = await self.ensure_composed(name, commit)
                modules = composition.modules if composition else ()
                filtering = Filtering.NONE
                if composition and composition.pointers:
                    has_all_pointers = composition.lfs_missing == composition.pointers
                    filtering = Filtering.OFF if has_all_pointers else Filtering.OURS
                contents = contents._replace(config=config_of(modules, filtering=filtering))
                control = await anyio.to_thread.run_sync(_write, git, contents)
                if composition and composition.tree:
                    await self._place(temporary, name, commit, composition)
                if history is History.SQUASHED:
                    await anyio.to_thread.run_sync(shutil.rmtree, scratch)
                disk.publish(temporary, target)
            store = SealedStore(
                path=target,
                mirror=name,
                commit=commit,
                history=history,
                head=contents.head,
                tree=contents.tree,
                packs=tuple(pack.path.name for pack in contents.packs),
                pack_sizes=tuple(pack.size_bytes for pack in contents.packs),
                tag_count=len(contents.tags),
                control=control,
                whole=(composition.tree or "") if composition else "",
                modules=await anyio.to_thread.run_sync(modules_sum, target)
                if composition and composition.tree
                else "",
            )
            # last, because a store is known by its record
            disk.save(store)
            self._stats[target] = disk.stats_of(store)
            self._note(store)
        finally:
            self._building[name.key] -= 1
        counts = {"packs": len(store.packs), "tags": store.tag_count}
        log.info("store.built", mirror=str(name), commit=commit, history=str(history), **counts)
        return store

    async def ensure_composed(self, name: MirrorName, commit: CommitId) -> Composition | None:
        """Write the composed tree of a base commit unless it is here; return what it needs.

        Raises CommitUnservableError where LFS objects are not here, as on another host of a fleet:
        a layer would have pointers in their place.
        """
        composition = await self.composition_of(name, commit)
        target = whole_path(self._root, str(name))
        if composition and composition.tree and not has_whole(target, composition):
            whole = whole_of(self.mirrors_path, name, commit, composition)
            composed = await self.workers.run(compose, target, [whole])
            if composed != [composition.tree]:
                raise CommitUnservableError(
                    f"cannot check out commit {commit} of {name}: the LFS objects on this host are"
                    " not those of its import",
                    hint="import its data set here; the store of a fleet has no LFS objects",
                )
        return composition

    async def _place(
        self, top: Path, name: MirrorName, commit: CommitId, composition: Composition
    ) -> None:
        """Put the submodules and LFS objects of a base commit into its unfinished store."""
        run, mirror = self.workers.run, self.mirrors_path(name)
        if composition.pointers:
            await run(place_objects, mirror, commit, top / ".git")
        # those above first: a submodule within another stands in its tree
        for module in sorted(composition.modules, key=lambda part: part.path.count("/")):
            sub = MirrorName.parse(module.mirror)
            store = await self.ensure(sub, CommitId(module.commit), History.SEALED)
            with self.holding(store):
                await run(
                    place_module, top, module, composition.modules, self.mirrors_path(sub),
                    store.git,
                )  # fmt: skip

    def recompose(self, compositions: Mapping[tuple[str, CommitId], Composition]) -> None:
        """Discard stores with other submodules than an import has found now."""
        names: dict[str, list[str]] = {}
        for path in self._root.iterdir():
            names.setdefault(path.name.lower(), []).append(path.name)
        for (key, commit), composition in compositions.items():
            for history in (History.SEALED, History.SQUASHED):
                for name in names.get(key, ()):
                    store = self.find(MirrorName.parse(name), commit, history)
                    if store and store.whole != (composition.tree or ""):
                        discarded = self.discard(store)
                        if store.path not in self.held:
                            self.trash.add(discarded)

    async def _sealed(self, name: MirrorName, commit: CommitId) -> _StoreFiles:
        mirror = self.mirrors_path(name)
        resolved, packs, tags = await together(
            self.commits.get(name, commit),
            self._closures.ensure(name, commit),
            self._tags.list(mirror),
        )
        shown = await self._tags.within(mirror, tags, [pack.index for pack in packs])
        return _StoreFiles(commit, resolved.tree, packs, tuple(shown), self._find_graph(packs))

    def _find_graph(self, packs: Sequence[PackFile]) -> Path | None:
        """Return the commit-graph up to the last large pack; None, and writes it after the answer,
        where it is absent or torn.

        git reads later commits from the packs. Like packs, the graph is not flushed.
        """
        large = [end for end, pack in enumerate(packs, 1) if pack.object_count >= GRAPH_MIN_OBJECTS]
        if not large:
            return None
        chain = packs[: large[-1]]
        graph = chain[-1].path.with_name("commit-graph")
        if graph_is_whole(graph):
            return graph
        work = partial(write_graph, self.git, self.trash, graph, chain)
        self._deferred.begin(("commit-graph", graph), work)
        return None

    async def _squashed(self, name: MirrorName, resolved: Resolved, scratch: Path) -> _StoreFiles:
        """Write the squashed commit as a loose object in `scratch`, and pack it from there."""
        head, body = squashed_commit(resolved)
        file = scratch / "objects" / head[:2] / head[2:]
        file.parent.mkdir(parents=True)
        file.write_bytes(zlib.compress(body))
        mirror = self.mirrors_path(name)
        pack = await self._closures.packer.pack_range(mirror, head, None, scratch)
        return _StoreFiles(head, resolved.tree, [pack], [])


# of the tree and its time alone, so that each daemon makes the same commit
_SQUASHED = """tree {tree}
author mirrord <mirrord@localhost> {time} +0000
committer mirrord <mirrord@localhost> {time} +0000

base of this task

The history before this commit is not part of the checkout.
"""


def squashed_commit(resolved: Resolved) -> tuple[CommitId, bytes]:
    """Return the id and the object of the only commit of a squashed checkout."""
    body = _SQUASHED.format(tree=resolved.tree, time=resolved.time).encode()
    body = b"commit %d\0%s" % (len(body), body)
    return CommitId(hashlib.sha1(body, usedforsecurity=False).hexdigest()), body


def _write(git: Path, contents: _StoreFiles) -> str:
    """Write a `.git`; returns the checksum of its control files."""
    for directory in _DIRECTORIES:
        os.mkdir(f"{git}/{directory}", 0o755)
    for pack in contents.packs:
        for source in (pack.path, pack.index):
            disk.link_or_copy(source, git / "objects/pack" / source.name)
    if contents.graph:
        (git / disk.GRAPH).parent.mkdir(mode=0o755)
        disk.link_or_copy(contents.graph, git / disk.GRAPH)
    control = [f"{contents.head}\n".encode(), contents.config, packed_refs(contents.tags)]
    for name, content in zip(disk.CONTROL_FILES, control, strict=True):
        (git / name).write_bytes(content)
    return disk.control_sum(control)
