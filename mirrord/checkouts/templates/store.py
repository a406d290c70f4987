"""The template store: immutable, verified layers to mount overlay checkouts on.

A template is a stack of directories, top first: the index of its tree, the sealed `.git`, deltas, a
keyframe; the same for every user. A layer is built in a temporary directory, proven by content and
renamed; one of an earlier boot is proven again before it is used. The store is a cache: whatever is
damaged or missing is built again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
import structlog

from ...config import Settings
from ...errors import CheckoutBusyError, IntegrityError, MirrordError
from ...git.workers import Workers
from ...host.trash import Trash
from ...jobs.events import Events
from ...mirrors.coalesce import Coalescer
from ...model import CommitId, History, MirrorName
from ..stores.builder import StoreBuilder
from ..stores.packer import together
from .build import build_layer
from .eviction import Eviction
from .layers import Layer, write_record
from .registry import MirrorTemplates, TemplateRegistry
from .scrub import scrub

_TIMEOUT = timedelta(minutes=10)

log = structlog.get_logger()


class Template(NamedTuple):
    """`layers` are the lower directories, top first."""

    mirror: MirrorName
    commit: CommitId
    history: History
    head: CommitId
    tree: str
    layers: tuple[Path, ...]


class Templates:
    """The templates of all mirrors. Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        state_dir: Path,
        workers: Workers,
        mirrors_path: Callable[[MirrorName], Path],
        gitdirs: StoreBuilder,
        events: Events,
        trash: Trash,
    ) -> None:
        self._workers = workers
        self._trash = trash
        self._mirrors_path = mirrors_path
        self._gitdirs = gitdirs
        self._events = events
        self._registry = TemplateRegistry(state_dir / "templates", workers, trash)
        self._eviction = Eviction(settings, self._registry, gitdirs, events)
        self._found: dict[tuple[str, CommitId, History], Template] = {}
        self._builds: Coalescer[Template] = Coalescer()

    async def open(self) -> None:
        """Find the templates on disk; remove what a killed build left."""
        await self._registry.open()

    async def close(self) -> None:
        """Cancel what is being built."""
        await self._builds.close()

    # -- finding and making ------------------------------------------------------------------------

    def find(self, name: MirrorName, commit: CommitId, history: History) -> Template | None:
        """Find a template in memory; mounting it says whether it still exists."""
        template = self._found.get((name.key, commit, history))
        if template is not None:
            self._note_use(template)
        return template

    async def ensure(self, name: MirrorName, commit: CommitId, history: History) -> Template:
        """Find a template, or build and prove it; once for all who ask meanwhile.

        Raises CommitNotFoundError, CommitUnservableError, CorruptObjectError, DiskFullError.
        """
        key = (name.key, commit, history)
        known = self._found.get(key)
        if known and not all(map(os.path.isdir, known.layers)):  # deleted behind our back
            del self._found[key]
        if f"{key}" in self._builds:
            # An earlier build may fail of something that ended before this request.
            with suppress(MirrordError, OSError):
                await self._builds.join(f"{key}", lambda _: self._make(name, commit, history))
        while (found := self.find(name, commit, history)) is None:
            await self._builds.join(f"{key}", lambda _: self._make(name, commit, history))
        return found

    async def _make(self, name: MirrorName, commit: CommitId, history: History) -> Template:
        """The sealed store and the layers are built at once: one takes disk, one processor."""
        known = self._gitdirs.find(name, commit, history)
        tree = known.tree if known else (await self._gitdirs.commits.get(name, commit)).tree
        templates = self._registry.get(name)
        while True:
            store, _ = await together(
                self._gitdirs.ensure(name, commit, history),
                self._ensure_layer(name, templates, commit, tree),
            )
            if store.tree != tree:
                raise IntegrityError(
                    f"cannot make a template of {commit}: its store and its layer have different"
                    " trees"
                )
            if templates.layers.is_whole(tree, templates.unproven):
                break  # else evicted while the store was built
        chain = templates.chain(tree)
        files = (templates.files(layer.tree) for layer in chain)
        layers = (templates.index(tree), store.path, *files)
        template = Template(name, commit, history, store.head, tree, layers)
        self._found[name.key, commit, history] = template
        return template

    async def _ensure_layer(
        self, name: MirrorName, templates: MirrorTemplates, commit: CommitId, tree: str
    ) -> None:
        """Have the layer of a commit's tree, and those below it, proven and on disk."""
        async with self._registry.lock(templates):
            if tree in templates.layers and await self._is_usable(templates, tree):
                return
            await self._registry.sweep()
            commit_time = (await self._gitdirs.commits.get(name, commit)).time
            near = templates.layers.near(commit_time, templates.unproven)
            path, mirror = templates.new_path(), self._mirrors_path(name)
            try:
                layer: Layer = await self._workers.run(
                    build_layer, mirror, commit, templates.trees, path, near, timeout=_TIMEOUT
                )
                templates.add(path, layer)
            finally:
                if path.exists():
                    await anyio.to_thread.run_sync(self._trash.remove, path)
        self._events.publish(
            "template.built",
            mirror=str(name),
            commit=commit,
            tree=layer.tree,
            base=layer.base,
            size_bytes=layer.size_bytes,
        )

    async def _is_usable(self, templates: MirrorTemplates, tree: str) -> bool:
        """Whether a layer exists and is proven; proves those of earlier boots, retires bad ones."""
        try:
            chain = templates.chain(tree)
        except KeyError:
            self._registry.retire(templates, tree)
            return False
        for layer in reversed(chain):
            index = templates.index(layer.tree) / ".git" / "index"
            is_good = templates.files(layer.tree).is_dir() and index.is_file()
            if is_good and layer.tree in templates.unproven:
                is_good = await self._registry.is_sound(templates, layer.tree)
                if is_good:
                    write_record(templates.trees / layer.name, layer)
                    templates.unproven.discard(layer.tree)
            if not is_good:
                self._registry.retire(templates, layer.tree)
                return False
        return True

    # -- in use ------------------------------------------------------------------------------------

    def hold(self, template: Template) -> None:
        """Keep the layers of a template for a checkout. Call with no await since it was found."""
        self._registry.held.update(template.layers)

    def drop(self, template: Template) -> None:
        """Undo one `hold`: the template's time to stay begins."""
        self._registry.drop(template.layers)
        self._note_use(template)

    def _note_use(self, template: Template) -> None:
        self._registry.get(template.mirror).used_at[template.layers[1]] = time.time()

    # -- keeping within bounds ---------------------------------------------------------------------

    def size_bytes(self) -> int:
        """The size of trees and their indexes, without packs."""
        return sum(self._registry.get(name).size_bytes for name in self._registry.names())

    async def is_full(self) -> bool:
        """Whether little is left of `template_bytes`, so that building more would evict soon."""
        return await self._eviction.is_full()

    async def evict(self) -> int:
        """Evict what is over the bounds, never what a checkout holds; answers how many went."""
        evicted = await self._eviction.evict()
        if evicted:
            self._found = {
                key: each for key, each in self._found.items() if evicted.isdisjoint(each.layers)
            }
        return len(evicted)

    async def scrub(self) -> int:
        """Prove everything by content, and discard damaged parts; answers how many there were."""
        return sum([len(await self.scrub_mirror(name)) for name in self._registry.names()])

    async def scrub_mirror(self, name: MirrorName) -> dict[str, str]:
        """Scrub one mirror; answers the damaged parts, with what became of them."""
        return await scrub(name, self._registry, self._gitdirs, self._workers, self._events)

    async def forget(self, name: MirrorName) -> None:
        """Remove a removed mirror's templates; CheckoutBusyError while a checkout holds one."""
        templates = self._registry.get(name)
        async with self._registry.lock(templates):
            if any(templates.files(tree) in self._registry.held for tree in templates.layers):
                raise CheckoutBusyError(
                    f"cannot remove the templates of {name}: a checkout uses them",
                    hint="release its checkouts",
                )
            for tree in list(templates.layers):
                self._registry.retire(templates, tree)
            await self._registry.sweep()
            await self._gitdirs.forget(name)
            self._found = {key: each for key, each in self._found.items() if key[0] != name.key}
        await self._registry.weigh()  # removes the shared files
