"""What a checkout costs here, measured: its system calls on a throwaway template.

Each part is tried for at most a third of a second; an overlay only where this process may mount.
"""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from ..config import Settings
from ..errors import MirrordError
from ..host.files import opened
from ..host.mounts import attach, make_overlay, may_mount, replace, umount
from .disk import scratch
from .verdicts import Result, judge

_FILES = 200
_PART_S = 0.3
_ROUNDS = 15
_SLOW = 5  # so many times what is normal is worth a warning


class Part(NamedTuple):
    """`normal_ms` is the most that a quiet machine with a local disk takes."""

    name: str
    ms: float
    normal_ms: float

    def __str__(self) -> str:
        return f"{self.name} {self.ms:.2g} ms (normal: up to {self.normal_ms:g})"


def checkouts(settings: Settings) -> Result:
    with scratch(settings) as place:
        parts = [Part("a directory", _mkdir_ms(place), 0.1)]
        written_ms, looked_ms = _tree_ms(place)
        if may_mount():
            try:
                mounted_ms, reset_ms = _overlay_ms(place)
            except MirrordError:  # the check of overlays says why
                pass
            else:
                parts.append(Part("an overlay made and taken down", mounted_ms, 1))
                parts.append(Part("one put in its place", reset_ms, 1))
        parts.append(Part("1,000 files written", written_ms, 200))
        parts.append(Part("looked at", looked_ms, 20))
    slow = [part.name for part in parts if part.ms > _SLOW * part.normal_ms]
    remedy = f"slow: {', '.join(slow)}; is the machine busy? see the checks of the file system"
    return judge(not slow, ", ".join(map(str, parts)), remedy, otherwise="warn")


def _median_ms(attempt: Callable[[int], None]) -> float:
    """Of as many rounds as there is time for, at least one."""
    taken, end = [], time.perf_counter() + _PART_S
    for number in range(_ROUNDS):
        began = time.perf_counter()
        attempt(number)
        taken.append(time.perf_counter() - began)
        if time.perf_counter() > end:
            break
    return statistics.median(taken) * 1000


def _mkdir_ms(place: Path) -> float:
    """After removals, as in a daemon at work: an ext4 without a journal looks through those."""
    end = time.perf_counter() + _PART_S
    for number in range(300):
        path = place / f"removed-{number}"
        path.mkdir()
        path.rmdir()
        if time.perf_counter() > end:
            break
    return _median_ms(lambda number: (place / f"made-{number}").mkdir())


def _tree_ms(place: Path) -> tuple[float, float]:
    """Write a tree and look at all of it, for a thousand files."""
    tree, content = place / "layer", b"x" * 4096
    tree.mkdir()
    began = time.perf_counter()
    for number in range(_FILES):
        (tree / f"file-{number}").write_bytes(content)
    written = time.perf_counter()
    for entry in os.scandir(tree):
        entry.stat(follow_symlinks=False)
    looked = time.perf_counter()
    return (written - began) * 1e6 / _FILES, (looked - written) * 1e6 / _FILES


def _overlay_ms(place: Path) -> tuple[float, float]:
    """Mount overlays and take them down; put one in another's place, as a reset does."""

    def overlay(name: str) -> int:
        paths = [place / "layer", *(place / f"{name}-{part}" for part in ("upper", "work"))]
        for path in paths[1:]:
            path.mkdir()
        with ExitStack() as stack:
            layer, upper, work = (
                stack.enter_context(opened(os.open(path, os.O_PATH | os.O_DIRECTORY)))
                for path in paths
            )
            return make_overlay([layer], upper, work)

    def checkout(number: int) -> None:
        tree = place / f"tree-{number}"
        tree.mkdir()
        with opened(overlay(f"checkout-{number}")) as mount:
            attach(mount, str(tree))
        umount(str(tree))

    def reset(number: int) -> None:
        with opened(overlay(f"reset-{number}")) as mount:
            replace(mount, str(place / "tree-0"))

    mounted_ms = _median_ms(checkout)
    try:
        with opened(overlay("first")) as mount:
            attach(mount, str(place / "tree-0"))
        return mounted_ms, _median_ms(reset)
    finally:
        umount(str(place / "tree-0"))
