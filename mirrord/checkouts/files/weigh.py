"""Weigh trees: what they take on disk, and what of that they share by hard links. In workers.

A tree may be a client's, who changes it meanwhile: no link is followed and no mount entered. What
cannot be looked into, or is not reached in time, is left out.
"""

import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import MirrordError
from ...host.credentials import ActingAs
from ...host.files import open_directory, opened
from .reader import TreeReader

Inode = tuple[int, int]


class Weight(NamedTuple):
    """`shared_bytes` are those of files that another thing of the group has, too; `is_whole` says
    that all of it was seen.
    """

    size_bytes: int
    shared_bytes: int
    is_whole: bool


class Weights(NamedTuple):
    """Of each thing of a group, in order, and of all: there a file of several counts once."""

    each: list[Weight]
    total_bytes: int


Things = Sequence[Sequence[Path]]
"""Each has one place or more: files or trees. A missing one weighs nothing."""


def weigh(groups: Mapping[str, Things], limit_s: float) -> dict[str, Weights]:
    """Weigh groups of things, as far as that is done in time."""
    deadline = time.monotonic() + limit_s
    return {name: _weigh_group(things, deadline) for name, things in groups.items()}


def _weigh_group(things: Things, deadline: float) -> Weights:
    linked = Counter[Inode]()  # how many things have a file of many names
    found = [_weigh_one(paths, deadline) for paths in things]
    for _, links, _ in found:
        linked.update(links.keys())
    each, once = [], dict[Inode, int]()
    for alone, links, is_whole in found:
        shared = sum(size for inode, size in links.items() if linked[inode] > 1)
        each.append(Weight(alone + sum(links.values()), shared, is_whole))
        once |= links
    return Weights(each, sum(alone for alone, _, _ in found) + sum(once.values()))


def _weigh_one(paths: Sequence[Path], deadline: float) -> tuple[int, dict[Inode, int], bool]:
    """The bytes of files with one name; those of each file with more; whether all was seen."""
    alone, links, is_whole = 0, dict[Inode, int](), True
    for path in paths:
        refused: list[bytes] = []
        try:
            for number, seen in enumerate(_iter_stats(path, refused)):
                if number % 256 == 0 and time.monotonic() > deadline:
                    return alone, links, False
                if seen.st_nlink > 1 and not stat.S_ISDIR(seen.st_mode):
                    links[seen.st_dev, seen.st_ino] = seen.st_blocks * 512
                else:
                    alone += seen.st_blocks * 512
        except FileNotFoundError:
            pass
        except (MirrordError, OSError):  # something is mounted in it
            is_whole = False
        is_whole &= not refused
    return alone, links, is_whole


def _iter_stats(path: Path, refused: list[bytes]) -> Iterator[os.stat_result]:
    """Of a file, or of all in a tree; directories that cannot be looked into are `refused`."""
    with opened(open_directory(path.parent)) as above, TreeReader(above, ActingAs(None)) as reader:
        name = os.fsencode(path.name)
        yield from (
            seen for _, seen in reader.iter_stats_below(name, lambda at, _: refused.append(at))
        )
