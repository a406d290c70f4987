"""Closure packs of a mirror, layered along first-parent ancestry: one serves hundreds of commits.

A pack layer is one pack: the closure of its commit without that of its base's commit, so a chain of
layers is exactly the closure of the commit at its end. Way-points on a grid along the first-parent
line keep chains short, and neighbours share all but their last layer. A layer of a few commits is
made by a worker without a process of git (`git/objects/repository.py`), a longer one by git
(`packer.py`); layers that only neighbours will need are made after the answer. Owns
`templates/<mirror>/packs/`, a cache: a layer is renamed into place after those it stands on.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import anyio.to_thread

from ... import errors
from ...errors import CommitNotFoundError, CorruptObjectError
from ...git.command import Git, lines_of, object_info
from ...git.objects.repository import first_parents, pack_increment, resolve
from ...git.packs import has_both_ends
from ...git.turns import Turns
from ...git.workers import Workers
from ...host.trash import Trash
from ...jobs.operations import Deferred
from ...model import NEAR, CommitId, MirrorName, Resolved
from ...telemetry import log
from .packer import TIMEOUT, Packer, PackFile, together, unservable
from .store import building, publish, remove_all

CHAIN_LIMIT = 96
STRIDES = (65536, 4096, 256, 32)
SHORT = 16  # first-parent steps
NARROW = 4  # way-points laid ahead for neighbours: so many to a step of the narrowest grid
MARGINS = (256, 8192)
_QUICK_TIMEOUT = timedelta(seconds=30)
_KEPT_COMMITS = 64
_NEAR = MARGINS[0] + 1  # first parents that a worker looks at before git is asked for more
_REACHES = (2048, None)
_PACKING, _PACKING_OF_USER = 10, 2  # pairs of git
_WALK = ("-c", "core.commitGraph=false", "rev-list", "--first-parent", "--stdin")

Recorded = Callable[[MirrorName], Awaitable[Collection[CommitId]]]


@dataclass(frozen=True, slots=True)
class PackLayer:
    """`depth` counts first-parent steps from the root layer, `length` the layers up to this one.

    A layer that is only planned has no pack yet.
    """

    commit: CommitId
    base: CommitId | None
    depth: int
    length: int
    pack: str = ""
    object_count: int = 0
    size_bytes: int = 0


Layers = Mapping[CommitId, PackLayer]


async def nothing_recorded(name: MirrorName) -> Collection[CommitId]:
    return ()


class Commits:
    """Tree, time and nearest ancestors of commits, read once by a worker and remembered a while.

    What a full id names never changes. Belongs to one event loop.
    """

    def __init__(self, workers: Workers, mirrors_path: Callable[[MirrorName], Path]) -> None:
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._known: dict[tuple[str, CommitId], Resolved] = {}

    def learn(self, name: MirrorName, found: Resolved) -> None:
        """Keep facts that another part read, so that they are not read again."""
        self._known.pop((name.key, found.commit), None)
        self._known[name.key, found.commit] = found
        if len(self._known) > _KEPT_COMMITS:
            del self._known[next(iter(self._known))]

    async def get(self, name: MirrorName, commit: CommitId) -> Resolved:
        """Facts of hashed bytes; raises CommitNotFoundError, CommitUnservableError."""
        found = self._known.get((name.key, commit))
        try:
            if found is None:
                found = await self._workers.run(
                    resolve, self._mirrors_path(name), commit, timeout=_QUICK_TIMEOUT
                )
        except CommitNotFoundError as error:
            raise _not_found(f"find commit {commit}", name, commit) from error
        except CorruptObjectError as error:
            raise errors.CommitUnservableError(
                f"cannot serve commit {commit}: its object is damaged",
                hint="audit and heal the mirror",
                commit=commit,
            ) from error
        self.learn(name, found)
        return found


@dataclass(kw_only=True, eq=False)
class Closures:
    """The closure packs below `root`, the directory of templates."""

    root: Path
    git: Git
    workers: Workers
    trash: Trash
    deferred: Deferred
    mirrors_path: Callable[[MirrorName], Path]
    recorded: Recorded

    def __post_init__(self) -> None:
        self.packer = Packer(self.git, self.workers)
        self.commits = Commits(self.workers, self.mirrors_path)
        self._layers: dict[str, dict[CommitId, PackLayer]] = {}
        self._packing = Turns(_PACKING, each=_PACKING_OF_USER)
        self._locks: dict[str, Turns] = {}

    async def ensure(self, name: MirrorName, commit: CommitId) -> tuple[PackFile, ...]:
        """The packs whose union is exactly the closure of `commit`, root first.

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
        """Remove the packs without a `needed` name, asked while nothing builds: None keeps all.

        Answers the bytes that went.
        """
        async with self._locks.setdefault(name.key, Turns()).turn():
            layers, names = self._known(name), needed()
            if names is None:
                return 0
            gone = [layer for layer in layers.values() if layer.pack not in names]
            for layer in gone:
                del layers[layer.commit]
            paths = [self.directory(name) / layer.commit for layer in gone]
            await anyio.to_thread.run_sync(remove_all, paths, self.trash)
            log.info("closures.evicted", mirror=str(name), count=len(gone), left=len(layers))
            return sum(layer.size_bytes for layer in gone)

    def known_packs(self, name: MirrorName) -> dict[str, int]:
        """The sizes of the packs that were read since the start, by name."""
        return {each.pack: each.size_bytes for each in self._layers.get(name.key, {}).values()}

    def forget(self, name: MirrorName) -> None:
        """Drop the memory of a mirror whose packs were removed."""
        self._layers.pop(name.key, None)

    def directory(self, name: MirrorName) -> Path:
        return self.root / str(name) / "packs"

    def _pack_file(self, name: MirrorName, layer: PackLayer) -> PackFile:
        path = self.directory(name) / layer.commit / layer.pack
        return PackFile(path, layer.object_count, layer.size_bytes)

    # -- what exists -------------------------------------------------------------------------------

    def _known(self, name: MirrorName) -> dict[CommitId, PackLayer]:
        """The layers on disk. Packs are not flushed: one that a power cut tore is left out."""
        if name.key not in self._layers:
            layers = self._layers[name.key] = {}
            for file in self.directory(name).glob("*/layer.json"):
                try:
                    layer = PackLayer(**json.loads(file.read_text()))
                except (OSError, ValueError, TypeError):
                    log.warning("closure.dropped", file=str(file))
                    continue
                is_whole = has_both_ends(file.parent / layer.pack, layer.size_bytes)
                if is_whole and layer.commit == file.parent.name:
                    layers[layer.commit] = layer
        return self._layers[name.key]

    def _is_whole(self, name: MirrorName, commit: CommitId) -> bool:
        """Whether every layer of the chain is still on disk; forgets those that are not."""
        layers = self._known(name)
        try:
            standing = chain(layers, commit)
        except KeyError:
            layers.pop(commit, None)
            return False
        lost = [layer for layer in standing if not self._pack_file(name, layer).path.exists()]
        for gone in [*(layer.commit for layer in lost), commit] if lost else []:
            layers.pop(gone, None)
        return not lost

    # -- building ----------------------------------------------------------------------------------

    async def _build(self, name: MirrorName, commit: CommitId) -> None:
        line = await self._line_to_base(name, commit)
        directory = self.directory(name)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # a short step has hardly room for a way-point, and no time to read what is recorded
        straight = len(line) > SHORT + 1 and commit in await self.recorded(name)
        steps = plan(self._known(name), line, straight=straight)
        layers = {**self._known(name), **{step.commit: step for step in steps}}
        with ExitStack() as stack:
            begin = partial(building, directory, self.trash)
            places = [(step, stack.enter_context(begin())) for step in steps]
            long = [
                self._pack(name, step, place)
                for step, place in places
                if not is_short(layers, step)
            ]
            packed = {layer.commit: layer for layer in await together(*long)}
            for step, place in places:  # a short one is packed over those that are in their place
                layer = packed.get(step.commit) or await self._pack_short(name, step, place)
                self._publish(name, layer, place)
        if [step.base for step in steps] == [None, line[-1]]:
            work = partial(self._lay_waypoints, name, line[1:])
            self.deferred.begin(("way-points", commit), work)

    async def _lay_waypoints(self, name: MirrorName, line: list[CommitId]) -> None:
        """Pack what the neighbours below a first commit will stand on.

        The pack of that commit went past it in one wide step.
        """
        for step in plan(self._known(name), line, ahead=True)[:-1]:
            async with self._locks[name.key].turn():
                known = self._known(name)
                if step.commit in known or step.base not in known:
                    continue
                with building(self.directory(name), self.trash) as place:
                    self._publish(name, await self._pack_short(name, step, place), place)

    async def _pack(self, name: MirrorName, step: PackLayer, place: Path) -> PackLayer:
        """Write a planned layer; it needs the objects of its base from the mirror, not the pack."""
        mirror = self.mirrors_path(name)
        async with self._packing.turn():
            packed = await self.packer.pack_range(mirror, step.commit, step.base, place)
        count, size = packed.object_count, packed.size_bytes
        return replace(step, pack=packed.path.name, object_count=count, size_bytes=size)

    async def _pack_short(self, name: MirrorName, step: PackLayer, place: Path) -> PackLayer:
        """Write a layer of a few commits over packs that exist; a large one is left to git."""
        standing = chain(self._known(name), step.base or step.commit)
        below = [self._pack_file(name, layer).index for layer in standing]
        mirror = self.mirrors_path(name)
        try:
            packed = await self.workers.run(
                pack_increment, mirror, step.commit, below, place, timeout=_QUICK_TIMEOUT
            )
        except CorruptObjectError as error:
            raise unservable(step.commit, error) from error
        except (errors.DeadlineError, errors.OutOfMemoryError):
            packed = None
        if packed is None:
            return await self._pack(name, step, place)
        count, size = packed.object_count, packed.size_bytes
        return replace(step, pack=packed.name, object_count=count, size_bytes=size)

    def _publish(self, name: MirrorName, layer: PackLayer, place: Path) -> None:
        (place / "layer.json").write_text(json.dumps(asdict(layer)))
        publish(place, self.directory(name) / layer.commit)
        self._known(name)[layer.commit] = layer
        facts = {"commit": layer.commit, "base": layer.base, "objects": layer.object_count}
        log.info("closure.packed", mirror=str(name), **facts)

    async def _line_to_base(self, name: MirrorName, commit: CommitId) -> list[CommitId]:
        """First parents from `commit` back to one that has a layer, or to the root to be packed."""
        known = self._known(name)
        near: Sequence[CommitId] = (await self.commits.get(name, commit)).line
        found = self._to_known(name, near)
        if found is None and len(near) == NEAR:
            mirror = self.mirrors_path(name)
            try:  # as far as a root may be away
                near = await self.workers.run(
                    first_parents, mirror, commit, _NEAR, timeout=_QUICK_TIMEOUT
                )
            except (CorruptObjectError, errors.DeadlineError):
                near = []  # git says why
            found = self._to_known(name, near)
        if found:
            return found
        recorded = frozenset(await self.recorded(name))
        if near and not known and not recorded:
            return list(near[: choose_root(known, near, recorded) + 1])
        line = list[CommitId]()
        for limit in _REACHES if recorded or known else _REACHES[:1]:
            line = await self._first_parents(name, commit, limit)
            if found := self._to_known(name, line):
                return found
            if limit and len(line) < limit:
                break
        return line[: choose_root(known, line, recorded) + 1]

    def _to_known(self, name: MirrorName, line: Sequence[CommitId]) -> list[CommitId] | None:
        for position, at in enumerate(line):
            if position and at in self._known(name) and self._is_whole(name, at):
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
        except (CorruptObjectError, errors.GitFailedError) as error:
            doing = f"look for {commit}"
            [there] = await object_info(self.git, path, [commit], doing=doing, bisect=True)
            if there.exists:
                raise unservable(commit, error) from error
            raise _not_found(f"pack commit {commit}", name, commit) from error
        return [CommitId(at) for at in done.lines]


