"""Packs one closure: the objects of a commit that an already packed ancestor does not have.

git walks the closure once, without commit-graph, bitmap and multi-pack index, and another git packs
the list while it is written. The finished pack is compared with the whole list, so it has exactly
the closure whatever the mirror's caches say, and its content is proven. Writes only below the given
directory, which the caller removes on failure.
"""

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
from cachetools import LRUCache

from ..errors import CommitUnservableError, CorruptObjectError, GitFailedError
from ..git.command import Git, lines_of
from ..git.configuration import UNTRUSTING
from ..git.packs import PackIndex, loose_digest, pack_is_whole, pack_trailer, packs_in
from ..git.special import must_be_plain
from ..host.files import write_all
from ..host.trash import Trash
from ..model import CommitId
from ..presence import exists, is_dir
from ..telemetry import log
from ..workers.pool import Workers
from .store import GRAPH, building, link_or_copy

VERIFY_MAX_OBJECTS = 20_000  # of a larger pack the packs it is copied from are checked instead
HINT = "audit the mirror with --level content and heal it"
# of one walk or one pack; a first closure of the largest repositories takes minutes
TIMEOUT = timedelta(minutes=30)
# commits go to stdin: every user can read the arguments of a process
WALK = (*UNTRUSTING, "rev-list", "--objects", "--stdin")
# hashing more holds the GIL of the daemon for longer than starting a worker call takes
_SMALL_LIST_BYTES = 128 * 1024
_PIECE_BYTES = 1 << 18
_LINE_BYTES = 4000  # pack-objects splits one of more than 4,162


@dataclass(frozen=True, slots=True)
class PackFile:
    """A closure pack on disk, with its index beside it."""

    path: Path
    object_count: int
    size_bytes: int

    @property
    def index(self) -> Path:
        return self.path.with_suffix(".idx")


# Most objects are copied with their deltas. For the others pack-objects tries bases of similar
# paths, so it gets the paths: a window of two is then as good as ten without (git 2.39; 10,000
# objects of sympy: 6.1 MB in 0.5 s of processor, without paths 6.0 MB in 2.3 s).
#
# core.fsync: packs are a cache, and one torn by a power failure is found by its size.
# pack.writeReverseIndex: from git 2.41 on there would be a `.rev`, a file that no store records.
_PACK = (
    *UNTRUSTING, "-c", "pack.threads=2", "-c", "pack.window=2", "-c", "pack.compression=1",
    "-c", "core.fsync=none", "-c", "pack.writeReverseIndex=false",
)  # fmt: skip
# packs found whole, by inode, size and time; one forgotten is checked again
_KNOWN_MAX = 10_000


