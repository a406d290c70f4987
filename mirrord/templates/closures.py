"""Closure packs of a mirror, layered along first-parent ancestry: one serves hundreds of commits.

A pack layer is one pack: the closure of its commit without that of its base's commit. So a chain of
layers is exactly the closure of its last commit. Way-points on a grid along the first-parent line
keep chains short, and neighbours share all but their last layer. Owns `templates/<mirror>/packs/`,
a cache: a layer is renamed into place after those below it.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
from cachetools import LRUCache

from .. import errors
from ..git.batch import object_info
from ..git.command import Git, lines_of
from ..git.objects.increments import pack_increment
from ..git.objects.repository import resolve
from ..git.packs import has_both_ends
from ..host.files import read_plain
from ..host.trash import Trash
from ..jobs.operations import Deferred
from ..model import FIRST_PARENTS_LIMIT, CommitId, MirrorName, Resolved
from ..presence import exists, matching
from ..telemetry import log
from ..workers.pool import Workers
from ..workers.turns import Turns
from .chains import (
    NEIGHBOURS,
    SHORT,
    Layers,
    PackLayer,
    chain,
    choose_root,
    is_short,
    plan,
    plan_far,
)
from .packer import TIMEOUT, Packer, PackFile, together, unservable
from .store import building, publish

if TYPE_CHECKING:  # the store's library is an extra, and takes 0.1 s
    from ..fleet.exchange import SharedClosures

# a pack that takes longer, or more memory, is made by git instead
_QUICK_TIMEOUT = timedelta(seconds=30)
# commits resolved lately; one forgotten is read again
_KEPT_COMMITS = 64

Recorded = Callable[[MirrorName], Awaitable[Collection[CommitId]]]


async def nothing_recorded(name: MirrorName) -> Collection[CommitId]:
    return ()


class Commits:
    """A cache of commits: tree, time and nearest ancestors, read by a worker.

    Never stale, because full ids are immutable. Belongs to one event loop.
    """

    def __init__(self, workers: Workers, mirrors_path: Callable[[MirrorName], Path]) -> None:
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._known: LRUCache[tuple[str, CommitId], Resolved] = LRUCache(_KEPT_COMMITS)

    def learn(self, name: MirrorName, resolved: Resolved) -> None:
        """Add a commit that another part has read."""
        self._known[name.key, resolved.commit] = resolved

    async def get(self, name: MirrorName, commit: CommitId) -> Resolved:
        """Return a commit, read and hashed; raises CommitNotFoundError, CommitUnservableError."""
        resolved = self._known.get((name.key, commit))
        try:
            if resolved is None:
                resolved = await self._workers.run(
                    resolve, self._mirrors_path(name), commit, timeout=_QUICK_TIMEOUT
                )
        except errors.CommitNotFoundError as error:
            raise _not_found(f"find commit {commit}", name, commit) from error
        except errors.CorruptObjectError as error:
            raise errors.CommitUnservableError(
                f"cannot serve commit {commit}: its object is damaged",
                hint="audit and heal the mirror",
                commit=commit,
            ) from error
        self.learn(name, resolved)
        return resolved


# of first parents: where a short walk finds nothing to share, all of them
_WALK_LIMITS = (2048, None)
# in all, and of one user: whoever asks for many commits leaves room for others
_PACKING, _PACKING_OF_USER = 10, 2  # pairs of git
# with a commit-graph git walks over a commit that is missing, without a word
_WALK = ("-c", "core.commitGraph=false", "rev-list", "--first-parent", "--stdin")


@dataclass(kw_only=True, eq=False)
class Closures:
    """The closure packs of all mirrors below `root`, the directory of templates."""

    root: Path
    git: Git
    workers: Workers
    trash: Trash
    deferred: Deferred
    mirrors_path: Callable[[MirrorName], Path]
    recorded: Recorded
    shared: "SharedClosures | None"

    def __post_init__(self) -> None:
        self.packer = Packer(self.git, self.workers)
        self.commits = Commits(self.workers, self.mirrors_path)
        self._layers: dict[str, dict[CommitId, PackLayer]] = {}
        self._packing = Turns(_PACKING, each=_PACKING_OF_USER)
        self._locks: dict[str, Turns] = {}

    async def ensure(self, name: MirrorName, commit: CommitId) -> tuple[PackFile, ...]:
        """Return the packs whose union is exactly the closure of `commit`, root first.

        Raises CommitNotFoundError, CommitUnservableError, DiskFullError.
        """
        async with self._locks.setdefault(name.key, Turns()).turn():
            layers = self._known(name)
            if commit not in layers or not self._is_whole(name, commit):
                await self._build(name, commit)
            return tuple(self._pack_file(name, layer) for layer in chain(layers, commit))

    async def keep_only(
        self, name: MirrorName, needed: Callable[[], Collection[str] | None]
    ) -> int:
        """Remove the packs whose name is not `needed`; returns their bytes.

        `needed` is called while nothing builds; None keeps all packs.
        """
        async with self._locks.setdefault(name.key, Turns()).turn():
            layers, names = self._known(name), needed()
            if names is None:
                return 0
            evicted = [layer for layer in layers.values() if layer.pack not in names]
            for layer in evicted:
                del layers[layer.commit]
            for layer in evicted:
                path = self.directory(name) / layer.commit
                await anyio.to_thread.run_sync(self.trash.discard, path)
            log.info("closures.evicted", mirror=str(name), count=len(evicted), left=len(layers))
            return sum(layer.size_bytes for layer in evicted)

    def known_packs(self, name: MirrorName) -> dict[str, int]:
        """Return the sizes of the packs that were read since the start, by name."""
        return {layer.pack: layer.size_bytes for layer in self._layers.get(name.key, {}).values()}

    def forget(self, name: MirrorName) -> None:
        """Forget the layers of a mirror whose packs were removed."""
        self._layers.pop(name.key, None)

    def directory(self, name: MirrorName) -> Path:
        return self.root / str(name) / "packs"

    def _pack_file(self, name: MirrorName, layer: PackLayer) -> PackFile:
        path = self.directory(name) / layer.commit / layer.pack
        return PackFile(path, layer.object_count, layer.size_bytes)

    # -- on disk -----------------------------------------------------------------------------------

    def _known(self, name: MirrorName) -> dict[CommitId, PackLayer]:
        """Return the layers on disk, without those whose pack a power failure tore."""
        if name.key not in self._layers:
            layers = self._layers[name.key] = {}
            for file in matching(self.directory(name), "*/layer.json"):
                try:
                    layer = PackLayer.of(json.loads(read_plain(file)))
                except (OSError, ValueError, TypeError):
                    log.warning("closure.dropped", file=str(file))
                    continue
                is_whole = has_both_ends(file.parent / layer.pack, layer.size_bytes)
                if is_whole and layer.commit == file.parent.name:
                    layers[layer.commit] = layer
        return self._layers[name.key]

    def _is_whole(self, name: MirrorName, commit: CommitId, shared: Layers | None = None) -> bool:
        """Return whether each layer of the chain is on disk or shared; forgets missing ones."""
        layers = self._known(name)
        try:
            whole = chain(layers if not shared else {**shared, **layers}, commit)
        except KeyError:
            layers.pop(commit, None)
            return False
        local = (layer for layer in whole if layer.commit in layers)
        missing = [layer.commit for layer in local if not exists(self._pack_file(name, layer).path)]
        for gone in [*missing, commit] if missing else []:
            layers.pop(gone, None)
        return not missing

    # -- shared with other daemons -----------------------------------------------------------------

    async def _find_shared(self, name: MirrorName) -> dict[CommitId, PackLayer]:
        """Return the shared layers whose bases are shared or on disk.

        Each daemon counts depth from its own root: a layer must be deeper than its base.
        """
        if not self.shared:
            return {}
        listed = await self.shared.find(name)
        layers = dict[CommitId, PackLayer]()
        with suppress(TypeError, KeyError):  # of another version
            read = [PackLayer.of(record) for record in listed.values()]
            for layer in sorted(read, key=lambda layer: layer.depth):
                base = self._known(name).get(layer.base) or layers.get(layer.base)  # type: ignore[arg-type]
                if layer.base is None or (base and base.depth < layer.depth):
                    layers[layer.commit] = layer
        return layers

    async def _take(self, name: MirrorName, shared: Layers, commit: CommitId) -> None:
        """Copy the shared layers of a chain that are not on disk."""
        own = self._known(name)
        wanted = [layer for layer in chain({**shared, **own}, commit) if layer.commit not in own]
        if not wanted or self.shared is None:
            return
        with ExitStack() as stack:
            places = {layer.commit: stack.enter_context(self._new_place(name)) for layer in wanted}
            await self.shared.take(name, places)
            for layer in wanted:
                self._publish(name, layer, places[layer.commit])
        counts = {"count": len(wanted), "size_bytes": sum(layer.size_bytes for layer in wanted)}
        log.info("closures.taken", mirror=str(name), commit=commit, **counts)

    async def _offer(self, name: MirrorName, commit: CommitId) -> None:
        """Share a chain, so that no other daemon packs it."""
        if self.shared is None:
            return
        listed = await self.shared.find(name)
        if not self._is_whole(name, commit):  # evicted meanwhile, or the mirror was removed
            return
        new = [layer for layer in chain(self._known(name), commit) if layer.commit not in listed]
        layers = [(asdict(layer), self._pack_file(name, layer).path) for layer in new]
        await self.shared.offer(name, layers)
        log.info("closures.shared", mirror=str(name), commit=commit, count=len(new))

    # -- building ----------------------------------------------------------------------------------

    async def _build(self, name: MirrorName, commit: CommitId) -> None:
        try:
            await self._build_on(name, commit, await self._find_shared(name))
        except (
            errors.CatalogUnavailableError,
            errors.StoreUnavailableError,
            errors.StoreDamagedError,
        ) as error:
            log.warning("closures.not_taken", mirror=str(name), detail=error.message)
            await self._build_on(name, commit, {})

    async def _build_on(self, name: MirrorName, commit: CommitId, shared: Layers) -> None:
        line = [commit]
        if commit not in shared or not self._is_whole(name, commit, shared):
            line = await self._line_to_base(name, commit, shared)
        self.directory(name).mkdir(parents=True, exist_ok=True, mode=0o700)
        if line[-1] in shared or line[-1] in self._known(name):
            await self._take(name, shared, line[-1])
        if commit in self._known(name):
            return
        # a short step has no room for a way-point; skip reading the recorded commits
        straight = len(line) > SHORT + 1 and commit in await self.recorded(name)
        far = len(line) > 2 * NEIGHBOURS and not straight
        steps = (
            plan_far(self._known(name), line)
            if far
            else plan(self._known(name), line, straight=straight)
        )
        layers = {**self._known(name), **{step.commit: step for step in steps}}
        with ExitStack() as stack:
            places = [(step, stack.enter_context(self._new_place(name))) for step in steps]
            long = [
                self._pack(name, step, place)
                for step, place in places
                if not is_short(layers, step)
            ]
            packed = {layer.commit: layer for layer in await together(*long)}
            for step, place in places:  # a short step needs the packs below it in place
                layer = packed.get(step.commit) or await self._pack_short(name, step, place)
                self._publish_packed(name, layer, place)
        if long and self.shared:
            self.deferred.begin(("share", commit), partial(self._offer, name, commit))
        near = line[: NEIGHBOURS + 1]
        if far or [step.base for step in steps] == [None, near[-1]]:
            work = partial(self._lay_waypoints, name, near[1:])
            self.deferred.begin(("way-points", commit), work)

    async def _lay_waypoints(self, name: MirrorName, line: list[CommitId]) -> None:
        """Pack way-points for the neighbours below a first or far commit, itself one wide step."""
        for step in plan(self._known(name), line, ahead=True)[:-1]:
            async with self._locks[name.key].turn():
                layers = self._known(name)
                if step.commit in layers or step.base not in layers:
                    continue
                with self._new_place(name) as place:
                    self._publish_packed(name, await self._pack_short(name, step, place), place)

    async def _pack(self, name: MirrorName, step: PackLayer, place: Path) -> PackLayer:
        """Pack a planned layer with git; reads its base from the mirror, so any order will do."""
        mirror = self.mirrors_path(name)
        async with self._packing.turn():
            packed = await self.packer.pack_range(mirror, step.commit, step.base, place)
        return step.packed(packed.path.name, packed.object_count, packed.size_bytes)

    async def _pack_short(self, name: MirrorName, step: PackLayer, place: Path) -> PackLayer:
        """Pack a layer of a few commits in a worker, over the packs below; a large one with git."""
        base = chain(self._known(name), step.base or step.commit)
        below = [self._pack_file(name, layer).index for layer in base]
        mirror = self.mirrors_path(name)
        try:
            packed = await self.workers.run(
                pack_increment, mirror, step.commit, below, place, timeout=_QUICK_TIMEOUT
            )
        except errors.CorruptObjectError as error:
            raise unservable(step.commit, error) from error
        except (errors.DeadlineError, errors.OutOfMemoryError):
            packed = None
        if packed is None:
            return await self._pack(name, step, place)
        return step.packed(packed.name, packed.object_count, packed.size_bytes)

    def _new_place(self, name: MirrorName) -> AbstractContextManager[Path]:
        return building(self.directory(name), self.trash)

    def _publish(self, name: MirrorName, layer: PackLayer, place: Path) -> None:
        (place / "layer.json").write_text(json.dumps(asdict(layer)))
        publish(place, self.directory(name) / layer.commit)
        self._known(name)[layer.commit] = layer

    def _publish_packed(self, name: MirrorName, layer: PackLayer, place: Path) -> None:
        self._publish(name, layer, place)
        fields = {"commit": layer.commit, "base": layer.base, "objects": layer.object_count}
        log.info("closure.packed", mirror=str(name), **fields)

    async def _line_to_base(
        self, name: MirrorName, commit: CommitId, shared: Layers
    ) -> list[CommitId]:
        """Return first parents from `commit` to one that has a layer, or to the new root."""
        layers = {**shared, **self._known(name)}
        line: Sequence[CommitId] = (await self.commits.get(name, commit)).line
        if reached := self._to_known(name, line, shared):
            return reached
        recorded = frozenset(await self.recorded(name))
        if len(line) in (0, FIRST_PARENTS_LIMIT):  # longer, or unreadable: git says why
            for limit in _WALK_LIMITS if recorded or layers else _WALK_LIMITS[:1]:
                line = await self._first_parents(name, commit, limit)
                if reached := self._to_known(name, line, shared):
                    return reached
                if limit and len(line) < limit:
                    break
        return list(line[: choose_root(layers, line, recorded) + 1])

    def _to_known(
        self, name: MirrorName, line: Sequence[CommitId], shared: Layers
    ) -> list[CommitId] | None:
        layers = self._known(name)
        for position, commit in enumerate(line):
            is_known = position and (commit in layers or commit in shared)
            if is_known and self._is_whole(name, commit, shared):
                return list(line[: position + 1])
        return None

    async def _first_parents(
        self, name: MirrorName, commit: CommitId, limit: int | None
    ) -> list[CommitId]:
        bound = (f"--max-count={limit}",) if limit else ()
        path = self.mirrors_path(name)
        try:
            done = await self.git.run(
                *_WALK, *bound, git_dir=path, stdin=lines_of([commit]), timeout=TIMEOUT,
                doing=f"walk {commit}",
            )  # fmt: skip
        except (errors.CorruptObjectError, errors.GitFailedError) as error:
            doing = f"look for {commit}"
            [info] = await object_info(self.git, path, [commit], doing=doing, bisect=True)
            if info.exists:
                raise unservable(commit, error) from error
            raise _not_found(f"pack commit {commit}", name, commit) from error
        return [CommitId(line) for line in done.lines]


def _not_found(doing: str, name: MirrorName, commit: CommitId) -> errors.CommitNotFoundError:
    return errors.CommitNotFoundError(
        f"cannot {doing}: {name} does not have it",
        hint="sync the mirror, or pin the commit so that it is fetched",
        commit=commit,
        mirror=str(name),
    )
