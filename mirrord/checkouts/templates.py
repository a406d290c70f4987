"""The template store: immutable, verified layers that overlay checkouts are mounted on.

Owns `templates/<mirror>/trees` and `templates/<mirror>/indexes`, and which templates stay. A template is a stack of directories, top
first: the index layer of one owner, the sealed `.git` (made by `gitdirs.py`), deltas, a keyframe. The index has a layer of its own because
git compares uid and gid, which an idmapped mount changes, and because it is big where a one-file delta is small.

A layer is built in a temporary directory, proven by content and renamed: a crash leaves a temporary directory, which `open` removes. What
was proven before the last boot is proven again before it is used. The store is a cache: whatever is damaged or gone is built again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio.to_thread
import structlog

from ..config import Settings
from ..errors import CheckoutBusyError, IntegrityError, NotFoundError
from ..git.workers import Workers
from ..jobs.events import Events
from ..model import CommitId, History, MirrorName
from .gitdirs import Gitdir, Gitdirs
from .layer import Layer, files_path, write_record
from .shelf import Holds, Owner, Shelf, load_shelf

_Key = tuple[str, CommitId, History, Owner | None]

# Named, not imported: they load libgit2, which only workers do.
_BUILD = "mirrord.checkouts.layers:build_layer"
_VERIFY = "mirrord.checkouts.layerproof:verify_layer"
_INDEX = "mirrord.checkouts.stacks:write_index"
_TIMEOUT = timedelta(minutes=10)
_IDLE_INDEXES = 64

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Template:
    """`layers` are the lower directories, top first. `owner` is whom the index is for; None has no index layer."""

    mirror: MirrorName
    commit: CommitId
    history: History
    head: CommitId
    tree: str
    owner: Owner | None
    layers: tuple[Path, ...]
    size_bytes: int


class Templates:
    """The templates of all mirrors. All methods belong to the event loop's thread."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        state_dir: Path,
        workers: Workers,
        mirrors_path: Callable[[MirrorName], Path],
        gitdirs: Gitdirs,
        events: Events,
    ) -> None:
        self._settings = settings
        self._store = state_dir / "templates"
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._gitdirs = gitdirs
        self._events = events
        self._shelves: dict[str, Shelf] = {}
        self._found: dict[_Key, Template] = {}
        self._holds = Holds()
        self._retired: list[tuple[Path, Path]] = []  # where it was, where it is
        self._locks: dict[str, asyncio.Lock] = {}
        self._flights: dict[_Key, asyncio.Task[Template]] = {}

    async def open(self) -> None:
        """Find what is there; remove what a killed build left."""
        self._store.mkdir(parents=True, exist_ok=True, mode=0o700)
        await anyio.to_thread.run_sync(self._load)

    async def close(self) -> None:
        """Cancel what is being built."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def find(self, name: MirrorName, commit: CommitId, history: History, owner: Owner | None) -> Template | None:
        """A template that is ready, from memory; it costs one stat for each layer."""
        template = self._found.get((name.key, commit, history, owner))
        if template is None:
            return None
        if not all(map(os.path.isdir, template.layers)):
            self._forget_gone(template)
            return None
        self._touch(template)
        return template

    async def ensure(self, name: MirrorName, commit: CommitId, history: History, owner: Owner | None) -> Template:
        """A template, built and proven when there is none; once, however many ask. A caller that is cancelled leaves it to the rest.

        `owner` None prepares all but the index. Raises CommitNotFoundError, CommitUnservableError, CorruptObjectError, DiskFullError.
        """
        if found := self.find(name, commit, history, owner):
            return found
        key = (name.key, commit, history, owner)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.get_running_loop().create_task(self._make(name, commit, history, owner))
            flight.add_done_callback(lambda done: self._land(key, done))
        return await asyncio.shield(flight)

    def hold(self, template: Template) -> None:
        """Say that a checkout uses a template: its layers stay until it is dropped. Call with no await since `find` or `ensure`."""
        self._holds.add(template.layers)

    def drop(self, template: Template) -> None:
        """The other half of `hold`."""
        self._holds.drop(template.layers)

    def hold_layers(self, layers: Iterable[Path]) -> None:
        """`hold` for a checkout found again after a restart, by what it is mounted on."""
        self._holds.add(tuple(layers))

    def drop_layers(self, layers: Iterable[Path]) -> None:
        """`drop` for a checkout found again after a restart."""
        self._holds.drop(tuple(layers))

    def size_bytes(self) -> int:
        """What trees, indexes and sealed stores take; a pack that several stores share counts once."""
        return sum(shelf.size_bytes() for shelf in self._shelves.values())

    # -- keeping within bounds ------------------------------------------------------------------------------------------

    async def evict(self) -> int:
        """Drop the least recently used, never what a checkout holds, until all fits into `template_bytes`; answers how many went."""
        packs = await anyio.to_thread.run_sync(_packs_bytes, self._store)
        limit = self._settings().checkouts.template_bytes
        evicted = 0
        while self.size_bytes() + sum(packs.values()) > limit:
            victim = self._least_used()
            if victim is None:
                break
            shelf, tree = victim
            await self._retire(shelf, tree)
            evicted += 1
            if not shelf.layers:
                packs.pop(shelf.directory.name, None)
                await self._drop_gitdirs(shelf)
        if evicted:
            self._events.publish("templates.evicted", count=evicted, size_bytes=self.size_bytes())
        await self._sweep()
        return evicted

    async def scrub(self) -> int:
        """Prove every layer again by content, and take the damaged ones out of use; answers how many were."""
        damaged = 0
        for shelf in list(self._shelves.values()):
            for tree in list(shelf.layers):
                if tree in shelf.layers and not await self._is_sound(shelf, tree):
                    damaged += 1
                    self._events.publish("template.damaged", mirror=shelf.directory.name, tree=tree)
                    await self._retire(shelf, tree)
        await self._sweep()
        return damaged

    async def forget(self, name: MirrorName) -> None:
        """Remove all templates of a mirror that was removed; raises CheckoutBusyError while a checkout holds one."""
        shelf = self._shelf(name)
        async with self._lock(name.key):
            if any(self._is_held(shelf, tree) for tree in shelf.layers):
                raise CheckoutBusyError(f"cannot remove the templates of {name}: a checkout uses them", hint="release its checkouts")
            for tree in list(shelf.layers):
                if tree in shelf.layers:
                    await self._retire(shelf, tree)
            await self._gitdirs.forget(name)
            self._found = {key: template for key, template in self._found.items() if key[0] != name.key}
        await self._sweep()

    def _least_used(self) -> tuple[Shelf, str] | None:
        """The layer used longest ago of those that no checkout holds and nothing lies on."""
        bases = {(id(shelf), layer.base) for shelf in self._shelves.values() for layer in shelf.layers.values()}
        idle = [
            (shelf.used_at.get(shelf.files(tree), 0.0), shelf, tree)
            for shelf in self._shelves.values()
            for tree in shelf.layers
            if (id(shelf), tree) not in bases and not self._is_held(shelf, tree)
        ]
        oldest = min(idle, key=lambda item: item[0], default=None)
        return (oldest[1], oldest[2]) if oldest else None

    def _is_held(self, shelf: Shelf, tree: str) -> bool:
        return any(shelf.files(each) in self._holds for each in shelf.above(tree) if each in shelf.layers)

    async def _is_sound(self, shelf: Shelf, tree: str) -> bool:
        known = list(shelf.layers.values())
        try:
            await self._workers.call(_VERIFY, shelf.trees, shelf.layers[tree], known, timeout=_TIMEOUT)
        except (IntegrityError, NotFoundError) as error:
            log.warning("template.refused", mirror=shelf.directory.name, tree=tree, error=str(error))
            return False
        return True

    async def _retire(self, shelf: Shelf, tree: str) -> None:
        """Take a layer and all that lies on it out of use. Directories that checkouts hold are removed when they let go."""
        gone = shelf.above(tree)
        self._found = {key: t for key, t in self._found.items() if t.tree not in gone or t.mirror.key != shelf.directory.name.lower()}
        origins = [path for path in shelf.used_at if any(each in path.as_posix() for each in gone)]
        held = any(path in self._holds for path in origins)
        for path in shelf.retire(tree):
            if held:
                self._retired.append((next(path_ for path_ in origins if path_ in self._holds), path))
            else:
                await anyio.to_thread.run_sync(_remove, path)

    async def _sweep(self) -> None:
        """Remove what was retired while it was held."""
        free = [(origin, path) for origin, path in self._retired if origin not in self._holds]
        for pair in free:
            self._retired.remove(pair)
            await anyio.to_thread.run_sync(_remove, pair[1])

    async def _drop_gitdirs(self, shelf: Shelf) -> None:
        """Remove the sealed stores of a mirror of which no template is left."""
        gits = shelf.directory / "gits"
        if not any(path in self._holds for path in gits.glob("*")):
            await self._gitdirs.forget(MirrorName.parse(shelf.directory.name))

    # -- making ---------------------------------------------------------------------------------------------------------

    async def _make(self, name: MirrorName, commit: CommitId, history: History, owner: Owner | None) -> Template:
        gitdir, tree = await self._parts(name, commit, history)
        shelf = self._shelf(name)
        index = () if owner is None else (await self._ensure_index(name, shelf, tree, owner),)
        deltas = [files_path(shelf.trees, layer) for layer in shelf.chain(tree)]
        size = sum(layer.size_bytes for layer in shelf.chain(tree))
        template = Template(name, commit, history, gitdir.head, tree, owner, (*index, gitdir.path, *deltas), size)
        self._found[name.key, commit, history, owner] = template
        self._touch(template)
        return template

    async def _parts(self, name: MirrorName, commit: CommitId, history: History) -> tuple[Gitdir, str]:
        """The sealed `.git` and the tree, both at once: they need different things of the disk and the processors."""
        gitdir, tree = await _both(self._gitdirs.ensure(name, commit, history), self._ensure_tree(name, commit, history))
        if gitdir.tree != tree:
            raise IntegrityError(f"cannot make a template of {commit}: its store and its layer have different trees")
        return gitdir, tree

    async def _ensure_tree(self, name: MirrorName, commit: CommitId, history: History) -> str:
        """Have the layer of a commit's tree, and those it lies on, proven and on disk; answers the tree."""
        shelf = self._shelf(name)
        async with self._lock(name.key):
            known = self._gitdirs.find(name, commit, history)
            if known and known.tree in shelf.layers and await self._is_usable(shelf, known.tree):
                return known.tree
            return await self._build(name, shelf, commit)

    async def _is_usable(self, shelf: Shelf, tree: str) -> bool:
        """Whether a layer is there and proven; proves what was built before the last boot, retires what is not sound."""
        try:
            chain = shelf.chain(tree)
        except KeyError:
            await self._retire(shelf, tree)
            return False
        for layer in reversed(chain):
            if not files_path(shelf.trees, layer).is_dir() or (layer.tree in shelf.unproven and not await self._prove(shelf, layer.tree)):
                await self._retire(shelf, layer.tree)
                return False
        return True

    async def _prove(self, shelf: Shelf, tree: str) -> bool:
        if not await self._is_sound(shelf, tree):
            return False
        write_record(shelf.trees / shelf.layers[tree].name, shelf.layers[tree])
        shelf.unproven.discard(tree)
        return True

    async def _build(self, name: MirrorName, shelf: Shelf, commit: CommitId) -> str:
        temporary = shelf.building("trees")
        git_dir = self._mirrors_path(name)
        try:
            layer: Layer = await self._workers.call(
                _BUILD, git_dir, commit, shelf.trees, temporary, shelf.known(), timeout=_TIMEOUT
            )
            if layer.tree in shelf.layers and await self._is_usable(shelf, layer.tree):
                return layer.tree
            shelf.add_layer(temporary, layer)
        finally:
            await anyio.to_thread.run_sync(_remove, temporary)
        self._events.publish(
            "template.built", mirror=str(name), commit=commit, tree=layer.tree, base=layer.base, size_bytes=layer.size_bytes
        )
        return layer.tree

    async def _ensure_index(self, name: MirrorName, shelf: Shelf, tree: str, owner: Owner) -> Path:
        async with self._lock(name.key):
            target = shelf.index(tree, owner)
            if (tree, owner) in shelf.indexes and (target / ".git" / "index").is_file():
                return target
            temporary = shelf.building("indexes")
            try:
                size: int = await self._workers.call(_INDEX, shelf.trees, shelf.chain(tree), owner, temporary, timeout=_TIMEOUT)
                shelf.add_index(temporary, tree, owner, size)
            finally:
                await anyio.to_thread.run_sync(_remove, temporary)
            await self._trim_indexes()
            return target

    async def _trim_indexes(self) -> None:
        """Keep few indexes that no checkout uses: one is as big as 100 one-file deltas."""
        idle = [
            (shelf.used_at.get(shelf.index(*key), 0.0), shelf, key)
            for shelf in self._shelves.values()
            for key in shelf.indexes
            if shelf.index(*key) not in self._holds
        ]
        idle.sort(key=lambda item: item[0], reverse=True)
        for _, shelf, key in idle[_IDLE_INDEXES:]:
            path = shelf.index(*key)
            self._found = {k: t for k, t in self._found.items() if t.layers[0] != path}
            if retired := shelf.retire_index(*key):
                await anyio.to_thread.run_sync(_remove, retired)

    # -- books ----------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        for directory in sorted(self._store.iterdir()):
            if directory.is_dir():
                self._shelves[directory.name.lower()] = load_shelf(directory)

    def _shelf(self, name: MirrorName) -> Shelf:
        return self._shelves.setdefault(name.key, Shelf(self._store / str(name)))

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def _touch(self, template: Template) -> None:
        shelf = self._shelf(template.mirror)
        for path in template.layers:
            shelf.used(path)

    def _forget_gone(self, template: Template) -> None:
        """Something was deleted behind our back: `ensure` looks again."""
        self._found = {key: t for key, t in self._found.items() if set(t.layers).isdisjoint(p for p in template.layers if not p.is_dir())}
        log.warning("template.lost", mirror=str(template.mirror), commit=template.commit)

    def _land(self, key: _Key, done: asyncio.Task[Template]) -> None:
        self._flights.pop(key, None)
        if not done.cancelled():
            done.exception()  # each waiter gets it; with none left it is not an error that nobody saw


async def _both(first: Awaitable[Gitdir], second: Coroutine[Any, Any, str]) -> tuple[Gitdir, str]:
    """Wait for both; when one fails, let the other end first, so that nothing is built behind the error."""
    results = await asyncio.gather(first, second, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results[0], results[1]


def _packs_bytes(store: Path) -> dict[str, int]:
    """What the packs of each mirror take; the sealed stores hold links to them."""
    return {
        directory.name: sum(file.stat().st_size for file in (directory / "packs").rglob("*") if file.is_file())
        for directory in store.iterdir()
    }


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
