"""Closure packs of a mirror, layered along first-parent ancestry: hundreds of base commits cost little more than one.

A layer is one pack: the closure of its commit without the closure of its base layer's commit; the layers of a chain together are
exactly the closure of the commit at its end. Chains share layers: way-points on a grid along the first-parent line carry the
distance, and no chain is longer than CHAIN_LIMIT. Owns `templates/<mirror>/packs/`, a cache: a layer is built in a temporary
directory and renamed, so a crash leaves a whole layer or a leftover that `open` removes.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
import structlog

from ..errors import CommitNotFoundError, CorruptObjectError, DiskFullError, GitFailedError
from ..git.command import Git
from ..git.packs import PackIndex, pack_trailer
from ..git.workers import Workers
from ..model import CommitId, MirrorName
from .packing import TIMEOUT, PackFile, pack_range

CHAIN_LIMIT = 34
STRIDES = (61440, 5120, 256)
_NEAR = 600
BUILDING = ".building-"

log = structlog.get_logger()

Recorded = Callable[[MirrorName], Awaitable[Collection[CommitId]]]


@dataclass(frozen=True, slots=True)
class Layer:
    """`depth` counts first-parent steps from the root layer's commit, `length` the layers of the chain that ends here."""

    commit: CommitId
    base: CommitId | None
    depth: int
    length: int
    pack: str
    object_count: int
    size_bytes: int


async def nothing_recorded(name: MirrorName) -> Collection[CommitId]:
    return ()


class Closures:
    """The closure packs below one templates directory."""

    def __init__(
        self,
        *,
        store: Path,
        git: Git,
        workers: Workers,
        mirrors_path: Callable[[MirrorName], Path],
        recorded: Recorded = nothing_recorded,
    ) -> None:
        self._store = store
        self._git = git
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._recorded = recorded
        self._layers: dict[str, dict[CommitId, Layer]] = {}
        self._locks: dict[str, anyio.Lock] = {}

    async def ensure(self, name: MirrorName, commit: CommitId) -> tuple[PackFile, ...]:
        """The packs whose union is exactly the closure of `commit`, root first.

        Raises CommitNotFoundError, CommitUnservableError, DiskFullError.
        """
        async with self._locks.setdefault(name.key, anyio.Lock()):
            layers = self._known(name)
            if commit not in layers or not self._is_whole(name, commit):
                await self._build(name, commit)
            return tuple(self._pack_file(name, layer) for layer in self._chain(name, commit))

    def forget(self, name: MirrorName) -> None:
        """Drop what is known of a mirror whose packs were removed."""
        self._layers.pop(name.key, None)

    def directory(self, name: MirrorName) -> Path:
        return self._store / str(name) / "packs"

    def _pack_file(self, name: MirrorName, layer: Layer) -> PackFile:
        return PackFile(self.directory(name) / layer.commit / layer.pack, layer.object_count, layer.size_bytes)

    # -- what exists --------------------------------------------------------------------------------------------------

    def _known(self, name: MirrorName) -> dict[CommitId, Layer]:
        if name.key not in self._layers:
            self._layers[name.key] = {layer.commit: layer for layer in _load(self.directory(name))}
        return self._layers[name.key]

    def _chain(self, name: MirrorName, commit: CommitId) -> list[Layer]:
        layers, chain, at = self._known(name), list[Layer](), commit
        while True:
            chain.append(layers[at])
            base = layers[at].base
            if base is None:
                return chain[::-1]
            at = base

    def _is_whole(self, name: MirrorName, commit: CommitId) -> bool:
        """Whether every layer of the chain is still on disk; forgets the ones that are not, and what stood on them."""
        layers = self._known(name)
        try:
            chain = self._chain(name, commit)
        except KeyError:
            layers.pop(commit, None)
            return False
        lost = [layer for layer in chain if not self._pack_file(name, layer).path.exists()]
        for layer in lost:
            layers.pop(layer.commit, None)
        if lost:
            layers.pop(commit, None)
        return not lost

    # -- building -----------------------------------------------------------------------------------------------------

    async def _build(self, name: MirrorName, commit: CommitId) -> None:
        line = await self._line_to_known(name, commit)
        if line[-1] not in self._known(name):
            line = line[: line.index(await self._choose_root(name, line)) + 1]
            await self._build_layer(name, line[-1], None, depth=0)
        start = self._known(name)[line[-1]]
        waypoints = {start.depth + steps: at for steps, at in enumerate(reversed(line))}
        for depth in grid(start.depth, start.depth + len(line) - 1):
            await self._build_waypoint(name, waypoints, depth)
        if commit not in self._known(name):
            await self._build_layer(name, commit, self._nearest(name, line), depth=start.depth + len(line) - 1)

    async def _build_waypoint(self, name: MirrorName, waypoints: Mapping[int, CommitId], depth: int) -> None:
        if waypoints[depth] in self._known(name):
            return
        base = self._waypoint_at(name, waypoints, previous(depth))
        await self._build_layer(name, waypoints[depth], base, depth=depth)

    def _waypoint_at(self, name: MirrorName, waypoints: Mapping[int, CommitId], depth: int) -> Layer:
        """The layer on this line at `depth`: one just built, or one further down the chain that the line starts with."""
        layers = self._known(name)
        if depth in waypoints:
            return layers[waypoints[depth]]
        chain = self._chain(name, waypoints[min(waypoints)])
        return next(layer for layer in reversed(chain) if layer.depth <= depth)

    def _nearest(self, name: MirrorName, line: Sequence[CommitId]) -> Layer:
        """The nearest layer below the end of `line` whose chain has room for one more."""
        layers = self._known(name)
        known = (layers[at] for at in line[1:] if at in layers)
        chain = reversed(self._chain(name, line[-1]))
        return next(layer for layer in (*known, *chain) if layer.length < CHAIN_LIMIT)

    async def _line_to_known(self, name: MirrorName, commit: CommitId) -> list[CommitId]:
        """First parents from `commit` back to the first one that has a layer, or to the very first."""
        for limit in (_NEAR, None):
            line = await self._first_parents(name, commit, limit)
            for position, at in enumerate(line):
                if position and at in self._known(name) and self._is_whole(name, at):
                    return line[: position + 1]
            if limit and len(line) < limit:
                break
        return line

    async def _first_parents(self, name: MirrorName, commit: CommitId, limit: int | None) -> list[CommitId]:
        bound = (f"--max-count={limit}",) if limit else ()
        path = self._mirrors_path(name)
        try:
            done = await self._git.run(
                "rev-list", "--first-parent", *bound, commit, git_dir=path, timeout=TIMEOUT, doing=f"walk {commit}"
            )
        except (CorruptObjectError, GitFailedError) as error:
            raise CommitNotFoundError(
                f"cannot pack commit {commit}: {name} does not have it whole",
                hint="sync the mirror, or audit it",
                commit=commit,
                mirror=str(name),
            ) from error
        return [CommitId(at) for at in done.lines]

    async def _choose_root(self, name: MirrorName, line: Sequence[CommitId]) -> CommitId:
        """The oldest recorded commit on the line: every later one then shares its pack."""
        recorded = set(await self._recorded(name)) | {line[0]}
        return next(at for at in reversed(line) if at in recorded)

    async def _build_layer(self, name: MirrorName, commit: CommitId, base: Layer | None, *, depth: int) -> Layer:
        directory = self.directory(name)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with building(directory) as temporary:
            packed = await pack_range(
                self._git, self._workers, self._mirrors_path(name), commit, base.commit if base else None, into=temporary
            )
            layer = Layer(
                commit=commit,
                base=base.commit if base else None,
                depth=depth,
                length=base.length + 1 if base else 1,
                pack=packed.path.name,
                object_count=packed.object_count,
                size_bytes=packed.size_bytes,
            )
            (temporary / "layer.json").write_text(json.dumps(asdict(layer)))
            publish(temporary, directory / commit)
        self._known(name)[commit] = layer
        log.info("closure.packed", mirror=str(name), commit=commit, base=layer.base, objects=layer.object_count)
        return layer


