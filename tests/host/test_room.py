"""The reserve on the disk: caches are evicted before work is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from mirrord.errors import DiskFullError
from mirrord.host.room import UNBOUNDED, Room, Space, measure

_GIB = 1 << 30


class Disk:
    """A disk with a number of MiB free, of which an eviction frees some."""

    def __init__(self, free_mib: int, evictable_mib: int = 0) -> None:
        self.free, self.evictable = free_mib << 20, evictable_mib << 20
        self.asked: list[int] = []
        self.room = Room(Path("/"), lambda: _GIB)
        self.room.evict = self._evict

    async def _evict(self, wanted_bytes: int) -> None:
        self.asked.append(wanted_bytes >> 20)
        self.free, self.evictable = self.free + self.evictable, 0

    def ensure(self) -> None:
        anyio.run(self.room.ensure, "make something")


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Disk]]:
    made: list[Disk] = []
    monkeypatch.setattr(
        "mirrord.host.room.measure",
        lambda _, reserve: Space(made[0].free, reserve, 10**6, 10**4, 1 << 40),
    )
    yield made


@pytest.mark.parametrize(
    ("free_mib", "evictable_mib", "asked", "is_refused"),
    [
        (4096, 0, [], False),
        (1200, 0, [848], False),  # above the reserve: caches go early, nobody is refused
        (900, 2000, [1148], False),
        (900, 10, [1148], True),
    ],
)
def test_caches_are_evicted_before_work_is_refused(
    disks: list[Disk], free_mib: int, evictable_mib: int, asked: list[int], is_refused: bool
) -> None:
    disk = Disk(free_mib, evictable_mib)
    disks.append(disk)
    if is_refused:
        with pytest.raises(DiskFullError, match="910 MiB are free, 1024 are reserved"):
            disk.ensure()
    else:
        disk.ensure()
    assert disk.asked == asked


def test_an_eviction_without_effect_is_not_repeated_at_once(disks: list[Disk]) -> None:
    """It reads every template, which a crowd of refused requests must not cause."""
    disk = Disk(900)
    disks.append(disk)
    for _ in range(3):
        with pytest.raises(DiskFullError):
            disk.ensure()
    assert len(disk.asked) == 1


def test_a_small_disk_reserves_a_tenth_and_zero_reserves_nothing(tmp_path: Path) -> None:
    assert measure(tmp_path, 1 << 60).reserve_bytes < 1 << 60
    nothing = measure(tmp_path, 0)
    assert (nothing.reserve_bytes, nothing.reserve_inodes, nothing.shortage) == (0, 0, None)
    UNBOUNDED.must_suffice("do anything")


def test_inodes_are_reserved_too() -> None:
    assert (
        Space(_GIB, 0, 9_000, 10_000, 1 << 40).shortage
        == "9000 inodes are free, 10000 are reserved"
    )
