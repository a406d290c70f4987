"""Tables of mounts, of this process and others: what is mounted where, and who sees it."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from .files import opened
from .mounts import DIRECTORY, mount_id


class Visible(IntEnum):
    """What a process sees of a directory: its files; and also what is mounted below it later.

    UNKNOWN, where its table of mounts cannot be read, promises nothing.
    """

    NOTHING = 0
    UNKNOWN = 1
    FILES = 2
    MOUNTS = 3


class Mount(NamedTuple):
    """A line of mountinfo: `root`, a directory of the file system, is visible at `at`."""

    kind: str
    source: str
    device: str
    root: str
    at: str
    options: frozenset[str]  # of the mount and of its file system
    groups: frozenset[bytes]  # peer groups that it shares with, or is a slave of


def shares_mounts(pid: int) -> bool | None:
    """Return whether a process is in our mount namespace; None if it ended or is not readable."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return None


def visible_to(pid: int, directory: Path) -> Visible:
    """Return what a process sees of a directory in its mount namespace, at this moment.

    Reads two tables of mounts, as far as needed: a table of 3,000 takes 10 ms, but `checkouts` is
    mounted before the overlays in it. Everybody may read them, unless /proc is mounted with
    `hidepid` (ProtectProc=), or the process is in another pid namespace.
    """
    visible = Visible.NOTHING
    try:
        if (mount := _find_own_mount(directory)) is None:
            return Visible.UNKNOWN
        place = os.path.normpath(f"{mount.root}/{os.path.relpath(directory, mount.at)}")
        for seen in _iter_mounts(pid):
            if seen.device == mount.device and _is_within(place, seen.root):
                if seen.groups & mount.groups:
                    return Visible.MOUNTS
                visible = Visible.FILES
    except OSError:
        return Visible.UNKNOWN
    return visible


def _find_own_mount(directory: Path) -> Mount | None:
    with opened(os.open(directory, DIRECTORY)) as fd:
        wanted = b"%d" % mount_id(fd)
    return next((_mount_of(fields) for fields in _iter_fields("self") if fields[0] == wanted), None)


def find_left_behind(checkouts: Path) -> dict[int, str]:
    """Find mounted trees that no reset or release will unmount, one for each mount namespace.

    Returns mount points by a process of the namespace. Such a mount is private, or its master was
    unmounted without it, so it is in no peer group. Namespaces of unreadable processes are skipped.
    """
    mounts: dict[int, str] = {}
    visited: set[int] = set()
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):
            namespace = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            if namespace in visited:
                continue
            visited.add(namespace)
            for mount in read_mounts(pid):
                is_ours = (mount.kind, mount.source) == ("overlay", "mirrord")
                if is_ours and not mount.groups and not _is_within(mount.at, str(checkouts)):
                    mounts[pid] = mount.at
    return mounts


def find_mount(path: Path) -> Mount:
    """Return the mount of a path, by name: on btrfs a file's device number is not its mount's."""
    place = str(path.resolve())
    above = [mount for mount in read_mounts() if _is_within(place, mount.at)]
    return max(reversed(above), key=lambda mount: len(mount.at))  # the last of several at one place


def read_overlays() -> set[str]:
    """Return the mount points of overlays. 10 ms with 3,000 mounts: not for the hot path."""
    return {mount.at for mount in read_mounts() if mount.kind == "overlay"}


_BUFFER_BYTES = 1 << 16  # the kernel's answer for its files, 1 KiB, asks it 60 times as often


def mounts_below(directory: str) -> list[str]:
    """Return the mount points at and below a directory, in this process's namespace."""
    top = os.path.realpath(directory)
    with open("/proc/self/mountinfo", "rb", buffering=_BUFFER_BYTES) as file:
        points = [_unescape(line.split(b" ", 5)[4]) for line in file]
    return [point for point in points if _is_within(point, top)]


def read_mounts(pid: int | str = "self") -> list[Mount]:
    return list(_iter_mounts(pid))


def _iter_mounts(pid: int | str) -> Iterator[Mount]:
    return map(_mount_of, _iter_fields(pid))


def _iter_fields(pid: int | str) -> Iterator[list[bytes]]:
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        yield from map(bytes.split, file)


def _mount_of(fields: list[bytes]) -> Mount:
    # proc_pid_mountinfo(5): six fields, any number of tags, `-`, then type, source and options
    end = fields.index(b"-", 6)
    tags = [tag.partition(b":") for tag in fields[6:end]]
    groups = frozenset(group for kind, _, group in tags if kind in (b"shared", b"master"))
    root, point, source = map(_unescape, (fields[3], fields[4], fields[end + 2]))
    kind, device = fields[end + 1].decode(), fields[2].decode()
    options = frozenset(os.fsdecode(b",".join((fields[5], fields[end + 3]))).split(","))
    return Mount(kind, source, device, root, point, options, groups)


def _unescape(field: bytes) -> str:
    """Decode a path of mountinfo: space, tab, newline and backslash are octal."""
    if b"\\" in field:
        field = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)
    return os.fsdecode(field)


def _is_within(path: str, above: str) -> bool:
    return above == "/" or path == above or path.startswith(f"{above}/")
