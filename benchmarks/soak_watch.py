"""What a daemon holds: memory, descriptors, threads, mounts, and directories below its state."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from measured_daemon import Daemon, family

_EVERY_S = 1.0
_TOLD_S = 30.0
_SETTLED_S = 150.0
_SLACK = {"descriptors": 8, "threads": 4, "processes": 1}
"""By so much a daemon at rest may differ: pools of threads and workers end a little later."""
_LEAK_MIB = 12.0
_MEMORY = {"at", "daemon_mib", "private_mib", "family_mib"}
"""What has no count, and differs without a leak."""


@dataclass
class Sample:
    """At one time; memory is resident, of the daemon alone and of all processes below it.

    `private_mib` is what the daemon alone has written: pages that no other process shares.
    """

    at: float
    daemon_mib: float
    private_mib: float
    family_mib: float
    processes: int
    descriptors: int
    threads: int
    mounts: int
    leases: int
    checkouts: int
    trash: int
    layers: int
    quarantine: int
    building: int

    @classmethod
    def of(cls, daemon: Daemon) -> Self:
        """Raises OSError while there is no daemon."""
        process, state = Path(f"/proc/{daemon.process.pid}"), daemon.state
        mounts = (process / "mountinfo").read_text().splitlines()
        weight = daemon.memory()
        return cls(
            at=time.monotonic(),
            daemon_mib=daemon.resident_mib(),
            private_mib=daemon.private_mib(),
            family_mib=weight["rss_mib"],
            processes=len(family(daemon.process.pid)),
            descriptors=len(os.listdir(process / "fd")),
            threads=len(os.listdir(process / "task")),
            mounts=sum(f" {state}/" in line for line in mounts),
            leases=_count(state / "leases"),
            checkouts=_count(state / "checkouts"),
            trash=sum(1 for each in _TRASH for _ in state.glob(f"{each}/.trash-*")),
            layers=_count(state / "templates/.layers"),
            quarantine=_count(state / "quarantine"),
            building=sum(1 for _ in state.glob("templates/*/.*-*")),
        )

    def line(self) -> str:
        """What a run shows of it while it lasts."""
        return (
            f"private {self.private_mib:.1f} MiB, resident {self.daemon_mib:.1f}, with workers "
            f"{self.family_mib:.1f}, {self.processes} processes, {self.threads} threads, "
            f"{self.descriptors} descriptors, {self.mounts} mounts, {self.leases} leases"
        )


_TRASH = ("checkouts", "leases", "leases/*", "templates", "templates/*", "templates/.layers")


class Watch:
    """Takes a sample every second while its block lasts; `most` is the peak of each number."""

    def __init__(self, take: Callable[[], Sample]) -> None:
        self._take = take
        self.samples: list[Sample] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        ended = threading.Event()

        def look() -> None:
            told = began = time.monotonic()
            while not ended.wait(_EVERY_S):
                with suppress(OSError):  # it is being restarted
                    sample = self._take()
                    self.samples.append(sample)
                    if sample.at >= told + _TOLD_S:
                        told = sample.at
                        print(f"  {told - began:6.0f} s: {sample.line()}", flush=True)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def slope_mib_h(self) -> float:
        """Growth of the daemon's private memory in the second half, by a line through all samples."""
        late = self.samples[len(self.samples) // 2 :]
        if len(late) < 2:
            return 0.0
        times = [each.at for each in late]
        return 3600 * statistics.linear_regression(times, [e.private_mib for e in late]).slope

    def most(self) -> dict[str, float]:
        rows = [asdict(each) for each in self.samples]
        return {name: max(row[name] for row in rows) for name in rows[0]} if rows else {}

    def leaks(self, before: Sample, after: Sample, *, is_same: bool) -> list[str]:
        """What is more after the load than before it; memory only of the same process."""
        found = [
            f"{name}: {count} before, {asdict(after)[name]} after"
            for name, count in asdict(before).items()
            if name not in _MEMORY and asdict(after)[name] > count + _SLACK.get(name, 0)
        ]
        grown = self.slope_mib_h() / 3600 * (after.at - before.at) / 2
        if is_same and grown > _LEAK_MIB and after.private_mib > before.private_mib + _LEAK_MIB:
            found.append(f"memory: {grown:.1f} MiB more in the second half")
        return found


def settled(daemon: Daemon, wanted: Sample | None = None) -> Sample:
    """The daemon at rest: no more than is wanted, or as it was some seconds long."""
    ends, last = time.monotonic() + _SETTLED_S, Sample.of(daemon)
    still = 0
    while time.monotonic() < ends:
        time.sleep(1)
        now = Sample.of(daemon)
        still = still + 1 if _held(now) == _held(last) else 0
        is_clean = wanted is None or all(
            a <= b + _SLACK.get(name, 0)
            for (name, a), b in zip(_held(now).items(), _held(wanted).values(), strict=True)
        )
        if is_clean and now.trash == 0 and still >= (20 if wanted is None else 3):
            return now
        last = now
    return last


def _held(sample: Sample) -> dict[str, int]:
    return {name: value for name, value in asdict(sample).items() if name not in _MEMORY}


def _count(directory: Path) -> int:
    try:
        return len(os.listdir(directory))
    except FileNotFoundError:
        return 0
