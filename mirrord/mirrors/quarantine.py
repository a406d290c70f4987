"""Quarantine: incoming objects wait here, a directory for each fetch, until they are verified.

Nothing here is needed after a restart. A start removes what no process holds open, except
`damaged/`, files that heals took out of mirrors, which a person removes; and the spools of imports,
which the datasets still have to undo. Also the limits of gits that take objects in.
"""

import os
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio
from anyio import to_thread

from ..errors import DiskFailedError, full_disk_named
from ..host.files import sync_directory
from ..host.room import UNBOUNDED, Room
from ..host.trash import Trash, new_trash, try_to_remove
from ..presence import exists, is_dir, matching
from ..protocol import Progress, ProgressSink
from ..telemetry import log

DAMAGED = "damaged"
SPOOL_PREFIX = "dataset-"


class Quarantine:
    """Temporary directories, and what killed processes left of them."""

    def __init__(self, root: Path, trash: Trash, room: Room = UNBOUNDED) -> None:
        self.root = root
        self.room = room
        self._active: set[Path] = set()
        self._left: set[Path] | None = None
        self._trash = trash

    @asynccontextmanager
    async def directory(self, kind: str) -> AsyncIterator[Path]:
        """Make a private directory; remove it at the end unless it was renamed away."""
        path = self.root / f"{kind}-{secrets.token_hex(8)}"
        with full_disk_named("quarantine"):
            try:
                path.mkdir(mode=0o700)
            except FileNotFoundError as error:
                fact = f"cannot write {self.root}: the directory is gone"
                hint = "mount or move the state directory back, or start the daemon again"
                raise DiskFailedError(fact, hint=hint) from error
        with self.holding(path):
            try:
                yield path
            finally:
                with anyio.CancelScope(shield=True):
                    await self.remove(path)

    @contextmanager
    def holding(self, path: Path) -> Iterator[None]:
        """Protect a file or directory in here from `clean`."""
        self._active.add(path)
        try:
            yield
        finally:
            self._active.discard(path)

    async def discard(self, path: Path) -> None:
        """Discard a tree from anywhere on this disk; its files are removed later."""
        trash = new_trash(self.root)
        path.rename(trash)
        await self.remove(trash)

    async def remove(self, path: Path) -> None:
        """Remove something in here; the trash tries again where that fails."""
        await to_thread.run_sync(self._trash.remove, path)

    @property
    def leftovers(self) -> set[Path]:
        """Return what killed processes left and the start could not remove."""
        return (self._left or set()) - self._active

    async def clean(self) -> bool:
        """Remove what killed processes left, unless another holds it; return whether all is gone.

        The first call lists the leftovers: later ones could not tell them from files in use.
        """
        if self._left is None:
            entries = await to_thread.run_sync(lambda: list(self.root.iterdir()))
            self._left = {
                path
                for path in entries
                if path.name != DAMAGED and not path.name.startswith(SPOOL_PREFIX)
            }

        def remove(path: Path) -> bool:
            if any(path == file or path in file.parents for file in held):
                log.warning("quarantine.held", path=path.name)
                return False
            removed = try_to_remove(path)
            if removed:
                log.info("quarantine.cleaned", path=path.name)
            else:
                log.warning("removal.failed", path=path.name)
            return removed

        if unused := self.leftovers:
            held = await to_thread.run_sync(held_files, self.root)
            self._left -= set(await to_thread.run_sync(lambda: list(filter(remove, unused))))
        return not self._left


def held_files(root: Path) -> set[Path]:
    """Return the paths below `root` that some process holds open, or works in."""
    held = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):  # it ended, or is another user's
            for link in (process / "cwd", *(process / "fd").iterdir()):
                with suppress(OSError):
                    held.add(os.readlink(link))
    return {Path(target) for target in held if target.startswith(f"{root}{os.sep}")}


def accept_objects(source: Path, destination: Path) -> None:
    """Move all objects of one object directory into another on the same file system, durably.

    Existing objects stay as they are.
    """

    def accept(files: Iterable[Path], directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        for file in files:
            target = directory / file.name
            if not exists(target):
                file.rename(target)
        sync_directory(directory)

    if is_dir(source / "pack"):
        packs = matching(source / "pack", "pack-*")
        # git finds a pack by its index, so the index is moved last
        ordered = sorted(packs, key=lambda file: (file.suffix == ".idx", file.name))
        # a fetch's index-pack leaves a .keep, and no repack would ever touch that pack
        accept((file for file in ordered if file.suffix != ".keep"), destination / "pack")
    for fan in matching(source, "[0-9a-f][0-9a-f]"):
        # objects alone: a killed git leaves tmp_obj_* beside them
        accept((file for file in fan.iterdir() if len(file.name) == 38), destination / fan.name)


# A pack can unpack to a thousand times its size, and git (2.39) does not bound that in a fetch.
# Each git that takes objects in gets a limit of memory, and streams big files.
STREAM_BIG_FILES = ("-c", "core.bigFileThreshold=64m", "-c", "pack.windowMemory=256m")


def within_room(room: Room, sink: ProgressSink | None, doing: str) -> ProgressSink:
    """Return a sink that passes progress on, and raises DiskFullError at the disk's reserve."""

    def watch(progress: Progress) -> None:
        room.must_suffice(doing)
        if sink is not None:
            sink(progress)

    return watch
