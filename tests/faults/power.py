"""Power cuts: the file system of the state directory ends at a random moment, and comes back with what had reached it."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gitrepos import git

from .disks import CutDisk, unmount
from .judge import judge, nothing_left, nothing_lost, works_again
from .lab import Background, Lab, Refused, laboratory
from .operations import Import, Operation, Pin, PoolCheckout, Sync
from .report import Row

_WORK: tuple[type[Operation], ...] = (Sync, Pin, Import, PoolCheckout)


def cut_power(scratch: Path, seed: random.Random, cuts: int) -> list[Row]:
    """Cut the power `cuts` times while mirrord works, on one disk after the other."""
    disk = CutDisk(scratch / "disk.img")
    with laboratory(disk.mount, unmount) as lab:
        return [_cut_once(lab, disk, seed) for _ in range(cuts)]


def _cut_once(lab: Lab, disk: CutDisk, seed: random.Random) -> Row:
    kind = seed.choice(_WORK)
    operation = kind(lab)
    work = Background(_repeatedly(operation.run))
    time.sleep(seed.uniform(0.0, 1.0))
    disk.cut()
    lab.kill()
    work.join()
    leases = dict(lab.truth.leases)
    lab.truth.leases.clear()  # what a lease of the last seconds is after a power cut is looked at below
    assert lab.daemon.process is not None
    lab.daemon.process.wait(30)
    disk.restore()
    lab.daemon.start(prefix=new_boot(lab.root))
    stood = _leases(lab, leases)
    nothing_left(lab)
    nothing_lost(lab)
    works_again(lab)
    judge(lab, level="content")
    _release_all(lab)
    return Row("power cut", kind.name, f"started; {stood} of {len(leases)} leases stand, the others are gone", "nothing")


def new_boot(root: Path) -> tuple[str, ...]:
    """What starts the daemon with another boot id, as it would find after a power cut, in a mount namespace of its own."""
    (root / "boot_id").write_text(f"{uuid.uuid4()}\n")
    script = f'mount --make-rprivate /proc && mount --bind {root}/boot_id /proc/sys/kernel/random/boot_id && exec "$@"'
    return "unshare", "--mount", "--propagation", "unchanged", "sh", "-c", script, "sh"


def _repeatedly(run: Callable[[], None]) -> Callable[[], None]:
    """Until the daemon or its disk is gone."""

    def work() -> None:
        while True:
            try:
                run()
            except Refused:
                time.sleep(0.01)

    return work


def _leases(lab: Lab, leases: dict[str, dict[str, Any]]) -> int:
    """Leases that stand must be whole; each can be reset."""
    there = {lease["id"]: lease for lease in lab.call("GET", "checkouts")}
    for lease in there.values():
        answer = lab.call("POST", f"checkouts/{lease['id']}/reset", {})
        assert git(Path(lease["path"]), "write-tree") == answer["proof"]["tree"]
        git(Path(lease["path"]), "fsck", "--full", "--no-dangling")
    return len(there.keys() & leases.keys())


def _release_all(lab: Lab) -> None:
    for lease in lab.call("GET", "checkouts"):
        lab.release(lease["id"])