def grid(start: int, end: int) -> Iterator[int]:
    """Depths of the way-points above `start` and up to `end`: for each stride those after the last one of the wider stride."""
    for stride in STRIDES:
        for depth in range(start - start % stride + stride, end + 1, stride):
            start = depth
            yield depth


def previous(depth: int) -> int:
    """The way-point below a way-point."""
    return depth - next(stride for stride in STRIDES if depth % stride == 0)


# -- on disk ----------------------------------------------------------------------------------------------------------


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """A temporary directory beside the result; gone afterwards unless it was renamed."""
    temporary = Path(tempfile.mkdtemp(prefix=BUILDING, dir=directory))
    try:
        yield temporary
    except OSError as error:
        raise_disk_full(error, directory)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, target: Path) -> None:
    """Put a finished directory in its place, over whatever lies there."""
    temporary.chmod(0o755)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)


def raise_disk_full(error: OSError, directory: Path) -> None:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        raise DiskFullError(
            f"cannot write below {directory.name}: {error.strerror}", hint="free space below the state directory"
        ) from error


def remove_leftovers(directory: Path) -> int:
    """Remove what a killed build left; nobody builds before this ran."""
    leftovers = list(directory.glob(f"{BUILDING}*"))
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return len(leftovers)


def _load(directory: Path) -> Iterator[Layer]:
    for file in directory.glob("*/layer.json"):
        try:
            layer = Layer(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            log.warning("closure.dropped", file=str(file))
            continue
        if layer.commit == file.parent.name and _is_sound(file.parent / layer.pack):
            yield layer


def _is_sound(pack: Path) -> bool:
    """A look at both ends: packs are not flushed, so a power cut can leave less than was written."""
    try:
        return pack_trailer(pack) == PackIndex(pack.with_suffix(".idx")).pack_checksum
    except (OSError, CorruptObjectError):
        return False