@dataclass(eq=False, repr=False)
class Packer:
    """Packs closures, and remembers which source packs are sound."""

    git: Git
    workers: Workers

    def __post_init__(self) -> None:
        # packs and indexes found sound, by stat
        self._whole: LRUCache[tuple[object, ...], None] = LRUCache(_KNOWN_MAX)
        self._whole_lock = threading.Lock()

    async def pack_range(
        self, mirror: Path, tip: CommitId, base: CommitId | None, into: Path
    ) -> PackFile:
        """Pack the closure of `tip` without that of `base` from the repository `mirror`.

        Also reads an `objects` directory in `into`. Raises CommitUnservableError where an object is
        missing or damaged.
        """
        extra = objects if exists(objects := into / "objects") else None
        stores = [mirror / "objects", *([extra] if extra else [])]
        sources = stores if base is None else []
        await anyio.to_thread.run_sync(partial(must_be_plain, mirror, loose=True))
        try:
            (pack, listed, is_doubtful), _ = await together(
                self._list_and_write(mirror, tip, base, into, extra),
                anyio.to_thread.run_sync(self._find_bad_pack, sources),
            )
            return await self._prove(mirror, pack, listed, [] if is_doubtful else stores)
        except (CorruptObjectError, GitFailedError) as error:
            raise unservable(tip, error) from error

    async def _list_and_write(
        self,
        mirror: Path,
        tip: CommitId,
        base: CommitId | None,
        into: Path,
        extra: Path | None,
    ) -> tuple[Path, bytes, bool]:
        """Return the pack, the digest of the ids that it must have, and whether git complained."""
        listing = into / "listing"
        listing.touch()
        walked = threading.Event()
        reading, writing = os.pipe2(os.O_CLOEXEC)

        async def walk() -> bytes:
            tips = [tip, f"^{base}"] if base else [tip]
            try:
                await self.git.run(
                    *WALK,
                    git_dir=mirror,
                    stdin=lines_of(tips),
                    stdout_path=listing,
                    timeout=TIMEOUT,
                    quarantine_objects=extra,
                    doing=f"walk {tip}",
                )  # fmt: skip
            finally:
                walked.set()
            if listing.stat().st_size < _SMALL_LIST_BYTES:
                return await anyio.to_thread.run_sync(digest_of_listing, listing)
            # in a worker: a thread would hold the GIL for half a second
            return await self.workers.run(digest_of_listing, listing, timeout=TIMEOUT)

        async def write(ids: io.FileIO) -> tuple[Path, bool]:
            with ids:
                done = await self.git.run(
                    *_PACK,
                    "pack-objects", "-q", "--delta-base-offset", str(into / "pack"),
                    git_dir=mirror,
                    stdin=ids,
                    timeout=TIMEOUT,
                    quarantine_objects=extra,
                    doing=f"pack {tip}",
                )  # fmt: skip
            if done.stderr:  # a damaged object of which git used another copy, where it has one
                fact = done.stderr.strip().splitlines()[0]
                log.warning("closure.doubtful", commit=tip, detail=fact)
            return into / f"pack-{done.stdout.decode().strip()}.pack", bool(done.stderr)

        with io.FileIO(reading) as ids, io.FileIO(writing, "wb") as sink:
            (pack, is_doubtful), listed, _ = await together(
                write(ids), walk(), anyio.to_thread.run_sync(_feed, listing, sink, walked)
            )
        listing.unlink()
        return pack, listed, is_doubtful

    async def _prove(
        self, mirror: Path, pack: Path, listed: bytes, stores: Sequence[Path]
    ) -> PackFile:
        """Prove that a pack has exactly the listed objects, each with the content of its id.

        git checks the CRC of packed objects that it copies, but hashes none that it reads, such as
        loose ones. So the checksums of the source packs and their indexes are checked: their
        objects were hashed when they arrived. Where a source is damaged, or where that check was
        not done yet and the pack is small, `git verify-pack` hashes the objects instead: what an
        audit finds intact is served, whatever else is damaged. Where the check was done, a small
        pack is read back, because the disk may not have what git wrote. Without `stores`, nothing
        is believed.
        """
        index = await anyio.to_thread.run_sync(PackIndex, pack.with_suffix(".idx"))
        if hashlib.sha1(index.ids, usedforsecurity=False).digest() != listed:
            raise CorruptObjectError(
                f"cannot seal {pack.name}: its objects are not exactly those of the closure",
                hint=HINT,
            )
        if not stores or not await self._come_from_whole(index, stores):
            await self.git.run(
                "verify-pack", str(index.path),
                git_dir=mirror,
                timeout=TIMEOUT,
                doing=f"verify {pack.name}",
            )  # fmt: skip
        elif index.count <= VERIFY_MAX_OBJECTS:
            await anyio.to_thread.run_sync(check_written, index)
        return PackFile(pack, index.count, pack.stat().st_size + index.path.stat().st_size)

    async def _come_from_whole(self, index: PackIndex, stores: Sequence[Path]) -> bool:
        """Return whether every file that the objects may come from is undamaged."""
        if await anyio.to_thread.run_sync(_find_bad_loose, stores, index):
            return False
        if index.count <= VERIFY_MAX_OBJECTS:  # hashing them takes less than a check
            return await anyio.to_thread.run_sync(self._are_whole, stores)
        return await anyio.to_thread.run_sync(self._find_bad_pack, stores) is None

    def _find_bad_pack(self, stores: Iterable[Path]) -> Path | None:
        """Find a pack or index whose checksum differs. For threads."""
        with self._whole_lock:
            for file in _packs_in(stores):
                with suppress(FileNotFoundError):  # removed by a repack
                    key = _stamp(file)
                    if key in self._whole:
                        continue
                    if not pack_is_whole(file):
                        log.warning("pack.damaged", pack=file.name, mirror=file.parts[-4])
                        return file
                    self._whole[key] = None
        return None

    def _are_whole(self, stores: Iterable[Path]) -> bool:
        """Return whether all packs as they are now were found whole; waits for a running check."""
        with self._whole_lock, suppress(FileNotFoundError):
            return all(_stamp(file) in self._whole for file in _packs_in(stores))
        return False


