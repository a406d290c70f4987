"""Templates: immutable, verified layers that overlay checkouts are mounted on.

A template is a stack of directories, top first: the index of its tree, the sealed `.git`, deltas, a
keyframe; the same for every user. A layer of an earlier boot is proven again before use. Templates
are a cache: damaged and missing ones are built again.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypedDict

import anyio.to_thread

from ..config import Settings
from ..errors import CheckoutBusyError, IntegrityError, MirrordError
from ..git.lfs import Pointer, find_fault
from ..git.packs import pack_is_whole
from ..host.files import read_plain
from ..host.trash import Trash
from ..jobs.events import Events
from ..model import CommitId, History, MirrorName
from ..presence import exists, is_dir, is_file, iter_below, matching
from ..protocol import CacheActivity
from ..trees.dotgit import refs_in
from ..trees.sources import LayerFiles
from ..workers.coalesce import Coalescer
from ..workers.pool import Workers
from .builder import StoreBuilder
from .eviction import Eviction
from .layers import build_layer, proven_at, write_record
from .packer import together
from .registry import MirrorTemplates, TemplateRegistry
from .store import StoreKey, is_as_built, read_records


class TemplateFacts(TypedDict):
    """Facts about a template's `.git` for proofs: the checksum that ends its index, the number of
    files, the names of packs and refs.
    """

    index: str
    control_files: int
    packs: list[str]
    refs: list[str]


@dataclass(eq=False)
class Template:
    """The lower directories of an overlay, top first; `facts` are read when a proof needs them."""

    mirror: MirrorName
    commit: CommitId
    history: History
    head: CommitId
    tree: str
    layers: tuple[Path, ...]
    files: tuple[LayerFiles, ...]  # the last of them, with what each hides
    facts: TemplateFacts | None = None


def last_proven_at(template: Template) -> datetime:
    """Return when the last of its layers was proven by content."""
    _, _, *files = template.layers
    return datetime.fromtimestamp(max(proven_at(directory.parent) for directory in files), UTC)


def read_facts(layers: tuple[Path, ...]) -> TemplateFacts:
    """Read the facts of an index layer over its sealed store; FileNotFoundError where one went."""
    index, store = (layer / ".git" for layer in layers[:2])
    files = {
        path.relative_to(git) for git in (store, index) for path in iter_below(git) if is_file(path)
    }
    checksum = read_plain(index / "index")[-20:].hex()
    return TemplateFacts(
        index=checksum,
        control_files=len(files),
        packs=sorted(path.name for path in files if path.suffix == ".pack"),
        refs=sorted(refs_in(read_plain(store / "packed-refs"))),
    )


# every byte of a mirror's templates is read, at low priority
_SCRUB_TIMEOUT = timedelta(hours=1)


@dataclass(kw_only=True, eq=False, repr=False)
class Templates:
    """The templates of all mirrors. Belongs to the event loop's thread."""

    settings: Callable[[], Settings]
    state_dir: Path
    workers: Workers
    mirrors_path: Callable[[MirrorName], Path]
    stores: StoreBuilder
    events: Events
    trash: Trash

    def __post_init__(self) -> None:
        directory = self.state_dir / "templates"
        self._registry = TemplateRegistry(directory, self.workers, self.trash)
        self._eviction = Eviction(self.settings, self._registry, self.stores, self.events)
        self.open = self._registry.open
        self.is_full = self._eviction.is_full
        self.follow = self._eviction.follow
        self.weigh = self._eviction.weigh
        self._hits = self._misses = 0
        self._found: dict[StoreKey, Template] = {}
        self._builds: Coalescer[Template] = Coalescer()

    def evict_only_if(self, knows_all: Callable[[], bool]) -> None:
        """Evict nothing while it is unknown what checkouts need."""
        self._eviction.knows_all = knows_all

    async def close(self) -> None:
        await self._builds.close()

    # -- finding and making ------------------------------------------------------------------------

    def find(self, name: MirrorName, commit: CommitId, history: History) -> Template | None:
        """Find a template that was made before and is still on the disk."""
        template = self._find(name, commit, history)
        self._hits += template is not None
        self._misses += template is None
        return template

    def _find(self, name: MirrorName, commit: CommitId, history: History) -> Template | None:
        key = (name.key, commit, history)
        template = self._found.get(key)
        if template is None:
            return None
        if not all(map(is_dir, template.layers)):  # deleted by hand
            del self._found[key]
            return None
        self._note_use(template)
        return template

    async def ensure(self, name: MirrorName, commit: CommitId, history: History) -> Template:
        """Find a template, or build and prove it, once for all concurrent callers.

        Raises CommitNotFoundError, CommitUnservableError, CorruptObjectError, DiskFullError.
        """
        key = f"{name.key} {commit} {history}"
        if key in self._builds:
            # the cause of a failure may have ended before this request
            with suppress(MirrordError, OSError):
                await self._builds.join(key, lambda _: self._make(name, commit, history))
        # again where it was evicted before this caller went on
        while (template := self._find(name, commit, history)) is None:
            await self._builds.join(key, lambda _: self._make(name, commit, history))
        return template

    async def _make(self, name: MirrorName, commit: CommitId, history: History) -> Template:
        """Build the sealed store beside the layers: one needs the disk, the other the processor."""
        existing = self.stores.find(name, commit, history)
        tree = existing.tree if existing else (await self.stores.commits.get(name, commit)).tree
        templates = self._registry.get(name)
        if existing is None or tree not in templates.layers:
            await self.stores.room.ensure(f"make a template of {commit}")
            await self.stores.ensure_composed(name, commit)  # before the layer reads LFS objects
        while True:
            store, _ = await together(
                self.stores.ensure(name, commit, history),
                self._ensure_layer(name, templates, commit, tree),
            )
            if store.tree != tree:
                raise IntegrityError(
                    f"cannot make a template of {commit}: its store and its layer have different"
                    " trees"
                )
            if templates.is_whole(tree):
                break  # else it was evicted while the store was built
        files = tuple(
            LayerFiles(templates.files(layer.tree), layer.whiteouts)
            for layer in templates.chain(tree)
        )
        layers = (templates.index(tree), store.path, *(layer.files for layer in files))
        template = Template(name, commit, history, store.head, tree, layers, files)
        self._found[name.key, commit, history] = template
        return template

    async def _ensure_layer(
        self, name: MirrorName, templates: MirrorTemplates, commit: CommitId, tree: str
    ) -> None:
        """Build the layer of a commit's tree unless it is on disk and proven."""
        async with templates.changes.turn():
            if tree in templates.layers and await self._is_usable(templates, tree):
                return
            await self._registry.sweep()
            commit_time = (await self.stores.commits.get(name, commit)).time
            near = templates.candidates(commit_time)
            path, mirror = templates.new_path(), self.mirrors_path(name)
            try:
                layer = await self.workers.run(
                    build_layer, mirror, commit, templates.trees, path, near
                )
                templates.add(path, layer)
            finally:
                if exists(path):
                    await anyio.to_thread.run_sync(self.trash.remove, path)
        fields = {"tree": layer.tree, "base": layer.base, "size_bytes": layer.size_bytes}
        self.events.publish("template.built", mirror=str(name), commit=commit, **fields)

    async def _is_usable(self, templates: MirrorTemplates, tree: str) -> bool:
        """Return whether a layer is on disk and sound; discards one that is not."""
        try:
            chain = templates.chain(tree)
        except KeyError:
            self._registry.discard(templates, tree)
            return False
        # from the keyframe up: a discard takes the layers above with it
        for layer in reversed(chain):
            index = templates.index(layer.tree) / ".git" / "index"
            is_good = is_dir(templates.files(layer.tree)) and is_file(index)
            if is_good and layer.tree in templates.unproven:
                is_good = await self._registry.is_sound(templates, layer.tree)
                if is_good:
                    write_record(templates.trees / layer.name, layer)
                    templates.unproven.discard(layer.tree)
            if not is_good:
                self._registry.discard(templates, layer.tree)
                return False
        return True

    # -- in use ------------------------------------------------------------------------------------

    def hold(self, template: Template) -> None:
        """Keep the layers of a template for a checkout. Await nothing between `find` and this."""
        self._registry.held.update(template.layers)

    @contextmanager
    def holding(self, template: Template) -> Iterator[None]:
        self.hold(template)
        try:
            yield
        finally:
            self.drop(template)

    def drop(self, template: Template) -> None:
        """Undo one `hold`; `template_ttl` counts from now."""
        held = self._registry.held
        for path in template.layers:
            held[path] -= 1
            if held[path] <= 0:
                del held[path]
        self._note_use(template)

    def _note_use(self, template: Template) -> None:
        self.stores.used_at[template.layers[1]] = time.time()

    # -- removing ----------------------------------------------------------------------------------

    def activity(self) -> CacheActivity:
        """Return cache figures; hits and misses count checkouts that look for a template."""
        return CacheActivity(
            name="templates", hits=self._hits, misses=self._misses,
            evictions=self._eviction.evicted,
            size_bytes=self._eviction.size_bytes or self._registry.size_bytes,
            limit_bytes=self.settings().checkouts.template_bytes,
        )  # fmt: skip

    async def evict(self, short_bytes: int = 0) -> int:
        """Evict templates over the bounds and idle ones for `short_bytes`; returns how many."""
        if count := await self._eviction.evict(short_bytes):
            self._forget_evicted()
        return count

    async def collect(self, keep: Collection[StoreKey]) -> dict[MirrorName, tuple[int, int]]:
        """Evict every template that no checkout holds and `keep` does not name.

        Returns count and bytes by mirror. Templates used meanwhile stay.
        """
        collected = await self._eviction.collect(keep)
        self._forget_evicted()
        return collected

    def _forget_evicted(self) -> None:
        templates = self._found.items()
        self._found = {key: template for key, template in templates if is_dir(template.layers[1])}

    async def remove_mirror(self, name: MirrorName) -> None:
        """Remove templates and stores of a removed mirror; CheckoutBusyError while one is held."""
        templates = self._registry.get(name)
        async with templates.changes.turn():
            layers = {templates.files(tree) for tree in templates.layers}
            stores = {store.path for store in await self.stores.list_stores(name)}
            if layers & self._registry.held.keys() or stores & self.stores.held.keys():
                raise CheckoutBusyError(
                    f"cannot remove the templates of {name}: a checkout uses them",
                    hint="release its checkouts",
                )
            for tree in list(templates.layers):
                self._registry.discard(templates, tree)
            await self._registry.sweep()
            await self.stores.remove_mirror(name)
            self._forget_evicted()
        await self._registry.measure()  # removes the shared files

    async def make_again(self, keys: Collection[str]) -> None:
        """Take the layers of mirrors out of use: they were written without LFS objects."""
        for name in [mirror for mirror in self._registry.names() if mirror.key in keys]:
            templates = self._registry.get(name)
            async with templates.changes.turn():
                for tree in list(templates.layers):
                    if tree in templates.layers:
                        self._registry.discard(templates, tree)
                await self._registry.sweep()

    # -- proving by content again ------------------------------------------------------------------

    async def scrub(self) -> int:
        """Prove all templates by content, and discard damaged parts; returns how many."""
        return sum([len(await self.scrub_mirror(name)) for name in self._registry.names()])

    async def scrub_mirror(self, name: MirrorName) -> dict[str, str]:
        """Prove one mirror's layers, stores and packs; returns damaged parts and what was done.

        The next checkout builds them again. A part that a checkout holds stays until its release.
        """
        templates, damaged = self._registry.get(name), dict[str, str]()
        discarded = "checksum mismatch; discarded, the next checkout builds it again"
        for tree in list(templates.layers):
            if tree in templates.layers and not await self._registry.is_sound(templates, tree):
                self.events.publish("template.damaged", mirror=str(name), tree=tree)
                async with templates.changes.turn():
                    self._registry.discard(templates, tree)
                damaged[f"template {tree}"] = discarded

        async def discard(bad: Path) -> str:
            """Discard the pack layer or the store that has a bad file."""
            kind, stem, *_ = bad.relative_to(templates.directory).parts
            place = templates.directory / kind / stem
            if place in self._registry.held or place in self.stores.held:
                return "checksum mismatch; a checkout holds it: release it, then scrub again"
            history, _, commit = stem.partition("-")
            store = None
            if kind == "gits":  # stays None where an index is damaged, too
                store = self.stores.find(name, CommitId(commit), History(history))
            await self.stores.remove(self.stores.discard(store) if store else place)
            return discarded

        directory, run = templates.directory, self.workers.run
        for pack in await run(find_bad_packs, directory, timeout=_SCRUB_TIMEOUT):
            self.events.publish("closure.damaged", mirror=str(name), pack=pack.name)
            damaged[f"closure pack {pack.name}"] = await discard(pack)
        for path in await run(find_bad_stores, directory, name, timeout=_SCRUB_TIMEOUT):
            self.events.publish("store.damaged", mirror=str(name), store=path.name)
            damaged[f"sealed store {path.name}"] = await discard(path)
        await self._registry.sweep()
        return damaged


