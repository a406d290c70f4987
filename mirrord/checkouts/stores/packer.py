"""One closure pack: the objects of a commit that an already packed ancestor does not have, and no other object.

git walks the closure once, ignoring commit-graphs, bitmaps and multi-pack indexes, and another git packs what that walk lists
while it lists it. The finished pack is held against the list, so no object outside a closure can get in, whatever the mirror's
caches say, and none is left out; and its content is proven before anybody gets it (`sources.py`). Writes only below the directory
it is given; the caller removes that when it fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import structlog

from ...errors import CommitUnservableError, CorruptObjectError, GitFailedError
from ...git.command import Git
from ...git.environment import UNTRUSTING
from ...git.packs import PackIndex, graph_is_whole, loose_digest, pack_is_whole, pack_trailer
from ...git.workers import Workers
from ...host.files import write_all
from ...host.trash import Trash
from ...model import CommitId
from ..deferred import Deferred
from .store import building, link_or_copy

VERIFIED_WHOLE = 20_000
HINT = "audit the mirror with --level content and heal it"
_BLOCK = 1 << 20
_KEPT_MAX = 10_000

_Seen = tuple[str, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Survey:
    """`digest` is the SHA-1 of all ids, sorted and joined."""

    object_count: int
    digest: bytes


def survey(listing: Path) -> Survey:
    """What the ids that are the lines of `listing` make."""
    ids = listing.read_text("ascii").split()
    return Survey(len(ids), digest_of(bytes.fromhex("".join(sorted(ids)))))


def digest_of(ids: bytes) -> bytes:
    return hashlib.sha1(ids, usedforsecurity=False).digest()


class Sources:
    """The packs and indexes that were read whole, by what would change with them. Methods are for threads."""

    def __init__(self) -> None:
        self._whole: dict[_Seen, None] = {}
        self._lock = threading.Lock()

    def check_packs(self, store: Path) -> None:
        """Raises CorruptObjectError for a pack in `store`, or an index, whose bytes do not have its checksum."""
        with self._lock:
            for file in _files(store):
                with suppress(FileNotFoundError):  # repacked meanwhile
                    self._check(file)

    def are_whole(self, stores: Iterable[Path]) -> bool:
        """Whether all packs in `stores` were read and found whole, as they are now; waits for a check that goes on."""
        with self._lock:
            try:
                return all(_seen(file) in self._whole for store in stores for file in _files(store))
            except FileNotFoundError:
                return False

    def _check(self, file: Path) -> None:
        key = _seen(file)
        if key in self._whole:
            return
        if not pack_is_whole(file):
            raise CorruptObjectError(
                f"cannot pack out of {file.name}: its bytes are not what they were", hint=HINT
            )
        while len(self._whole) >= _KEPT_MAX:
            self._whole.pop(next(iter(self._whole)), None)
        self._whole[key] = None


def _files(store: Path) -> Iterator[Path]:
    for kind in ("pack", "idx"):
        yield from (store / "pack").glob(f"pack-*.{kind}")


def _seen(file: Path) -> _Seen:
    found = file.stat()
    return str(file), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def check_written(index: PackIndex) -> None:
    """Raises CorruptObjectError unless a pack and its index have on disk what git wrote."""
    pack = index.path.with_suffix(".pack")
    if not (
        pack_is_whole(index.path)
        and pack_is_whole(pack)
        and pack_trailer(pack) == index.pack_checksum
    ):
        raise CorruptObjectError(
            f"cannot use {pack.name}: its bytes are not what was written", hint="check the disk"
        )


def check_loose(store: Path, packed: PackIndex) -> None:
    """Raises CorruptObjectError when one of the packed objects has a damaged loose file in `store`."""
    for directory in store.iterdir():
        if len(directory.name) != 2 or not directory.is_dir():
            continue
        for file in directory.iterdir():
            oid = directory.name + file.name
            if len(oid) == 40 and bytes.fromhex(oid) in packed and loose_digest(file) != oid:
                raise CorruptObjectError(
                    f"cannot pack object {oid}: its loose file is damaged", hint=HINT, objects=[oid]
                )


TIMEOUT = timedelta(minutes=30)
_WALK = (*UNTRUSTING, "rev-list", "--objects", "--no-object-names")
_PACK = (
    *UNTRUSTING, "-c", "pack.threads=2", "-c", "core.fsync=none", "-c", "pack.writeReverseIndex=false",
)  # fmt: skip
_QUICK = ("-c", "pack.compression=1", "-c", "pack.window=0")
_SMALL_LIST_BYTES = 128 * 1024
_PIECE_BYTES = 1 << 18
_PACE_S = 0.005


@dataclass(frozen=True, slots=True)
class PackFile:
    """A closure pack on disk; its index lies beside it."""

    path: Path
    object_count: int
    size_bytes: int

    @property
    def index(self) -> Path:
        return self.path.with_suffix(".idx")


class Packer:
    """Packs closures out of repositories. `quick` packs are made sooner and take more room."""

    def __init__(self, git: Git, workers: Workers) -> None:
        self._git = git
        self._workers = workers
        self._sources = Sources()

    async def pack_range(
        self,
        objects: Path,
        tip: CommitId,
        base: CommitId | None,
        *,
        into: Path,
        extra: Path | None = None,
        quick: bool = False,
    ) -> PackFile:
        """Pack the closure of `tip` without the closure of `base` out of the repository `objects`.

        `extra` is an objects directory that is read too. Raises CommitUnservableError when an object is missing or damaged.
        """
        stores = (objects / "objects", *([extra] if extra else []))
        try:
            (packed, expected), _ = await together(
                self._list_and_write(objects, tip, base, into=into, extra=extra, quick=quick),
                self._check_packs(stores if base is None else ()),
            )
            return await self._prove(objects, packed, expected, stores)
        except (CorruptObjectError, GitFailedError) as error:
            raise unservable(tip, error) from error

    async def _list_and_write(
        self,
        objects: Path,
        tip: CommitId,
        base: CommitId | None,
        *,
        into: Path,
        extra: Path | None,
        quick: bool,
    ) -> tuple[Path, Survey]:
        listing = into / "listing"
        listing.touch()
        walked = threading.Event()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        with io.FileIO(reading) as ids, io.FileIO(writing, "wb") as packer:
            packed, expected, _ = await together(
                self._write(objects, tip, ids, into=into, extra=extra, quick=quick),
                self._list(
                    objects, (tip, f"^{base}") if base else (tip,), listing, walked, extra=extra
                ),
                anyio.to_thread.run_sync(_hand_on, listing, packer, walked),
            )
        listing.unlink()
        return packed, expected

    async def _list(
        self,
        objects: Path,
        tips: tuple[str, ...],
        listing: Path,
        walked: threading.Event,
        *,
        extra: Path | None,
    ) -> Survey:
        try:
            await self._git.run(
                *(*_WALK, *tips),
                git_dir=objects,
                stdout_path=listing,
                timeout=TIMEOUT,
                quarantine_objects=extra,
                doing=f"walk {tips[0]}",
            )
        finally:
            walked.set()
        return await self._survey(listing)

    async def _write(
        self,
        objects: Path,
        tip: CommitId,
        ids: io.FileIO,
        *,
        into: Path,
        extra: Path | None,
        quick: bool,
    ) -> Path:
        with ids:
            done = await self._git.run(
                *_PACK,
                *(_QUICK if quick else ()),
                *("pack-objects", "-q", "--delta-base-offset", str(into / "pack")),
                git_dir=objects,
                stdin=ids,
                timeout=TIMEOUT,
                quarantine_objects=extra,
                doing=f"pack {tip}",
            )
        if "bad packed object" in done.stderr or "corrupt" in done.stderr:
            raise CorruptObjectError(
                f"cannot pack {tip}: {done.stderr.strip().splitlines()[0]}", hint=HINT
            )
        return into / f"pack-{done.stdout.decode().strip()}.pack"

    async def _survey(self, listing: Path) -> Survey:
        """A short list is read on a thread; a long one would hold the interpreter for half a second."""
        if listing.stat().st_size < _SMALL_LIST_BYTES:
            return await anyio.to_thread.run_sync(survey, listing)
        return await self._workers.run(survey, listing, timeout=TIMEOUT)

    async def _check_packs(self, stores: tuple[Path, ...]) -> None:
        for store in stores:
            await anyio.to_thread.run_sync(self._sources.check_packs, store)

    async def _prove(
        self, objects: Path, pack: Path, expected: Survey, stores: tuple[Path, ...]
    ) -> PackFile:
        """Exactly the listed objects, each with the bytes of its name."""
        index = await anyio.to_thread.run_sync(PackIndex, pack.with_suffix(".idx"))
        if digest_of(index.ids) != expected.digest:
            raise CorruptObjectError(
                f"cannot seal {pack.name}: it does not hold exactly the objects of the closure",
                hint=HINT,
            )
        for store in stores:
            await anyio.to_thread.run_sync(check_loose, store, index)
        if index.count > VERIFIED_WHOLE:
            await self._check_packs(stores)
        elif await anyio.to_thread.run_sync(self._sources.are_whole, stores):
            await anyio.to_thread.run_sync(check_written, index)
        else:
            await self._git.run(
                "verify-pack",
                str(index.path),
                git_dir=objects,
                timeout=TIMEOUT,
                doing=f"verify {pack.name}",
            )
        return PackFile(pack, index.count, pack.stat().st_size + index.path.stat().st_size)


def _hand_on(listing: Path, packer: io.FileIO, walked: threading.Event) -> None:
    """Give the packer what a walk has written so far, until it has ended. Into a pipe git would write commit by commit."""
    with (
        packer,
        listing.open("rb", 0) as source,
        suppress(BrokenPipeError),
    ):  # it ended early, and says why itself
        ended = False
        while not ended:
            ended = walked.wait(_PACE_S)
            while piece := source.read(_PIECE_BYTES):
                write_all(packer.fileno(), piece)


async def together(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all. When one fails the others end first, so that nothing is built behind the error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.gather(
            *tasks, return_exceptions=True
        )  # cancelled with the one that waited for them
        raise
    for failure in results:
        if isinstance(failure, BaseException):
            raise failure
    return results


def unservable(
    commit: CommitId, error: CorruptObjectError | GitFailedError
) -> CommitUnservableError:
    return CommitUnservableError(
        f"cannot pack commit {commit}: an object of its closure is missing or damaged",
        hint=HINT,
        commit=commit,
        fact=error.message,
        objects=error.facts.get("objects", []),
    )


LARGE = 20_000  # objects; below that git is as fast without

log = structlog.get_logger()


class Graphs:
    """Finds graphs, and has missing ones written afterwards."""

    def __init__(self, git: Git, trash: Trash, afterwards: Deferred) -> None:
        self._git = git
        self._trash = trash
        self._afterwards = afterwards

    def find(self, packs: Sequence[PackFile]) -> Path | None:
        """The graph for a chain of packs, root first; one that is not there is asked for."""
        large = [number for number, pack in enumerate(packs, 1) if pack.object_count >= LARGE]
        if not large:
            return None
        chain = packs[: large[-1]]
        graph = chain[-1].path.with_name("commit-graph")
        if graph_is_whole(graph):
            return graph
        self._afterwards.begin(("commit-graph", graph), partial(self._write, graph, chain))
        return None

    async def _write(self, graph: Path, chain: Sequence[PackFile]) -> None:
        tip = graph.parent.name
        with building(graph.parent.parent, self._trash) as scratch:
            _lay_out(scratch, chain)
            await self._git.run(
                *(
                    "-c",
                    "core.fsync=none",
                    "commit-graph",
                    "write",
                    "--stdin-commits",
                    "--no-progress",
                ),
                git_dir=scratch,
                stdin=f"{tip}\n".encode(),
                timeout=TIMEOUT,
                doing=f"write the commit-graph of {tip}",
            )
            (scratch / "objects/info/commit-graph").rename(graph)
        log.info("graph.written", commit=tip, size_bytes=graph.stat().st_size)


def _lay_out(repository: Path, chain: Sequence[PackFile]) -> None:
    for directory in ("objects/pack", "objects/info", "refs"):
        (repository / directory).mkdir(parents=True)
    (repository / "HEAD").write_text("ref: refs/heads/none\n")
    for pack in chain:
        for source in (pack.path, pack.index):
            link_or_copy(source, repository / "objects/pack" / source.name)
