"""Where incoming objects wait: a directory for each fetch, moved into the mirror as a whole or removed as a whole.

Owns `quarantine/` of the state directory. A killed git leaves its `tmp_pack_*` here and not in a mirror. Nothing here is needed
after a restart, so a start removes everything that no process holds open, but for `damaged/`: what heals took out of mirrors
stays until a person removes it; and for the spools of imports, which the datasets still have to undo. What the disk does not let
go is tried again while the daemon runs.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import structlog

from ..errors import DiskFullError
from ..host.files import free_bytes, full_disk_named, sync_directory
from ..host.trash import Trash, new_trash, try_to_remove
from ..protocol import Progress

log = structlog.get_logger()

DAMAGED = "damaged"
SPOOL_PREFIX = "dataset-"
_LAST = {".idx": 1}  # git finds a pack by its index, so that is moved when the rest is there


class Quarantine:
    """Directories that are gone when their block ends."""

    def __init__(self, root: Path, trash: Trash) -> None:
        self.root = root
        self._active: set[Path] = set()
        self._left: set[Path] | None = None
        self._trash = trash

    @asynccontextmanager
    async def directory(self, kind: str) -> AsyncIterator[Path]:
        """A new private directory, removed at the end unless it was renamed away."""
        path = self.root / f"{kind}-{secrets.token_hex(8)}"
        with full_disk_named("quarantine"):
            path.mkdir(mode=0o700)
        self._active.add(path)
        try:
            yield path
        finally:
            self._active.discard(path)
            with anyio.CancelScope(shield=True):
                await self.remove(path)

    @contextmanager
    def holding(self, path: Path) -> Iterator[None]:
        """Keep a file of somebody else's in here from being cleaned away meanwhile."""
        self._active.add(path)
        try:
            yield
        finally:
            self._active.discard(path)

    async def discard(self, path: Path) -> None:
        """Remove a tree from its place at once and its files later: a crash in between leaves them here."""
        away = new_trash(self.root)
        path.rename(away)
        await self.remove(away)

    async def remove(self, path: Path) -> None:
        """Remove something in here; the trash tries again where the disk refuses."""
        await anyio.to_thread.run_sync(self._trash.remove, path)

    async def clean(self) -> bool:
        """Remove what killed processes left, unless one of them is still at it: then a later call
        does. Answers whether nothing is left for one.

        Only a start tells leftovers from the files of others, as of an import that is running.
        """
        if self._left is None:
            there = await anyio.to_thread.run_sync(lambda: list(self.root.iterdir()))
            self._left = {
                path
                for path in there
                if path.name != DAMAGED and not path.name.startswith(SPOOL_PREFIX)
            }
        found = self._left - self._active
        if found:
            self._left -= found - await anyio.to_thread.run_sync(_clean, self.root, found)
        return not self._left


def accept_objects(source: Path, destination: Path) -> None:
    """Move all objects of one object directory into another on the same file system, durably. What is there already stays."""
    packs = source / "pack"
    if packs.is_dir():
        (destination / "pack").mkdir(exist_ok=True)
        for file in sorted(packs.iterdir(), key=lambda f: (_LAST.get(f.suffix, 0), f.name)):
            if file.name.startswith("pack-") and file.suffix != ".keep":
                _move(file, destination / "pack" / file.name)
        sync_directory(destination / "pack")
    for fan in source.glob("[0-9a-f][0-9a-f]"):
        (destination / fan.name).mkdir(exist_ok=True)
        for file in fan.iterdir():
            if len(file.name) == 38:
                _move(file, destination / fan.name / file.name)
        sync_directory(destination / fan.name)


def _move(file: Path, target: Path) -> None:
    if not target.exists():
        file.rename(target)


def _clean(root: Path, left: Collection[Path]) -> set[Path]:
    """Remove what nobody holds; answers what is still there."""
    held = held_files(root)
    kept = set()
    for path in left:
        if any(path == file or path in file.parents for file in held):
            kept.add(path)
            log.warning("quarantine.held", path=path.name)
        elif try_to_remove(path):
            log.info("quarantine.cleaned", path=path.name)
        else:
            kept.add(path)
            log.warning("quarantine.stuck", path=path.name)
    return kept


def held_files(root: Path) -> set[Path]:
    """Files below `root` that some process of ours holds open, or has as its working directory."""
    held = set()
    prefix = f"{root}{os.sep}"
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            held |= {Path(target) for target in _targets(process) if target.startswith(prefix)}
    return held


def _targets(process: Path) -> list[str]:
    found: list[str] = []
    try:
        links = [process / "cwd", *(process / "fd").iterdir()]
    except OSError:  # it ended, or is another user's
        return found
    for link in links:
        try:
            found.append(os.readlink(link))
        except OSError:
            continue
    return found


STREAM_BIG_FILES = ("-c", "core.bigFileThreshold=64m", "-c", "pack.windowMemory=256m")
_RESERVE = 1024**3
_RESERVE_SHARE = 100


def reserve_bytes(path: Path) -> int:
    """What no transfer may use of the disk: a hundredth of it, a GiB at most. Checkouts and the catalog live there too."""
    disk = os.statvfs(path)
    return min(_RESERVE, disk.f_blocks * disk.f_frsize // _RESERVE_SHARE)


def within_disk(
    path: Path, sink: Callable[[Progress], None] | None, doing: str
) -> Callable[[Progress], None]:
    """A sink that passes progress on, and raises DiskFullError when a transfer into `path` comes to the reserve."""

    def watch(progress: Progress) -> None:
        if free_bytes(path) < reserve_bytes(path):
            raise DiskFullError(
                f"cannot {doing}: the disk is nearly full",
                hint="free space below the state directory; nothing was changed",
            )
        if sink is not None:
            sink(progress)

    return watch