def find_bad_packs(directory: Path) -> list[Path]:
    """Return the packs and indexes of one mirror's stores that are damaged or lack the other half,
    and damaged LFS objects.

    Runs in a worker. A file of many links is read once, and returned for each.
    """
    sound: dict[int, bool] = {}
    bad = []
    of_stores = ("objects/pack/pack-*", "lfs/objects/??/??/*")
    # what is still built, or is removed, has a name with a dot
    patterns = ["packs/[!.]*/pack-*", *(f"gits/[!.]*/.git/{glob}" for glob in of_stores)]
    patterns += [f"gits/[!.]*/.git/modules/**/{glob}" for glob in of_stores]
    for pattern in patterns:
        for file in sorted(matching(directory, pattern)):
            with suppress(FileNotFoundError):
                inode = (st := file.stat()).st_ino
                if inode not in sound:
                    if file.name.startswith("pack-"):
                        sound[inode] = pack_is_whole(file)
                    else:
                        sound[inode] = not find_fault(file, Pointer(file.name, st.st_size))
                if not sound[inode]:
                    bad.append(file)
    for record in matching(directory, "packs/[!.]*/layer.json"):
        layer = record.parent
        stems = {file.with_suffix("") for file in matching(layer, "pack-*")} or {layer / "pack"}
        packs = [stem.with_suffix(".pack") for stem in sorted(stems)]
        bad += [p for p in packs if not (exists(p) and exists(p.with_suffix(".idx")))]
    return bad


def find_bad_stores(directory: Path, name: MirrorName) -> list[Path]:
    """Return the stores of one mirror with changed control files or a missing pack.

    Looks twice, because one may be built again meanwhile. Runs in a worker.
    """

    def altered() -> set[Path]:
        records = read_records(directory / "gits", name)
        return {store.path for store, _ in records if exists(store.path) and not is_as_built(store)}

    suspects = altered()
    return sorted(suspects & altered()) if suspects else []
