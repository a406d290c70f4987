"""What earlier daemons, doctors and clients left, and how to remove it.

Of the state directory only what no daemon holds: its lock is taken meanwhile.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .. import scratch
from ..config import Settings
from ..host.files import opened
from ..host.mounts import mounts_below, umount
from ..host.trash import find_trash, remove_tree
from ..places import Layout
from .disk import SCRATCH_PREFIX
from .verdicts import Result, entries, existing, judge


class Repair(NamedTuple):
    """Something to be done, as a sentence without a subject: `remove …`, `set …`."""

    what: str
    act: Callable[[], object]


@contextmanager
def no_daemon(settings: Settings) -> Iterator[bool]:
    """Keeps a daemon from starting; answers False where one runs, or may."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(settings.state_dir / "daemon.lock", flags)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    with opened(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def find_leftovers(settings: Settings, *, alone: bool) -> list[Repair]:
    """Mounts first: what is mounted on cannot be removed. `alone`: inside of `no_daemon`."""
    sandboxes = [
        Repair(f"remove {path}, left by a killed sandbox", partial(scratch.sweep))
        for path in scratch.sweep(dry_run=True)
    ]
    return [*_of_state(settings), *sandboxes] if alone else sandboxes


def remaining(settings: Settings) -> Result:
    with no_daemon(settings) as alone:
        found = find_leftovers(settings, alone=alone)
    fact = "; ".join(each.what for each in found[:3]) + ("; …" if len(found) > 3 else "")
    remedy = "a start of the daemon, a sandbox, or `mirrord doctor --fix` does that"
    return judge(not found, f"to do: {fact}" if found else "none", remedy, otherwise="warn")


def _of_state(settings: Settings) -> Iterator[Repair]:
    layout = Layout(settings.state_dir)
    above = existing(settings.state_dir)
    scratches = [Path(entry.path) for entry in entries(above) if _is_scratch(entry)]
    top = str(layout.checkouts)
    for point in [*mounts_below(top), *_mounts_in(scratches)]:
        if point != top and not _has_lease(layout, Path(point)):
            yield Repair(f"unmount {point}, which belongs to no checkout", partial(umount, point))
    for directory in (
        *(layout.mirrors, layout.quarantine, layout.checkouts, layout.leases, layout.templates),
        *layout.templates.glob("[!.]*"),
        *layout.templates.glob("[!.]*/*"),
    ):
        for path in find_trash(directory):
            yield Repair(f"remove {path}, which an earlier daemon discarded", _remover(path))
    for path in scratches:
        yield Repair(f"remove {path}, left by a killed doctor", _remover(path))
    if settings.socket.is_socket() and _is_dead(settings.socket):
        what = f"remove {settings.socket}, at which nobody listens"
        yield Repair(what, settings.socket.unlink)


def _remover(path: Path) -> Callable[[], object]:
    return partial(remove_tree, path)


def _is_scratch(entry: os.DirEntry[str]) -> bool:
    """A doctor needs seconds."""
    with suppress(OSError):
        return entry.name.startswith(SCRATCH_PREFIX) and _is_old(entry.stat().st_ctime)
    return False


def _is_old(at: float) -> bool:
    return at < time.time() - 60


def _mounts_in(places: list[Path]) -> list[str]:
    return [path for place in places for path in mounts_below(str(place))]


def _has_lease(layout: Layout, path: Path) -> bool:
    """Whether a mount is below the directory of a checkout that the next daemon adopts."""
    if not path.is_relative_to(layout.checkouts):
        return False
    private = layout.leases / path.relative_to(layout.checkouts).parts[0]
    return any((private / name).exists() for name in ("lease.json", "resetting.json"))


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
