"""The template store: immutable, verified layers to mount overlay checkouts on.

A template is a stack of directories, top first: the index of its tree, the sealed `.git`, deltas, a
keyframe; the same for every user. A layer is built in a temporary directory, proven by content and
renamed; one of an earlier boot is proven again before it is used. The store is a cache: whatever is
damaged or missing is built again.
"""

import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypedDict

import anyio.to_thread

from ...config import Settings
from ...errors import CheckoutBusyError, IntegrityError, MirrordError
from ...git.packs import pack_is_whole
from ...git.turns import Coalescer
from ...git.workers import Workers
from ...host.processes import lower_priority
from ...host.trash import Trash
from ...jobs.events import Events
from ...model import CommitId, History, MirrorName
from ...protocol import CacheActivity
from ..stores.builder import StoreBuilder
from ..stores.packer import together
from ..stores.store import StoreKey, is_as_built, read_records
from .eviction import Eviction
from .layers import RECORD, build_layer, write_record
from .registry import MirrorTemplates, TemplateRegistry

_BUILD_TIMEOUT = timedelta(minutes=10)
_SCRUB_TIMEOUT = timedelta(hours=1)


class TemplateFacts(TypedDict):
    """What proofs say of a template's `.git`: the checksum at the end of the index, how many files
    there are, and the names of packs and refs.
    """

    index: str
    control_files: int
    packs: list[str]
    refs: list[str]


@dataclass(eq=False)
class Template:
    """`layers` are the lower directories, top first; `facts` are read when a proof needs them."""

    mirror: MirrorName
    commit: CommitId
    history: History
    head: CommitId
    tree: str
    layers: tuple[Path, ...]
    facts: TemplateFacts | None = None


def proven_at(template: Template) -> datetime:
    """When the last of its layers was proven by content: its record is written then."""
    _, _, *files = template.layers
    times = [(each.parent / RECORD).stat().st_mtime for each in files]
    return datetime.fromtimestamp(max(times), UTC)


