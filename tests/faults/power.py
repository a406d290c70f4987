"""Power cuts: the file system of the state directory ends at a random moment, and comes back with what had reached it."""

from __future__ import annotations

import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gitrepos import git
from waiting import BOUND_S

from .disks import CutDisk, unmount
from .judge import judge, nothing_left, nothing_lost, works_again
from .lab import Background, Lab, Refused, laboratory
from .on_checkouts import PoolCheckout
from .on_datasets import Import
from .on_mirrors import Pin, Sync
from .operation import Operation
from .plan import Plan
from .report import Row
from .series import Strike, in_series

_WORK: tuple[type[Operation], ...] = (Sync, Pin, Import, PoolCheckout)
_CUTS = 20
_FAULT = "power cut"


def rows(plan: Plan) -> Iterator[Row]:
    """Power cuts while mirrord works, on one disk after the other."""
    seed = plan.choices("power cuts")
    with tempfile.TemporaryDirectory() as scratch:
        yield from cut_power(Path(scratch), seed, plan.some(_CUTS))


def cut_power(scratch: Path, seed: random.Random, cuts: int) -> Iterator[Row]:
    disk = CutDisk(scratch / "disk.img")
    kinds = [seed.choice(_WORK) for _ in range(cuts)]
    strikes = [
        Strike(_FAULT, kind.name, "any moment", partial(_cut_once, disk=disk, kind=kind, seed=seed))
        for kind in kinds
    ]
    yield from in_series(strikes, partial(laboratory, disk.make, unmount))


def _cut_once(lab: Lab, disk: CutDisk, kind: type[Operation], seed: random.Random) -> Row:
    operation = kind(lab)
    work = Background(_repeatedly(operation.run))
    time.sleep(seed.uniform(0.0, 1.0))
    disk.cut()
    lab.kill()
    work.join()
    leases = dict(lab.truth.leases)
    lab.truth.leases.clear()  # what a lease of the last seconds is after a power cut is looked at below
    assert lab.daemon.process is not None
    lab.daemon.process.wait(BOUND_S)
    disk.restore()
    lab.daemon.start(prefix=new_boot(lab.root))
    _leases_are_whole(lab, leases)
    nothing_left(lab)
    nothing_lost(lab)
    works_again(lab)
    _torn_templates_go(lab)
    judge(lab, level="content")
    operation.clean()
    _release_all(lab)
    return Row(
        _FAULT,
        kind.name,
        "any moment",
        "started again; leases stand whole, or of the last seconds are gone",
    )


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


def _leases_are_whole(lab: Lab, leases: dict[str, dict[str, Any]]) -> None:
    """Each that stands can be reset and is what it says; none is there that nobody was given."""
    for lease in lab.call("GET", "checkouts"):
        answer = lab.call("POST", f"checkouts/{lease['id']}/reset", {})
        assert git(Path(lease["path"]), "write-tree") == answer["proof"]["tree"]
        git(Path(lease["path"]), "fsck", "--full", "--no-dangling")
        assert lease["commit"] == leases.get(lease["id"], lease)["commit"]


def _torn_templates_go(lab: Lab) -> None:
    """Templates are a cache and not flushed: an audit may find some torn, takes them away, and finds nothing else."""
    audit = lab.finish(lab.call("POST", "audits", {"level": "content", "heal": False}))
    other = [
        it for it in audit["findings"] if not it["detail"].startswith(("closure pack", "template"))
    ]
    assert not other, other[:3]


def _release_all(lab: Lab) -> None:
    for lease in lab.call("GET", "checkouts"):
        lab.release(lease["id"])
