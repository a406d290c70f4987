"""Closure packs of a mirror, layered along first-parent ancestry: hundreds of base commits cost little more than one.

The layers of a chain (`chains.py`) together are exactly the closure of the commit at its end. A layer of a few commits is made
by a worker that walks them (`git/objects/increments.py`), without a process of git; a longer one by git (`packing.py`). What
only neighbours will need is made after the answer. Owns
`templates/<mirror>/packs/`, a cache: a layer is built in a temporary directory and renamed after those it stands on, so a crash
leaves whole layers or leftovers that `open` removes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from ...errors import (
    CommitNotFoundError,
    CommitUnservableError,
    CorruptObjectError,
    DeadlineError,
    GitFailedError,
    OutOfMemoryError,
)
from ...git.command import Git
from ...git.objects.commits import first_parents, pack_increment, resolve
from ...git.pack_writer import Packed
from ...git.packs import has_both_ends
from ...git.turns import Turns
from ...git.workers import Workers
from ...host.trash import Trash
from ...model import NEAR, CommitId, MirrorName, Resolved
from ..deferred import Deferred
from .chains import MARGINS, Layer, chain, choose_root, is_short, is_waypoint, plan
from .packer import TIMEOUT, Packer, PackFile, together, unservable
from .store import building, publish, remove_all

_TIMEOUT = timedelta(seconds=30)
_KEPT = 64


class Commits:
    """Belongs to one event loop."""

    def __init__(self, workers: Workers, mirrors_path: Callable[[MirrorName], Path]) -> None:
        self._workers = workers
        self._mirrors_path = mirrors_path
        self._known: dict[tuple[str, CommitId], Resolved] = {}

    def learn(self, name: MirrorName, found: Resolved) -> None:
        """Keep what was found out anyhow, so that nobody asks again."""
        self._known.pop((name.key, found.commit), None)
        self._known[name.key, found.commit] = found
        if len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]

    async def get(self, name: MirrorName, commit: CommitId) -> Resolved:
        """Of bytes that were hashed when they were read; raises CommitNotFoundError, CommitUnservableError."""
        found = self._known.get((name.key, commit)) or await self._read(name, commit)
        self.learn(name, found)
        return found

    async def _read(self, name: MirrorName, commit: CommitId) -> Resolved:
        try:
            found: Resolved = await self._workers.run(
                resolve, self._mirrors_path(name), commit, timeout=_TIMEOUT
            )
        except CommitNotFoundError as error:
            raise CommitNotFoundError(
                f"cannot find commit {commit}: {name} does not have it",
                hint="sync the mirror, or pin the commit so that it is fetched",
                commit=commit,
                mirror=str(name),
            ) from error
        except CorruptObjectError as error:
            raise CommitUnservableError(
                f"cannot serve commit {commit}: its object is damaged",
                hint="audit and heal the mirror",
                commit=commit,
            ) from error
        return found


_NEAR = MARGINS[0] + 1  # first parents that a worker looks at before git is asked for more
_REACHES = (2048, None)
_QUICK_TIMEOUT = timedelta(seconds=30)
_PACKING, _PACKING_OF_USER = 10, 2  # pairs of git
_WALK = ("-c", "core.commitGraph=false", "rev-list", "--first-parent")

log = structlog.get_logger()

Recorded = Callable[[MirrorName], Awaitable[Collection[CommitId]]]


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
        packer: Packer,
        commits: Commits,
        trash: Trash,
        afterwards: Deferred,
        mirrors_path: Callable[[MirrorName], Path],
        recorded: Recorded = nothing_recorded,
    ) -> None:
        self._store = store
        self._trash = trash
        self._afterwards = afterwards
        self._git = git
        self._workers = workers
        self._packer = packer
        self._commits = commits
        self._mirrors_path = mirrors_path
        self._recorded = recorded
        self._layers: dict[str, dict[CommitId, Layer]] = {}
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
    ) -> None:
        """Remove the packs that are not among the `needed` names, which are asked for while nothing is built; None keeps all."""
        async with self._locks.setdefault(name.key, Turns()).turn():
            layers = self._known(name)
            names = needed()
            if names is None:
                return
            gone = [layer for layer in layers.values() if layer.pack not in names]
            for layer in gone:
                del layers[layer.commit]
            await anyio.to_thread.run_sync(
                remove_all, [self.directory(name) / layer.commit for layer in gone], self._trash
            )
            log.info("closures.dropped", mirror=str(name), count=len(gone), left=len(layers))

    def forget(self, name: MirrorName) -> None:
        """Drop what is known of a mirror whose packs were removed."""
        self._layers.pop(name.key, None)

    def directory(self, name: MirrorName) -> Path:
        return self._store / str(name) / "packs"

    def _pack_file(self, name: MirrorName, layer: Layer) -> PackFile:
        return PackFile(
            self.directory(name) / layer.commit / layer.pack, layer.object_count, layer.size_bytes
        )

    # -- what exists --------------------------------------------------------------------------------------------------

    def _known(self, name: MirrorName) -> dict[CommitId, Layer]:
        if name.key not in self._layers:
            self._layers[name.key] = {layer.commit: layer for layer in _load(self.directory(name))}
        return self._layers[name.key]

    def _is_whole(self, name: MirrorName, commit: CommitId) -> bool:
        """Whether every layer of the chain is still on disk; forgets the ones that are not, and what stood on them."""
        layers = self._known(name)
        try:
            standing = chain(layers, commit)
        except KeyError:
            layers.pop(commit, None)
            return False
        lost = [layer for layer in standing if not self._pack_file(name, layer).path.exists()]
        for layer in lost:
            layers.pop(layer.commit, None)
        if lost:
            layers.pop(commit, None)
        return not lost

    # -- building -----------------------------------------------------------------------------------------------------

    async def _build(self, name: MirrorName, commit: CommitId) -> None:
        line = await self._line_to_base(name, commit)
        directory = self.directory(name)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        steps = plan(self._known(name), line)
        layers = {**self._known(name), **{step.commit: step for step in steps}}
        with ExitStack() as stack:
            places = [
                (step, stack.enter_context(building(directory, self._trash))) for step in steps
            ]
            long = [
                self._pack(name, step, place, quick=step.commit == commit and step.base is not None)
                for step, place in places
                if not is_short(layers, step)
            ]
            packed = {layer.commit: layer for layer in await together(*long)}
            for step, place in places:
                self._publish(
                    name,
                    packed.get(step.commit) or await self._pack_short(name, step, place),
                    place,
                )
        if [step.base for step in steps] == [None, line[-1]]:
            self._afterwards.begin(
                ("way-points", commit), partial(self._lay_waypoints, name, line[1:])
            )

    async def _lay_waypoints(self, name: MirrorName, line: list[CommitId]) -> None:
        """What the neighbours below a first commit will stand on, where its own pack went past it in one wide step."""
        for step in plan(self._known(name), line, ahead=True)[:-1]:
            async with self._locks[name.key].turn():
                known = self._known(name)
                if step.commit in known or step.base not in known:
                    continue
                with building(self.directory(name), self._trash) as place:
                    self._publish(name, await self._pack_short(name, step, place), place)

    async def _pack(
        self, name: MirrorName, step: Layer, place: Path, *, quick: bool = False
    ) -> Layer:
        """Write the pack of a planned layer; it needs the objects of its base from the mirror, not the pack."""
        quick = quick or not is_waypoint(step.depth)
        async with self._packing.turn():
            packed = await self._packer.pack_range(
                self._mirrors_path(name), step.commit, step.base, into=place, quick=quick
            )
        return replace(
            step,
            pack=packed.path.name,
            object_count=packed.object_count,
            size_bytes=packed.size_bytes,
        )

    async def _pack_short(self, name: MirrorName, step: Layer, place: Path) -> Layer:
        """The same for a layer of a few commits, over packs that are there; where it turns out large, git does it."""
        below = [
            self._pack_file(name, layer).index
            for layer in chain(self._known(name), step.base or step.commit)
        ]
        try:
            packed: Packed | None = await self._workers.run(
                pack_increment,
                self._mirrors_path(name),
                step.commit,
                below,
                place,
                timeout=_QUICK_TIMEOUT,
            )
        except CorruptObjectError as error:
            raise unservable(step.commit, error) from error
        except (DeadlineError, OutOfMemoryError):
            packed = None
        if packed is None:
            return await self._pack(name, step, place)
        return replace(
            step, pack=packed.name, object_count=packed.object_count, size_bytes=packed.size_bytes
        )

    def _publish(self, name: MirrorName, layer: Layer, place: Path) -> None:
        (place / "layer.json").write_text(json.dumps(asdict(layer)))
        publish(place, self.directory(name) / layer.commit)
        self._known(name)[layer.commit] = layer
        log.info(
            "closure.packed",
            mirror=str(name),
            commit=layer.commit,
            base=layer.base,
            objects=layer.object_count,
        )

    async def _line_to_base(self, name: MirrorName, commit: CommitId) -> list[CommitId]:
        """First parents from `commit` back to the first one that has a layer, or to where a root is to lie."""
        known = self._known(name)
        near: Sequence[CommitId] = (await self._commits.get(name, commit)).line
        found = self._to_known(name, near)
        if found is None and len(near) == NEAR:
            near = await self._near(name, commit)
            found = self._to_known(name, near)
        if found:
            return found
        recorded = frozenset(await self._recorded(name))
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

    async def _near(self, name: MirrorName, commit: CommitId) -> list[CommitId]:
        """As many first parents as a root may lie away; none where they cannot be read, and then git says why."""
        try:
            line: list[CommitId] = await self._workers.run(
                first_parents, self._mirrors_path(name), commit, _NEAR, timeout=_QUICK_TIMEOUT
            )
        except (CorruptObjectError, DeadlineError):
            return []
        return line

    async def _first_parents(
        self, name: MirrorName, commit: CommitId, limit: int | None
    ) -> list[CommitId]:
        bound = (f"--max-count={limit}",) if limit else ()
        path = self._mirrors_path(name)
        try:
            done = await self._git.run(
                *_WALK, *bound, commit, git_dir=path, timeout=TIMEOUT, doing=f"walk {commit}"
            )
        except (CorruptObjectError, GitFailedError) as error:
            there = await self._git.run(
                "cat-file", "-e", commit, git_dir=path, ok=range(256), doing=f"look for {commit}"
            )
            if there.status == 0:
                raise unservable(commit, error) from error
            raise CommitNotFoundError(
                f"cannot pack commit {commit}: {name} does not have it",
                hint="sync the mirror, or pin the commit so that it is fetched",
                commit=commit,
                mirror=str(name),
            ) from error
        return [CommitId(at) for at in done.lines]


# -- on disk ----------------------------------------------------------------------------------------------------------


def _load(directory: Path) -> Iterator[Layer]:
    """The layers on disk. Packs are not flushed, so a power cut can leave less than was written: such a one is not there."""
    for file in directory.glob("*/layer.json"):
        try:
            layer = Layer(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            log.warning("closure.dropped", file=str(file))
            continue
        if layer.commit == file.parent.name and has_both_ends(
            file.parent / layer.pack, layer.size_bytes
        ):
            yield layer
