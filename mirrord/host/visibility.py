"""What a process sees of a directory of ours: it may live in a mount namespace of its own, as containers and many units do.

Asks the kernel about a process by its id, and changes nothing. What it may not ask, as in a
daemon without the right to look at other users' processes, counts as seen. The answer is for the
moment: a process may enter another namespace afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

from .mounts import unescape


class Visible(IntEnum):
    """Each includes those before it: nothing of the directory; plain files in it; what is mounted in it later."""

    NOTHING = 0
    FILES = 1
    MOUNTS = 2


@dataclass(frozen=True, slots=True)
class _Mount:
    """A line of mountinfo: `root` is the directory of the file system `device` that is seen at `at`."""

    device: bytes
    root: str
    at: str
    groups: frozenset[bytes]

    @classmethod
    def parse(cls, line: bytes) -> Self:
        fields = line.split()
        tags = fields[6 : fields.index(b"-", 6)]
        groups = frozenset(
            tag.partition(b":")[2] for tag in tags if tag.startswith((b"shared:", b"master:"))
        )
        return cls(fields[2], unescape(fields[3]), unescape(fields[4]), groups)


def shares_mounts(pid: int) -> bool:
    """Whether a process is in our mount namespace, or is not ours to look at, or has ended. Two system calls."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return True


def visible_to(pid: int, directory: Path) -> Visible:
    """What a process in another namespace sees of a directory. Reads two tables of mounts: 10 ms each with 3,000 of them."""
    try:
        theirs = list(_read_mounts(pid))
    except OSError:
        return Visible.MOUNTS
    holds = [each for each in _read_mounts("self") if _is_within(str(directory), each.at)]
    ours = max(
        reversed(holds), key=lambda each: len(each.at)
    )  # of several at one place the last is on top
    place = os.path.normpath(f"{ours.root}/{os.path.relpath(directory, ours.at)}")
    seen = [each for each in theirs if each.device == ours.device and _is_within(place, each.root)]
    if any(each.groups & ours.groups for each in seen):
        return Visible.MOUNTS
    return Visible.FILES if seen else Visible.NOTHING


def _read_mounts(pid: int | str) -> Iterator[_Mount]:
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        yield from map(_Mount.parse, file)


def _is_within(path: str, above: str) -> bool:
    return above == "/" or path == above or path.startswith(f"{above}/")