async def write_graph(git: Git, trash: Trash, graph: Path, chain: Sequence[PackFile]) -> None:
    """Write the commit-graph of a chain of packs beside the last one.

    git runs in a repository with only these packs, so the graph can name no other commit.
    """
    tip = graph.parent.name
    with building(graph.parent.parent, trash) as scratch:
        for directory in ("objects/pack", "objects/info", "refs"):
            (scratch / directory).mkdir(parents=True)
        # no repository without a HEAD; its branch need not exist
        (scratch / "HEAD").write_text("ref: refs/heads/none\n")
        for pack in chain:
            for source in (pack.path, pack.index):
                link_or_copy(source, scratch / "objects/pack" / source.name)
        await git.run(
            "-c", "core.fsync=none", "commit-graph", "write", "--stdin-commits", "--no-progress",
            git_dir=scratch,
            stdin=f"{tip}\n".encode(),
            timeout=TIMEOUT,
            doing=f"write the commit-graph of {tip}",
        )  # fmt: skip
        (scratch / GRAPH).rename(graph)
    log.info("graph.written", commit=tip, size_bytes=graph.stat().st_size)


async def together(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """Await all and return their results; a failure is raised once all have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.gather(*tasks, return_exceptions=True)  # gather cancelled them
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


def digest_of_listing(listing: Path) -> bytes:
    """Return the SHA-1 of all listed ids, sorted and joined."""
    return hashlib.sha1(b"".join(sorted(listed_ids(listing))), usedforsecurity=False).digest()


def listed_ids(listing: Path) -> list[bytes]:
    """Return the ids that `rev-list --objects` wrote: the first word of each line."""
    lines = listing.read_bytes().split(b"\n")
    return [bytes.fromhex(line[:40].decode()) for line in lines if line]


def check_written(index: PackIndex) -> None:
    """Raise CorruptObjectError unless the checksums of a new pack and its index match."""
    pack = index.path.with_suffix(".pack")
    are_whole = pack_is_whole(index.path) and pack_is_whole(pack)
    if not (are_whole and pack_trailer(pack) == index.pack_checksum):
        raise CorruptObjectError(
            f"cannot use {pack.name}: checksum mismatch", hint="check the disk"
        )


# git's listing is a file that grows; pack-objects gets it while the walk goes on
_POLL_S = 0.005


def _feed(listing: Path, sink: io.FileIO, walked: threading.Event) -> None:
    """Copy the list of a running walk to the packer until the walk ends.

    rev-list flushes each commit into a pipe, but buffers what goes to a file.
    """
    with sink, listing.open("rb", 0) as source, suppress(BrokenPipeError):  # the packer failed
        ended, rest = False, b""
        while not ended:
            ended = walked.wait(_POLL_S)
            while piece := source.read(_PIECE_BYTES):
                *lines, rest = (line[:_LINE_BYTES] for line in (rest + piece).split(b"\n"))
                write_all(sink.fileno(), b"".join(line + b"\n" for line in lines))


def _find_bad_loose(stores: Iterable[Path], packed: PackIndex) -> Path | None:
    """Find the damaged loose file of a packed object."""
    for directory in (entry for store in stores for entry in store.iterdir()):
        # `info` and `pack` are beside the directories of loose objects
        if len(directory.name) != 2 or not is_dir(directory):
            continue
        for file in directory.iterdir():
            oid = directory.name + file.name
            if len(oid) == 40 and bytes.fromhex(oid) in packed and loose_digest(file) != oid:
                return file
    return None


def _packs_in(stores: Iterable[Path]) -> Iterator[Path]:
    for store in stores:
        yield from packs_in(store / "pack")


def _stamp(file: Path) -> tuple[object, ...]:
    st = file.stat()
    return str(file), st.st_size, st.st_ino, st.st_mtime_ns, st.st_ctime_ns
