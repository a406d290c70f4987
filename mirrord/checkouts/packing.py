"""One closure pack: the objects of a commit that an already packed ancestor does not have, and no other object.

The list comes from a walk that ignores commit-graphs and bitmaps; the finished pack is held against that list, id by id, so no
object outside a closure can get in, whatever the mirror's caches say. git copies packed objects after checking their CRC, but
trusts loose ones and says so only on stderr when a CRC is wrong: both are checked here. Writes only below the directory it is
given; the caller removes that when it fails.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import anyio.to_thread

from ..errors import CommitUnservableError, CorruptObjectError, GitFailedError
from ..git.command import Git
from ..git.packs import PackIndex
from ..git.workers import Workers
from ..model import CommitId

TIMEOUT = timedelta(minutes=30)
_WALK = ("-c", "core.commitGraph=false", "rev-list", "--objects")
_PACK = ("-c", "pack.threads=2", "-c", "core.fsync=none", "-c", "pack.writeReverseIndex=false")
_SMALL_LIST_BYTES = 4 * 1024**2
_VERIFIED_WHOLE = 20_000
_HINT = "audit the mirror with --level content and heal it"


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
        raise CorruptObjectError(f"cannot pack {listing.name}: {done.stderr.strip().splitlines()[0]}", hint=_HINT)
    pack = into / f"pack-{done.stdout.decode().strip()}.pack"
    count = await _in_background(workers, listing, pack.with_suffix(".idx"), (objects / "objects", *([extra] if extra else [])))
    if count <= _VERIFIED_WHOLE:
        await git.run("verify-pack", str(pack.with_suffix(".idx")), git_dir=objects, timeout=TIMEOUT)
    return PackFile(pack, count, pack.stat().st_size + pack.with_suffix(".idx").stat().st_size)


async def _in_background(workers: Workers, listing: Path, index: Path, stores: tuple[Path, ...]) -> int:
    """A short list is compared on a thread; a long one would hold the interpreter for half a second."""
    if listing.stat().st_size < _SMALL_LIST_BYTES:
        return await anyio.to_thread.run_sync(check_packed, listing, index, stores)
    return await workers.call(check_packed, listing, index, stores, timeout=TIMEOUT)


def check_packed(listing: Path, index: Path, stores: tuple[Path, ...]) -> int:
    """Hold the index against the list and hash the loose objects among them; answers their number."""
    with listing.open("rb") as file:
        wanted = {bytes.fromhex(line[:40].decode()) for line in file}
    packed = PackIndex(index).ids
    if b"".join(sorted(wanted)) != packed:
        raise CorruptObjectError(
            f"cannot seal pack {index.stem}: it does not hold exactly the objects of the closure", hint=_HINT
        )
    for store in stores:
        check_loose(store, wanted)
    return len(wanted)


def check_loose(store: Path, wanted: set[bytes]) -> None:
    """Hash every loose object of `store` that is wanted; raises CorruptObjectError for one whose bytes are not its name's."""
    for directory in store.iterdir():
        if len(directory.name) != 2 or not directory.is_dir():
            continue
        for file in directory.iterdir():
            oid = directory.name + file.name
            if len(oid) == 40 and bytes.fromhex(oid) in wanted and loose_digest(file) != oid:
                raise CorruptObjectError(f"cannot pack object {oid}: its loose file is damaged", hint=_HINT, objects=[oid])


def loose_digest(file: Path) -> str | None:
    """The id that the bytes of a loose object hash to; None when they do not inflate."""
    digest, inflate = hashlib.sha1(usedforsecurity=False), zlib.decompressobj()
    try:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(inflate.decompress(block))
    except zlib.error:
        return None
    return digest.hexdigest() if inflate.eof else None


def unservable(commit: CommitId, error: CorruptObjectError | GitFailedError) -> CommitUnservableError:
    return CommitUnservableError(
        f"cannot pack commit {commit}: an object of its closure is missing or damaged",
        hint=_HINT,
        commit=commit,
        fact=error.message,
        objects=error.facts.get("objects", []),
    )
