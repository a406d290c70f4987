"""The template store: immutable, verified layers that overlay checkouts are mounted on.

Owns `templates/<mirror>/trees` and which templates stay. A template is a stack of directories, top first: the index of its
tree, the sealed `.git` (made by `stores/builder.py`), deltas, a keyframe. They are the same for every user.

A layer is built in a temporary directory, proven by content and renamed: a crash leaves a temporary directory, which `open`
removes. What was proven before the last boot is proven again before it is used. The store is a cache: whatever is damaged or
gone is built again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import anyio.to_thread
import structlog

from ...config import Settings
from ...errors import CheckoutBusyError, IntegrityError, MirrordError
from ...git.workers import Workers
from ...jobs.events import Events
from ...mirrors.coalesce import Coalescer
from ...model import CommitId, History, MirrorName
from ..stores.builder import StoreBuilder
from ..stores.store import SealedStore
from .eviction import Eviction
from .layers import Layer, write_record
from .registry import MirrorTemplates, TemplateRegistry
from .scrub import Scrub

_Key = tuple[str, CommitId, History]

# Named, not imported: they load libgit2, which only workers do.
_BUILD = "mirrord.checkouts.templates.build:build_layer"
_TIMEOUT = timedelta(minutes=10)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Template:
    """`layers` are the lower directories, top first."""

    mirror: MirrorName
    commit: CommitId
    history: History
    head: CommitId
    tree: str
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
        gitdirs: StoreBuilder,
        events: Events,
    ) -> None:
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._gitdirs = gitdirs
        self._events = events
        self._shelves = TemplateRegistry(state_dir / "templates", workers)
        self._eviction = Eviction(
            settings=settings, shelves=self._shelves, gitdirs=gitdirs, events=events
        )
        self._scrub = Scrub(shelves=self._shelves, gitdirs=gitdirs, workers=workers, events=events)
        self._found: dict[_Key, Template] = {}
        self._flights: Coalescer[Template] = Coalescer()

    async def open(self) -> None:
        """Find what is there; remove what a killed build left."""
        await self._shelves.open()

    async def close(self) -> None:
        """Cancel what is being built."""
        await self._flights.close()

    async def mend(self) -> bool:
        """Remove what the disk did not let go before; answers whether nothing is left."""
        return await self._shelves.mend() & await self._gitdirs.mend()

    def find(self, name: MirrorName, commit: CommitId, history: History) -> Template | None:
        """A template that was ready when it was last looked at, from memory: mounting says whether it is still there."""
        template = self._found.get((name.key, commit, history))
        if template is None:
            return None
        self._note_use(template)
        return template

    async def ensure(self, name: MirrorName, commit: CommitId, history: History) -> Template:
        """A template, built and proven when there is none; once, however many ask, and as long as one of them waits.

        Raises CommitNotFoundError, CommitUnservableError, CorruptObjectError, DiskFullError.
        """
        key = (name.key, commit, history)
        if (known := self._found.get(key)) and not all(
            map(os.path.isdir, known.layers)
        ):  # evicted, or deleted behind our back
            del self._found[key]
        flight = f"{key}"
        if flight in self._flights:
            with suppress(
                MirrordError, OSError
            ):  # what it failed of may be over since before this was asked for
                await self._flights.join(flight, lambda _: self._make(name, commit, history))
        while (found := self.find(name, commit, history)) is None:
            await self._flights.join(flight, lambda _: self._make(name, commit, history))
        return found

    def hold(self, template: Template) -> None:
        """Say that a checkout uses a template: its layers stay until then. Call with no await since `find` or `ensure`."""
        self._shelves.holds.add(template.layers)

    def drop(self, template: Template) -> None:
        """The other half of `hold`: its time to stay begins now."""
        self._shelves.holds.drop(template.layers)
        self._note_use(template)

    def size_bytes(self) -> int:
        """What trees with their indexes take, packs left out."""
        return self._shelves.size_bytes()

    # -- keeping within bounds ------------------------------------------------------------------------------------------

    async def is_full(self) -> bool:
        """Whether little is left of `template_bytes`, so that making more would soon drop something."""
        return await self._eviction.is_full()

    async def evict(self) -> int:
        """Drop what is over the bounds, never what a checkout holds; answers how many went."""
        evicted = await self._eviction.evict()
        if evicted:
            self._found = {
                key: each for key, each in self._found.items() if evicted.isdisjoint(each.layers)
            }
        return len(evicted)

    async def scrub(self) -> int:
        """Prove everything again by content, and take what is damaged out of use; answers how much was."""
        names = [MirrorName.parse(shelf.directory.name) for shelf in self._shelves.all()]
        return sum([len(await self.scrub_mirror(name)) for name in names])

    async def scrub_mirror(self, name: MirrorName) -> dict[str, str]:
        """The same of one mirror; answers what was damaged, with what becomes of it."""
        return await self._scrub.perform(name)

    async def forget(self, name: MirrorName) -> None:
        """Remove all templates of a mirror that was removed; raises CheckoutBusyError while a checkout holds one."""
        shelf = self._shelves.get(name)
        async with self._shelves.lock(shelf):
            if any(self._shelves.is_held(shelf, tree) for tree in shelf.layers):
                raise CheckoutBusyError(
                    f"cannot remove the templates of {name}: a checkout uses them",
                    hint="release its checkouts",
                )
            while shelf.layers:
                await self._shelves.retire(shelf, next(iter(shelf.layers)))
            await self._gitdirs.forget(name)
            self._found = {
                key: template for key, template in self._found.items() if key[0] != name.key
            }

    # -- making ---------------------------------------------------------------------------------------------------------

    async def _make(self, name: MirrorName, commit: CommitId, history: History) -> Template:
        """The sealed `.git` and the layers, both at once: they need different things of the disk and the processors."""
        known = self._gitdirs.find(name, commit, history)
        tree = known.tree if known else (await self._gitdirs.commits.get(name, commit)).tree
        store = self._gitdirs.ensure(name, commit, history)
        gitdir = await _both(store, self._layers(name, commit, tree))
        if gitdir.tree != tree:
            raise IntegrityError(
                f"cannot make a template of {commit}: its store and its layer have different trees"
            )
        shelf = self._shelves.get(name)
        if not shelf.is_whole(tree):  # evicted while the store was built
            return await self._make(name, commit, history)
        chain = shelf.chain(tree)
        layers = (shelf.index(tree), gitdir.path, *(shelf.files(layer.tree) for layer in chain))
        size = sum(layer.size_bytes for layer in chain)
        template = Template(name, commit, history, gitdir.head, tree, layers, size)
        self._found[name.key, commit, history] = template
        return template

    async def _layers(self, name: MirrorName, commit: CommitId, tree: str) -> None:
        """Have the layer of a commit's tree, and those it lies on, proven and on disk."""
        shelf = self._shelves.get(name)
        async with self._shelves.lock(shelf):
            if tree not in shelf.layers or not await self._is_usable(shelf, tree):
                await self._build(name, shelf, commit)

    async def _is_usable(self, shelf: MirrorTemplates, tree: str) -> bool:
        """Whether a layer is there and proven; proves what was built before the last boot, retires what is not sound."""
        try:
            chain = shelf.chain(tree)
        except KeyError:
            await self._shelves.retire(shelf, tree)
            return False
        for layer in reversed(chain):
            there = shelf.is_there(layer.tree)
            if not there or (layer.tree in shelf.unproven and not await self._prove(shelf, layer)):
                await self._shelves.retire(shelf, layer.tree)
                return False
        return True

    async def _prove(self, shelf: MirrorTemplates, layer: Layer) -> bool:
        if not await self._shelves.is_sound(shelf, layer.tree):
            return False
        write_record(shelf.trees / layer.name, layer)
        shelf.unproven.discard(layer.tree)
        return True

    async def _build(self, name: MirrorName, shelf: MirrorTemplates, commit: CommitId) -> None:
        """Have a worker build a layer."""
        time = (await self._gitdirs.commits.get(name, commit)).time
        at = shelf.building()
        try:
            layer: Layer = await self._workers.call(
                _BUILD,
                self._mirrors_path(name),
                commit,
                shelf.trees,
                at,
                shelf.near(time),
                timeout=_TIMEOUT,
            )
            shelf.add_layer(at, layer)
        finally:
            if at.exists():
                await anyio.to_thread.run_sync(self._shelves.remains.remove, at)
        self._events.publish(
            "template.built",
            mirror=str(name),
            commit=commit,
            tree=layer.tree,
            base=layer.base,
            size_bytes=layer.size_bytes,
        )

    def _note_use(self, template: Template) -> None:
        shelf = self._shelves.get(template.mirror)
        for path in template.layers[1:]:  # the index goes with its layer
            shelf.used(path)


async def _both(store: Awaitable[SealedStore], layers: Coroutine[None, None, None]) -> SealedStore:
    """Wait for both; when one fails, let the other end first, so that nothing is built behind the error."""
    other = asyncio.get_running_loop().create_task(layers)
    try:
        gitdir = await store
    except asyncio.CancelledError:
        other.cancel()
        raise
    finally:
        await asyncio.wait([other])
    other.result()
    return gitdir