def _not_found(doing: str, name: MirrorName, commit: CommitId) -> CommitNotFoundError:
    return CommitNotFoundError(
        f"cannot {doing}: {name} does not have it",
        hint="sync the mirror, or pin the commit so that it is fetched",
        commit=commit,
        mirror=str(name),
    )


# -- chains: which layers a commit needs, decided without a look at the disk -----------------------


def chain(layers: Layers, commit: CommitId) -> list[PackLayer]:
    """The layers from the root up to `commit`; KeyError where one is missing."""
    found = [layers[commit]]
    while (base := found[-1].base) is not None:
        found.append(layers[base])
    return found[::-1]


def choose_root(known: Layers, line: Sequence[CommitId], recorded: Collection[CommitId]) -> int:
    """The position on `line`, newest first, of the commit whose whole closure is packed.

    The oldest recorded commit: every later one then shares its pack. Where none is older than the
    one asked for, some steps below it, so that its older neighbours share too; more of them with
    each root that was placed too high.
    """
    oldest = max((position for position, at in enumerate(line) if at in recorded), default=0)
    roots = sum(layer.base is None for layer in known.values())
    return oldest or min(MARGINS[min(roots, len(MARGINS) - 1)], len(line) - 1)


def plan(
    known: Layers, line: Sequence[CommitId], *, ahead: bool = False, straight: bool = False
) -> list[PackLayer]:
    """The layers to build for the first of `line`, each after those it stands on.

    `line` is first parents, newest first; its last commit has a layer, or becomes a root. `ahead`
    puts way-points all along it, closer than the grid: fewer objects between two neighbours. A
    `straight` step has none within a step of the second grid: as recorded commits are mostly asked
    for oldest first, each stands on the one before, and no object is packed twice.
    """
    planned: dict[CommitId, PackLayer] = {}
    layers = dict(known)

    def add(commit: CommitId, base: PackLayer | None, depth: int) -> None:
        length = base.length + 1 if base else 1
        on = base.commit if base else None
        layers[commit] = planned[commit] = PackLayer(commit, on, depth, length)

    def waypoint_at(depth: int) -> PackLayer:
        """The layer at `depth`: planned, or further down the chain that the line starts with."""
        if depth in on_line and on_line[depth] in layers:
            return layers[on_line[depth]]
        return next(layer for layer in reversed(chain(layers, line[-1])) if layer.depth <= depth)

    if line[-1] not in layers:
        add(line[-1], None, 0)
    start = layers[line[-1]].depth
    end = start + len(line) - 1
    on_line = {start + steps: at for steps, at in enumerate(reversed(line))}
    step = max(1, STRIDES[-1] // NARROW)
    depths: Iterable[int] = grid(start, end)
    if ahead:
        depths = range(start - start % step + step, end + 1, step)
    elif straight:
        is_near = end - start <= STRIDES[-2]
        depths = () if is_near else [depth for depth in depths if depth % STRIDES[-2] == 0]
    for depth in depths:
        if depth < end and on_line[depth] not in layers:
            add(
                on_line[depth],
                waypoint_at(previous(depth) if is_waypoint(depth) else depth - step),
                depth,
            )
    if line[0] in layers:
        return list(planned.values())
    if is_waypoint(end) and not straight:
        base = waypoint_at(previous(end))
    else:
        base = choose_base(layers, next(at for at in line[1:] if at in layers), end)
    # another commit in just this place is a variant of this one: they should share their parent
    has_sibling = any(at.base == base.commit and at.depth == end for at in known.values())
    if base.commit != line[1] and has_sibling:
        if line[1] not in layers:
            add(line[1], base, end - 1)
        base = layers[line[1]]
    add(line[0], base, end)
    return list(planned.values())


def choose_base(layers: Layers, nearest: CommitId, depth: int) -> PackLayer:
    """The layer for a step to `depth`: the nearest, or where its chain is full one further down.

    That packs the least again for each place that it makes free in the chain: with thousands of
    commits asked for in turn an object is in about three packs.
    """
    standing = chain(layers, nearest)
    if len(standing) < CHAIN_LIMIT:
        return standing[-1]
    lower = enumerate(standing[: CHAIN_LIMIT * 3 // 4])
    return min(lower, key=lambda at: (depth - at[1].depth) / (len(standing) - at[0]))[1]


def grid(start: int, end: int) -> Iterator[int]:
    """Depths of the way-points from `start` to `end`: each stride's after the wider one's last."""
    for stride in STRIDES:
        for depth in range(start - start % stride + stride, end + 1, stride):
            start = depth
            yield depth


def is_short(layers: Layers, layer: PackLayer) -> bool:
    """Whether a layer is so near to its base that a git takes longer to start than to pack it."""
    return layer.base is not None and layer.depth - layers[layer.base].depth <= SHORT


def is_waypoint(depth: int) -> bool:
    return depth % STRIDES[-1] == 0


def previous(depth: int) -> int:
    """The way-point below a way-point."""
    return depth - next(stride for stride in STRIDES if depth % stride == 0)
