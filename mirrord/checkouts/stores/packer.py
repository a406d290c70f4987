"""One closure pack: the objects of a commit that an already packed ancestor does not have, and no other object.

git walks the closure once, ignoring commit-graphs, bitmaps and multi-pack indexes, and another git packs what that walk lists
while it lists it. The finished pack is held against the list, so no object outside a closure can get in, whatever the mirror's
caches say, and none is left out; and its content is proven before anybody gets it (`sources.py`). Writes only below the directory
it is given; the caller removes that when it fails.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio.to_thread

from ...errors import CommitUnservableError, CorruptObjectError, GitFailedError
from ...git.command import Git
from ...git.environment import UNTRUSTING
from ...git.packfile import PackIndex
from ...git.workers import Workers
from ...host.files import write_all
from ...model import CommitId
from .sources import (
    HINT,
    VERIFIED_WHOLE,
    Sources,
    Survey,
    check_loose,
    check_written,
    digest_of,
    survey,
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
        return await self._workers.call(survey, listing, timeout=TIMEOUT)

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