def read_facts(layers: tuple[Path, ...]) -> TemplateFacts:
    """Read the facts of an index layer over its sealed store; FileNotFoundError where one went."""
    index, store = (layer / ".git" for layer in layers[:2])
    files = {
        path.relative_to(git) for git in (store, index) for path in git.rglob("*") if path.is_file()
    }
    checksum = (index / "index").read_bytes()[-20:].hex()
    packed = (store / "packed-refs").read_text(encoding="utf-8", errors="surrogateescape")
    lines = [line for line in packed.splitlines() if line and line[0] not in "#^"]
    return TemplateFacts(
        index=checksum,
        control_files=len(files),
        packs=sorted(path.name for path in files if path.suffix == ".pack"),
        refs=sorted(line.partition(" ")[2] for line in lines),
    )


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
        self.weigh = self._eviction.weigh
        self._hits = self._misses = 0
        self._found: dict[StoreKey, Template] = {}
        self._builds: Coalescer[Template] = Coalescer()

    async def close(self) -> None:
        """Cancel what is being built."""
        await self._builds.close()

    # -- finding and making ------------------------------------------------------------------------

    def find(self, name: MirrorName, commit: CommitId, history: History) -> Template | None:
        """Find a template in memory; mounting it says whether it still exists."""
        template = self._find(name, commit, history)
        self._hits += template is not None
        self._misses += template is None
        return template

    def _find(self, name: MirrorName, commit: CommitId, history: History) -> Template | None:
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
        while (found := self._find(name, commit, history)) is None:
            await self._builds.join(f"{key}", lambda _: self._make(name, commit, history))
        return found

    async def _make(self, name: MirrorName, commit: CommitId, history: History) -> Template:
        """The sealed store and the layers are built at once: one takes disk, one processor."""
        known = self.stores.find(name, commit, history)
        tree = known.tree if known else (await self.stores.commits.get(name, commit)).tree
        templates = self._registry.get(name)
        if known is None or tree not in templates.layers:
            await self.stores.room.ensure(f"make a template of {commit}")
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
                break  # else evicted while the store was built
        files = (templates.files(layer.tree) for layer in templates.chain(tree))
        layers = (templates.index(tree), store.path, *files)
        template = Template(name, commit, history, store.head, tree, layers)
        self._found[name.key, commit, history] = template
        return template

    async def _ensure_layer(
        self, name: MirrorName, templates: MirrorTemplates, commit: CommitId, tree: str
    ) -> None:
        """Have the layer of a commit's tree, and those below it, proven and on disk."""
        async with templates.changes.turn():
            if tree in templates.layers and await self._is_usable(templates, tree):
                return
            await self._registry.sweep()
            commit_time = (await self.stores.commits.get(name, commit)).time
            near = templates.near(commit_time)
            path, mirror = templates.new_path(), self.mirrors_path(name)
            try:
                layer = await self.workers.run(
                    build_layer, mirror, commit, templates.trees, path, near, timeout=_BUILD_TIMEOUT
                )
                templates.add(path, layer)
            finally:
                if path.exists():
                    await anyio.to_thread.run_sync(self.trash.remove, path)
        facts = {"tree": layer.tree, "base": layer.base, "size_bytes": layer.size_bytes}
        self.events.publish("template.built", mirror=str(name), commit=commit, **facts)

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
        held = self._registry.held
        for path in template.layers:
            held[path] -= 1
            if held[path] <= 0:
                del held[path]
        self._note_use(template)

    def _note_use(self, template: Template) -> None:
        self._registry.get(template.mirror).used_at[template.layers[1]] = time.time()

    # -- removing ----------------------------------------------------------------------------------

    def activity(self) -> CacheActivity:
        """Hits and misses are of checkouts, as they look for a template that can be mounted."""
        return CacheActivity(
            name="templates", hits=self._hits, misses=self._misses,
            evictions=self._eviction.evicted,
            size_bytes=self._eviction.size_bytes or self._registry.size_bytes,
            limit_bytes=self.settings().checkouts.template_bytes,
        )  # fmt: skip

    async def evict(self, short_bytes: int = 0) -> int:
        """Evict what is over the bounds, and `short_bytes` more of what is not in use; never what a
        checkout holds. Answers how many went.
        """
        if count := await self._eviction.evict(short_bytes):
            self._forget_gone()
        return count

    async def collect(self, keep: Collection[StoreKey]) -> dict[MirrorName, tuple[int, int]]:
        """Evict all that no checkout holds and `keep` does not name, with no regard to the bounds.

        Answers how many templates went by mirror, and their bytes. What is asked for meanwhile
        stays.
        """
        collected = await self._eviction.collect(keep)
        self._forget_gone()
        return collected

    def _forget_gone(self) -> None:
        found = self._found.items()
        self._found = {key: each for key, each in found if each.layers[1].is_dir()}

    async def remove_mirror(self, name: MirrorName) -> None:
        """Remove a removed mirror's templates; CheckoutBusyError while a checkout holds one."""
        templates = self._registry.get(name)
        async with templates.changes.turn():
            if any(templates.files(tree) in self._registry.held for tree in templates.layers):
                raise CheckoutBusyError(
                    f"cannot remove the templates of {name}: a checkout uses them",
                    hint="release its checkouts",
                )
            for tree in list(templates.layers):
                self._registry.retire(templates, tree)
            await self._registry.sweep()
            await self.stores.remove_mirror(name)
            self._forget_gone()
        await self._registry.weigh()  # removes the shared files

    # -- proving by content again ------------------------------------------------------------------

    async def scrub(self) -> int:
        """Prove everything by content, and discard damaged parts; answers how many there were."""
        return sum([len(await self.scrub_mirror(name)) for name in self._registry.names()])

    async def scrub_mirror(self, name: MirrorName) -> dict[str, str]:
        """Prove one mirror's layers, stores and packs; answers the damaged parts, with what became
        of them: the next checkout builds them again, but a part that a checkout holds stays until
        its release.
        """
        templates, found = self._registry.get(name), dict[str, str]()
        rebuilt = "it is out of use, and the next checkout builds it again"
        for tree in list(templates.layers):
            if tree in templates.layers and not await self._registry.is_sound(templates, tree):
                self.events.publish("template.damaged", mirror=str(name), tree=tree)
                async with templates.changes.turn():
                    self._registry.retire(templates, tree)
                found[f"template {tree}"] = f"checksum mismatch; {rebuilt}"

        async def discard(bad: Path) -> str:
            """Discard the closure layer or the store that a bad file is in."""
            kind, stem, *_ = bad.relative_to(templates.directory).parts
            place = templates.directory / kind / stem
            if place in self._registry.held:
                return "checksum mismatch; a checkout holds it: release that, and scrub again"
            history, _, commit = stem.partition("-")
            store = None
            if kind == "gits":  # None: the index was bad, too
                store = self.stores.find(name, CommitId(commit), History(history))
            await self.stores.remove(self.stores.discard(store) if store else place)
            return f"checksum mismatch; {rebuilt}"

        directory, run = templates.directory, self.workers.run
        for pack in await run(find_bad_packs, directory, timeout=_SCRUB_TIMEOUT):
            self.events.publish("closure.damaged", mirror=str(name), pack=pack.name)
            found[f"closure pack {pack.name}"] = await discard(pack)
        for path in await run(find_bad_stores, directory, name, timeout=_SCRUB_TIMEOUT):
            self.events.publish("store.damaged", mirror=str(name), store=path.name)
            found[f"sealed store {path.name}"] = await discard(path)
        await self._registry.sweep()
        return found


def find_bad_packs(directory: Path) -> list[Path]:
    """Packs and indexes of one mirror's stores with another checksum than they end with, or without
    their other half. Runs in a worker. A file of many links is read once, and named at each.
    """

    def find() -> list[Path]:
        sound: dict[int, bool] = {}
        bad = []
        for pattern in ("packs/*/pack-*", "gits/*/.git/objects/pack/pack-*"):
            for file in sorted(directory.glob(pattern)):
                with suppress(FileNotFoundError):
                    inode = file.stat().st_ino
                    if inode not in sound:
                        sound[inode] = pack_is_whole(file)
                    if not sound[inode]:
                        bad.append(file)
        for record in directory.glob("packs/[!.]*/layer.json"):
            layer = record.parent
            stems = {file.with_suffix("") for file in layer.glob("pack-*")} or {layer / "pack"}
            packs = [stem.with_suffix(".pack") for stem in sorted(stems)]
            bad += [p for p in packs if not (p.exists() and p.with_suffix(".idx").exists())]
        return bad

    with ThreadPoolExecutor(1, initializer=lower_priority) as thread:
        return thread.submit(find).result()


def find_bad_stores(directory: Path, name: MirrorName) -> list[Path]:
    """Stores of one mirror with changed control files or without one of their packs.

    Looked at twice, because one may be built again meanwhile. Runs in a worker.
    """

    def altered() -> set[Path]:
        records = read_records(directory / "gits", name)
        return {path for path, (at, _) in records.items() if path.exists() and not is_as_built(at)}

    found = altered()
    return sorted(found & altered()) if found else []
