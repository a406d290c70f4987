"""The reserve on the disk: new work leaves it free, so that running work and checkouts can finish.

Work that will write much asks first, and is refused while less than the reserve is free, after
caches were evicted. Resets, releases, diffs and warm checkouts never ask.
"""

import errno
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from ..errors import DiskFailedError, DiskFullError, MirrordError
from ..telemetry import log
from ..units import Backoff

# left free, as bytes are (`reserve_bytes`)
_INODES = 10_000
_SHARE = 10  # reserve at most a tenth of a small file system


class Space(NamedTuple):
    """The free space for an unprivileged process, the reserve, and the size of the file system."""

    free_bytes: int
    reserve_bytes: int
    free_inodes: int
    reserve_inodes: int
    size_bytes: int

    @property
    def is_low(self) -> bool:
        """True if caches should be evicted, which is before new work is refused."""
        return self.free_bytes < self.reserve_bytes * 3 // 2 or self.shortage is not None

    @property
    def shortage(self) -> str | None:
        """The reason to refuse new work, or None."""
        if self.free_bytes < self.reserve_bytes:
            return f"{self.free_bytes >> 20} MiB are free, {self.reserve_bytes >> 20} are reserved"
        if self.free_inodes < self.reserve_inodes:
            return f"{self.free_inodes} inodes are free, {self.reserve_inodes} are reserved"
        return None


def _gone(place: Path, fact: str) -> DiskFailedError:
    return DiskFailedError(
        f"cannot read the state directory {place}: {fact}",
        hint="mount or move it back, or stop the daemon and set state_dir",
    )


def measure(place: Path, reserve_bytes: int) -> Space:
    """Measure the file system of `place`. Without a reserve of bytes, no inodes are reserved.

    Raises DiskFailedError where it is gone.
    """
    try:
        disk = os.statvfs(place)
    except OSError as error:
        raise _gone(place, str(error.strerror)) from error
    size = disk.f_blocks * disk.f_frsize
    reserve = min(reserve_bytes, size // _SHARE)
    # btrfs has no limit of inodes, and 0 in f_files
    inodes = min(_INODES, disk.f_files // _SHARE) if reserve_bytes else 0
    return Space(disk.f_bavail * disk.f_frsize, reserve, disk.f_favail, inodes, size)


# of the user namespace, which any owner of the directory may remove; nobody sets it
_PROBE = "user.mirrord.probe"


def write_fault(place: Path) -> str | None:
    """Return why the file system of `place` takes no change at all, or None. Writes nothing.

    It can wait for the disk, or until a frozen file system is thawed: not for the event loop.
    """
    try:
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            return "is read-only"
        # After an error ext4 (errors=remount-ro, since Linux 6.15) refuses changes without that
        # flag, XFS after a shutdown, too. To remove what is not there begins a change like others.
        os.removexattr(place, _PROBE)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EIO, errno.EUCLEAN):
            return f"takes no changes ({error.strerror})"
    return None


async def _evict_nothing(_bytes: int) -> None:
    pass


# Between two evictions; doubles each time that one did not free enough.
_PAUSE, _LONGEST_PAUSE = timedelta(seconds=5), timedelta(minutes=1)


class Room:
    """The reserve of one file system. `evict` frees about a number of bytes from caches."""

    def __init__(self, place: Path, reserve_bytes: Callable[[], int]) -> None:
        self._place = place
        self._reserve_bytes = reserve_bytes
        self._lock = anyio.Lock()
        self._backoff = Backoff(_PAUSE, _LONGEST_PAUSE)
        self._not_before = 0.0
        self.fault: str | None = None  # why nothing can be written, as `look_for_fault` saw it last
        self.evict: Callable[[int], Awaitable[None]] = _evict_nothing
        self._held: list[tuple[Path, int, os.stat_result]] = []

    def hold(self, places: Iterable[Path]) -> None:
        """Remember the directories at these paths until `release`.

        An open descriptor keeps the kernel from giving the number of one to another.
        """
        for place in places:
            descriptor = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._held.append((place, descriptor, os.fstat(descriptor)))

    def release(self) -> None:
        while self._held:
            os.close(self._held.pop()[1])

    def must_be_here(self) -> None:
        """Raise DiskFailedError where a held directory is gone, or another is in its place.

        Then nothing is known of what is not seen: an unmounted disk leaves an empty directory.
        """
        for place, _, before in self._held:
            try:
                now = os.stat(place)
            except OSError as error:
                raise _gone(place, str(error.strerror)) from error
            if not os.path.samestat(now, before):
                raise _gone(place, "another directory is in its place")

    def measure(self) -> Space:
        return measure(self._place, self._reserve_bytes())

    def must_suffice(self, doing: str) -> None:
        """Raise DiskFullError while the reserve is short. Any thread."""
        if shortage := self.measure().shortage:
            raise DiskFullError(
                f"cannot {doing}: the disk is nearly full, {shortage}",
                hint="free space on the disk of the state directory, release checkouts, or lower"
                " checkouts.disk_reserve; warm checkouts, resets and diffs still work",
            )

    async def ensure(self, doing: str) -> None:
        """Evict caches if the reserve is short. Raises DiskFullError if it stays short."""
        if (await self.look()).shortage:
            self.must_suffice(doing)

    async def look(self) -> Space:
        """Evict caches if little more than the reserve is free; return the space afterwards."""
        async with self._lock:  # waiting callers measure after the eviction
            space = await anyio.to_thread.run_sync(self.measure)
            if space.is_low and time.monotonic() >= self._not_before:
                missing = max(2 * space.reserve_bytes - space.free_bytes, space.reserve_bytes // 2)
                try:
                    await self.evict(missing)
                except (MirrordError, OSError) as error:  # it may have freed something
                    log.warning("eviction.failed", detail=str(error))
                space = await anyio.to_thread.run_sync(self.measure)
                if not space.is_low:
                    self._backoff.reset()
                self._not_before = time.monotonic() + self._backoff.next().total_seconds()
            return space

    async def look_for_fault(self) -> None:
        """See whether the disk takes changes at all; not for a request, because it can wait."""
        self.fault = await anyio.to_thread.run_sync(write_fault, self._place)


# has no reserve
UNBOUNDED = Room(Path("/"), lambda: 0)
