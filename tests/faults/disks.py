"""Disks that fail: a small one that fills up, one whose power is cut, a file that cannot be read. All are gone at the end.

A full disk is a tmpfs with a ballast file. A power cut is EXT4_IOC_SHUTDOWN without flushing the log: ext4 (on a loop device)
ends at once, what was not written is lost, and the next mount replays the journal. A read error is a loop device whose backing
file was cut short: the kernel answers EIO for what is gone (Linux 6.18). dm-flakey and dm-error need a device-mapper, which not
every kernel has.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mount_table import mount_lines

_EXT4_IOC_SHUTDOWN = 0x8004587D  # linux/ext4.h, _IOR('X', 125, __u32)
_NO_LOG_FLUSH = 2
_FREE_S = 10.0


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def unmount(path: Path) -> None:
    """Take everything away that is mounted at or below `path`; nothing there is fine."""
    lines = mount_lines()
    targets = [line.split()[4] for line in lines]
    for target in sorted(
        (t for t in targets if t == str(path) or t.startswith(f"{path}/")), reverse=True
    ):
        subprocess.run(["umount", "--lazy", target], check=False, capture_output=True)


def _unmount_when_free(path: Path) -> None:
    """Not lazily, because the device is to be free; somebody who looks at all mounts may hold it for a moment."""
    deadline = time.monotonic() + _FREE_S
    while subprocess.run(["umount", path], check=False, capture_output=True).returncode:
        assert time.monotonic() < deadline, f"{path} stays busy"
        time.sleep(0.05)


class SmallDisk:
    """A tmpfs of a fixed size, which a ballast file fills."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._path = Path()

    def mount(self, path: Path) -> None:
        self._path = path
        run("mount", "-t", "tmpfs", "-o", f"size={self._size_bytes},mode=0711", "tmpfs", path)

    def leave_free(self, free_bytes: int) -> None:
        """Fill it up but for so much, also while others write to it; again takes what they gave back."""
        if self._free_bytes() < free_bytes:
            self.empty()
        with (self._path / "ballast").open("ab") as file:
            while (room := self._free_bytes() - free_bytes) > 0:
                with suppress(OSError):  # others took some of it meanwhile
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, room)

    def _free_bytes(self) -> int:
        found = os.statvfs(self._path)
        return found.f_bavail * found.f_frsize

    def empty(self) -> None:
        (self._path / "ballast").unlink(missing_ok=True)


class CutDisk:
    """An ext4 on a loop device. After `cut` it is mounted anew, as a machine would that got its power back."""

    def __init__(self, image: Path, size_bytes: int = 512 * 1024**2) -> None:
        self._image = image
        self._copies = 0
        self._size_bytes = size_bytes
        self._path = Path()

    def make(self, path: Path) -> None:
        """An empty one, mounted."""
        with self._image.open("wb") as file:
            file.truncate(self._size_bytes)
        run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", self._image)
        self.mount(path)

    def mount(self, path: Path) -> None:
        self._path = path
        run("mount", "-o", "loop", self._image, path)
        run(
            "mount", "--make-shared", path
        )  # what a daemon with a mount namespace of its own mounts below is seen here too
        path.chmod(0o711)

    def cut(self) -> None:
        """From here on nothing reaches the disk; who writes or reads gets EIO."""
        fd = os.open(self._path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def restore(self) -> None:
        """Mount what had reached the disk, which replays the journal; then the file system must be sound.

        A copy is mounted: somebody's mount namespace may still hold the dead one, and the kernel would give us that again.
        """
        unmount(self._path)
        self._copies += 1
        copy = self._image.with_name(f"disk-{self._copies}.img")
        run("cp", "--sparse=always", self._image, copy)
        self._image.unlink()
        self._image = copy
        self.mount(self._path)
        _unmount_when_free(self._path)
        run("fsck.ext4", "-f", "-n", copy)
        self.mount(self._path)


@contextmanager
def unreadable(file: Path, scratch: Path) -> Iterator[None]:
    """A file whose content gives EIO, at its own place: a bind mount of a copy on a disk that lost its end."""
    image, place = scratch / "bad.img", scratch / "bad"
    place.mkdir()
    size = file.stat().st_size
    with image.open("wb") as made:
        made.truncate(size + 16 * 1024**2)
    run("mkfs.ext4", "-q", image)
    try:
        run("mount", "-o", "loop", image, place)
        with (place / "first").open("wb") as first:
            os.posix_fallocate(
                first.fileno(), 0, 4 * 1024**2
            )  # the file itself comes to lie behind it
        shutil.copyfile(file, place / file.name)
        run("umount", place)
        run("mount", "-o", "loop,ro,noload", image, place)
        os.truncate(image, 4 * 1024**2)
        run("mount", "--bind", place / file.name, file)
        yield
    finally:
        unmount(file)
        unmount(place)
        image.unlink(missing_ok=True)
        place.rmdir()
