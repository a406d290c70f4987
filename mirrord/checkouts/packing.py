"""One closure pack: the objects of a commit that an already packed ancestor does not have, and no other object.

The list comes from a walk that ignores commit-graphs and bitmaps; the finished pack is held against that list, so no object
outside a closure can get in, whatever the mirror's caches say, and its content is proven before anybody gets it (`survey.py`).
Writes only below the directory it is given; the caller removes that when it fails.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import anyio.to_thread

from ..errors import CommitUnservableError, CorruptObjectError, GitFailedError
from ..git.command import Git
from ..git.packs import PackIndex
from ..git.workers import Workers
from ..model import CommitId
from .survey import HINT, VERIFIED_WHOLE, Survey, digest_of, survey

TIMEOUT = timedelta(minutes=30)
_WALK = ("-c", "core.commitGraph=false", "rev-list", "--objects")
_PACK = ("-c", "pack.threads=2", "-c", "core.fsync=none", "-c", "pack.writeReverseIndex=false")
_SMALL_LIST_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class PackFile:
    """A closure pack on disk; its index lies beside it."""

    path: Path
    object_count: int
    size_bytes: int

    @property
    def index(self) -> Path:
        return self.path.with_suffix(".idx")


async def pack_range(
    git: Git, workers: Workers, objects: Path, tip: CommitId, base: CommitId | None, *, into: Path, extra: Path | None = None
) -> PackFile:
    """Pack the closure of `tip` without the closure of `base` out of the repository `objects`.

    `extra` is an objects directory that is read too. Raises CommitUnservableError when an object is missing or damaged.
    """
    listing = into / "listing"
    revisions = (tip, f"^{base}") if base else (tip,)
    try:
        await git.run(
            *_WALK,
            *revisions,
            git_dir=objects,
            stdout_path=listing,
            timeout=TIMEOUT,
            quarantine_objects=extra,
            doing=f"walk {tip}",
        )
        return await pack_list(git, workers, objects, listing, into=into, extra=extra)
    except (CorruptObjectError, GitFailedError) as error:
        raise unservable(tip, error) from error
    finally:
        listing.unlink(missing_ok=True)


async def pack_list(
    git: Git, workers: Workers, objects: Path, listing: Path, *, into: Path, extra: Path | None = None
) -> PackFile:
    """Pack exactly the objects named by the lines of `listing` (ids, with paths as hints for deltas)."""
    stores = (objects / "objects", *([extra] if extra else []))
    surveying = asyncio.create_task(_survey(workers, listing, stores))
    try:
        pack = await _write_pack(git, objects, listing, into=into, extra=extra)
    except BaseException:
        surveying.cancel()
        await asyncio.wait([surveying])
        raise
    expected = await surveying
    if await anyio.to_thread.run_sync(_ids_digest, pack) != expected.digest:
        raise CorruptObjectError(f"cannot seal {pack.name}: it does not hold exactly the objects of the closure", hint=HINT)
    index = pack.with_suffix(".idx")
    if expected.object_count <= VERIFIED_WHOLE:
        await git.run("verify-pack", str(index), git_dir=objects, timeout=TIMEOUT, doing=f"verify {pack.name}")
    return PackFile(pack, expected.object_count, pack.stat().st_size + index.stat().st_size)


async def _write_pack(git: Git, objects: Path, listing: Path, *, into: Path, extra: Path | None) -> Path:
    done = await git.run(
        *_PACK,
        "pack-objects",
        "-q",
        str(into / "pack"),
        git_dir=objects,
        stdin=listing,
        timeout=TIMEOUT,
        quarantine_objects=extra,
        doing="pack objects",
    )
    if "bad packed object" in done.stderr or "corrupt" in done.stderr:
        raise CorruptObjectError(f"cannot pack {listing.name}: {done.stderr.strip().splitlines()[0]}", hint=HINT)
    return into / f"pack-{done.stdout.decode().strip()}.pack"


async def _survey(workers: Workers, listing: Path, stores: tuple[Path, ...]) -> Survey:
    """A short list is read on a thread; a long one would hold the interpreter for half a second."""
    if listing.stat().st_size < _SMALL_LIST_BYTES:
        return await anyio.to_thread.run_sync(survey, listing, stores)
    return await workers.call(survey, listing, stores, timeout=TIMEOUT)


def _ids_digest(pack: Path) -> bytes:
    return digest_of(PackIndex(pack.with_suffix(".idx")).ids)


def unservable(commit: CommitId, error: CorruptObjectError | GitFailedError) -> CommitUnservableError:
    return CommitUnservableError(
        f"cannot pack commit {commit}: an object of its closure is missing or damaged",
        hint=HINT,
        commit=commit,
        fact=error.message,
        objects=error.facts.get("objects", []),
    )
