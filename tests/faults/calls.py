"""System calls that fail: `strace -e inject` gives EIO or ENOSPC to the daemon, its workers and its gits at one call of a run.

Which calls an operation makes on the disk is seen in a run that is only watched. A call is struck by its name and its number in
a process or thread: each that gets so far meets the fault. Reads are struck by file, so that whoever opens it meets a bad disk.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from waiting import BOUND_S

from .kills import descendants
from .lab import Lab, Refused, laboratory
from .operation import Operation
from .operations import OPERATIONS
from .plan import Part, Plan
from .report import Row
from .series import Strike, end_of, in_series, must_mend_itself

WRITES = (
    "fsync", "fdatasync", "rename", "renameat2", "link", "linkat", "mkdir", "mkdirat", "symlinkat", "unlink", "unlinkat",
    "pwrite64", "ftruncate", "fallocate", "chmod", "fchmodat",
)  # fmt: skip
READS = ("read", "pread64", "mmap")
NOT_MET = "no process met it"
_STRIKES = 10
_MOST = 6
_ATTACH_S = 10.0
_CALL = re.compile(r"^(\d+) +(\w+)\((.*)$")


def parts() -> Iterator[Part]:
    """A part for each operation."""
    for kind in OPERATIONS:
        yield Part(f"{kind.name}: calls that fail", lambda plan, kind=kind: _rows(kind, plan))  # type: ignore[misc]
    yield Part("files that cannot be read", _bad_files)


def _rows(kind: type[Operation], plan: Plan) -> Iterator[Row]:
    seed = plan.choices(f"{kind.name}: calls that fail")
    with laboratory() as lab:
        calls = calls_of(lab, kind)
    chosen = seed.sample(calls, min(plan.some(_STRIKES), len(calls)))
    strikes = []
    for call, number in chosen:
        error = seed.choice(("EIO", "ENOSPC"))
        strike = partial(fail_at, kind=kind, call=call, number=number, error=error)
        strikes.append(Strike(f"{error} at a system call", kind.name, _step(call, number), strike))
    yield from in_series(strikes)


def calls_of(lab: Lab, kind: type[Operation]) -> list[tuple[str, int]]:
    """The calls on the state directory that a run makes, by name and number in their thread."""
    operation = kind(lab)
    with traced(lab, "-y", "-e", f"trace={','.join(WRITES)}") as log:
        operation.run()
    operation.settle()
    operation.clean()
    counts: dict[tuple[str, str], int] = {}
    seen: set[tuple[str, int]] = set()
    for thread, call, arguments in filter(
        None, map(_parsed, log.read_text(errors="replace").splitlines())
    ):
        counts[thread, call] = number = counts.get((thread, call), 0) + 1
        if str(lab.state) in arguments and number <= _MOST:
            seen.add((call, number))
    return sorted(seen)


def fail_at(lab: Lab, kind: type[Operation], call: str, number: int, error: str) -> Row:
    """Run the operation with that fault, then without."""
    operation = kind(lab)
    said = "went on"
    with traced(
        lab, "-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={number}"
    ) as log:
        try:
            operation.run()
        except Refused as refused:
            said = f"answered {refused.code}"
            assert not refused.is_bug, f"a failing disk is not a bug: {refused}"
    assert lab.is_up or operation.may_end_daemon, "the daemon died of it"
    met = "INJECTED" in log.read_text(errors="replace")
    must_mend_itself(lab, operation)
    lab.kill()
    lab.wait_for_end()
    operation.look()
    lab.restart()
    outcome = end_of(lab, operation)
    fault, step = f"{error} at a system call", _step(call, number)
    return (
        Row(fault, kind.name, step, f"{said}; {outcome}")
        if met
        else Row(fault, kind.name, step, NOT_MET, times=0)
    )


def _step(call: str, number: int) -> str:
    return f"`{call}` ({number})"


def _parsed(line: str) -> tuple[str, str, str] | None:
    found = _CALL.match(line)
    return (found[1], found[2], found[3]) if found else None


@contextmanager
def traced(lab: Lab, *how: str) -> Iterator[Path]:
    """strace on the daemon and all below it, until the block ends; yields its log."""
    log = lab.root / f"trace-{lab.number()}"
    pids = [lab.daemon.pid, *descendants(lab.daemon.pid)]
    attached = [word for pid in pids for word in ("-p", str(pid))]
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", log, *how, *attached], stderr=subprocess.PIPE
    )
    try:
        _wait_until_traced(lab.daemon.pid, tracer)
        yield log
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.communicate(timeout=BOUND_S)


def _wait_until_traced(pid: int, tracer: subprocess.Popen[bytes]) -> None:
    """Every thread of it."""
    deadline = time.monotonic() + _ATTACH_S
    while any(
        "TracerPid:\t0" in (task / "status").read_text()
        for task in Path(f"/proc/{pid}/task").iterdir()
    ):
        assert time.monotonic() < deadline and tracer.poll() is None, "strace does not attach"
        time.sleep(0.01)


# -- files that cannot be read --------------------------------------------------------------------------------------------


def _bad_files(plan: Plan) -> Iterator[Row]:
    """Each file of a mirror and of a template, while an audit, a sync and a checkout go on."""
    seed = plan.choices("files that cannot be read")
    with laboratory() as lab:
        names = _kinds_of_files(lab)
    chosen = seed.sample(names, plan.some(len(names)))
    yield from in_series(
        Strike(
            "EIO from a file",
            "audit, sync, checkout",
            name,
            partial(bad_file, name=name, seed=seed),
        )
        for name in chosen
    )


def _kinds_of_files(lab: Lab) -> list[str]:
    """Patterns below the state directory, each of which one file is taken for."""
    lab.maintain()
    patterns = (
        "mirrors/o__r/objects/pack/pack-*.pack", "mirrors/o__r/objects/pack/pack-*.idx", "mirrors/o__r/objects/pack/pack-*.rev",
        "mirrors/o__r/objects/pack/multi-pack-index", "mirrors/o__r/objects/info/commit-graphs/*.graph",
        "mirrors/o__r/packed-refs", "mirrors/o__r/HEAD", "mirrors/o__r/config",
        "templates/o__r/trees/*/manifest", "templates/o__r/packs/**/*.pack", "templates/o__r/trees/*/layer.json",
    )  # fmt: skip
    return [pattern for pattern in patterns if any(lab.state.glob(pattern))]


def bad_file(lab: Lab, name: str, seed: random.Random) -> Row:
    """All reads of one file give EIO; nothing but an error of ours comes of it, and nothing when the disk is well again."""
    lab.maintain()
    file = seed.choice(sorted(lab.state.glob(name)))
    said: dict[str, str] = {}
    with traced(lab, "-P", str(file), "-e", f"inject={','.join(READS)}:error=EIO") as log:
        for what, work in (("audit", _audit), ("sync", Lab.sync), ("checkout", _new_checkout)):
            try:
                said[what] = work(lab) or "went on"
            except Refused as refused:
                assert not refused.is_bug, f"{what}: a failing disk is not a bug: {refused}"
                said[what] = refused.code
    met = "INJECTED" in log.read_text(errors="replace")
    did = ", ".join(f"{what}: {answer}" for what, answer in said.items())
    return Row(
        "EIO from a file", "audit, sync, checkout", f"`{name}`", did if met else f"{NOT_MET}; {did}"
    )


def _audit(lab: Lab) -> str:
    audit = lab.finish(lab.call("POST", "audits", {"level": "content", "heal": False}))
    return "findings" if audit["findings"] else "clean"


def _new_checkout(lab: Lab) -> None:
    lab.release(lab.checkout(lab.commits[8 + lab.number() % 12], "overlay")["id"])
