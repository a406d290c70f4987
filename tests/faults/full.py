"""Disks that are full, or cannot be read: the work that meets one ends with an error, and everything old is served on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from gitrepos import git

from .disks import SmallDisk, unmount, unreadable
from .judge import judge, nothing_left
from .lab import Lab, Refused, laboratory
from .operation import Operation
from .operations import OPERATIONS
from .plan import Part, Plan
from .report import Row
from .series import Strike, end_of, in_series, must_mend_itself

FREE_BYTES = (8 << 10, 64 << 10, 256 << 10, 1 << 20)
_SIZE_BYTES = 96 * 1024**2
_FAULT = "disk full"


def _filled(kind: type[Operation], plan: Plan) -> Iterator[Row]:
    return fill_up(kind, FREE_BYTES[: plan.some(len(FREE_BYTES))])


def parts() -> Iterator[Part]:
    """A part for each operation, and one for a disk that lost its end."""
    for kind in OPERATIONS:
        yield Part(
            f"{kind.name}: disk full",
            partial(_filled, kind),
        )
    yield Part("bad disk", _lost_end)


def fill_up(kind: type[Operation], free: tuple[int, ...]) -> Iterator[Row]:
    """Run an operation with each of these numbers of bytes free; then make room, and run it again."""
    disk = SmallDisk(_SIZE_BYTES)
    strikes = [
        Strike(
            _FAULT,
            kind.name,
            f"{free_bytes >> 10} KiB free",
            partial(_fill_once, disk=disk, kind=kind, free_bytes=free_bytes),
        )
        for free_bytes in free
    ]
    yield from in_series(strikes, partial(laboratory, disk.mount, unmount))


def _fill_once(lab: Lab, disk: SmallDisk, kind: type[Operation], free_bytes: int) -> Row:
    operation = kind(lab)
    disk.leave_free(free_bytes)
    said = "done all the same"
    try:
        operation.run()
    except Refused as refused:
        said = f"answered {refused.code}"
        assert not refused.is_bug, f"a full disk is not a bug: {refused}"
    finally:
        disk.empty()
    must_mend_itself(lab, operation)
    lab.kill()
    lab.wait_for_end()
    operation.look()
    lab.restart()
    return Row(
        _FAULT, kind.name, f"{free_bytes >> 10} KiB free", f"{said}; {end_of(lab, operation)}"
    )


def _lost_end(_: Plan) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch, laboratory() as lab:
        yield from read_errors(lab, Path(scratch))


def read_errors(lab: Lab, scratch: Path) -> list[Row]:
    """EIO from the mirror's pack: said by the audit and by a checkout, and over when the disk is well again."""
    lab.maintain()
    pack = max(
        (lab.mirror / "objects/pack").glob("pack-*.pack"), key=lambda file: file.stat().st_size
    )
    with unreadable(pack, scratch):
        audit = lab.finish(lab.call("POST", "audits", {"level": "content", "heal": False}))
        assert audit["findings"], "an audit that does not see a read error"
        said = "served from what was built"
        try:
            lab.release(lab.checkout(lab.commits[11], "pool")["id"])
        except Refused as refused:
            said = f"answered {refused.code}"
            assert not refused.is_bug, f"a read error is not a bug: {refused}"
    with suppress(Refused):
        lab.sync()
    nothing_left(lab)
    judge(lab)
    assert git(lab.mirror, "rev-parse", f"{lab.commits[11]}^{{commit}}")
    where = "a pack, on a disk that lost its end"
    return [
        Row("EIO", "audit", where, "findings that name it"),
        Row("EIO", "checkout (pool)", where, said),
    ]
