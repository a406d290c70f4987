"""Disks that are full, or cannot be read: the work that meets one ends with an error, and everything old is served on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gitrepos import git

from .disks import SmallDisk, unmount, unreadable
from .judge import judge, nothing_left
from .kills import judge_operation
from .lab import NAME, Lab, Refused, laboratory
from .operations import Operation
from .report import Row

_SIZE_BYTES = 96 * 1024**2


def fill_up(kinds: list[type[Operation]], free: list[int]) -> list[Row]:
    """Run each operation with each of these numbers of bytes free; then make room, and run it again."""
    disk = SmallDisk(_SIZE_BYTES)
    with laboratory(disk.mount, unmount) as lab:
        return [_fill_once(lab, disk, kind, free_bytes) for kind in kinds for free_bytes in free]


def _fill_once(lab: Lab, disk: SmallDisk, kind: type[Operation], free_bytes: int) -> Row:
    operation = kind(lab)
    disk.leave_free(free_bytes)
    said = "done all the same"
    try:
        operation.run()
    except Refused as refused:
        said = f"answered {refused.code}"
        assert refused.problem.get("status", 507) != 500, f"a full disk is not a bug: {refused}"
    finally:
        disk.empty()
    judge_operation(lab, operation)
    outcome = operation.outcome()
    operation.settle()
    judge(lab)
    operation.clean()
    return Row("disk full", f"{kind.name}, {free_bytes >> 10} KiB free", f"{said}; {outcome}", "nothing")


def read_errors(lab: Lab, scratch: Path) -> list[Row]:
    """EIO from the mirror's pack: said by the audit and by a checkout, and over when the disk is well again."""
    lab.maintain()
    pack = max((lab.mirror / "objects/pack").glob("pack-*.pack"), key=lambda file: file.stat().st_size)
    with unreadable(pack, scratch):
        audit = lab.finish(lab.call("POST", "audits", {"level": "content", "heal": False}))
        assert audit["findings"], "an audit that does not see a read error"
        said = "served from what was built"
        try:
            lab.release(lab.checkout(lab.commits[11], "pool")["id"])
        except Refused as refused:
            said = f"answered {refused.code}"
            assert refused.code != "internal-error"
    with suppress(Refused):
        lab.sync()
    nothing_left(lab)
    judge(lab)
    assert git(lab.mirror, "rev-parse", f"{lab.commits[11]}^{{commit}}")
    return [Row("read error (EIO)", f"audit: a pack of {NAME}", f"reported {len(audit['findings'])} findings", "nothing"),
            Row("read error (EIO)", f"checkout: a pack of {NAME}", said, "nothing")]  # fmt: skip
