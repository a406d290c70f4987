"""Killing: the daemon at every step of every operation, and its gits and workers one at a time.

The steps of an operation are those that a run of it without a fault showed. The daemon is killed by the thread that sees the
step, so what is on disk is that step and at most a few system calls more.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from .judge import no_process_left, nothing_left
from .lab import Background, Lab, Refused, laboratory
from .operation import Operation
from .operations import OPERATIONS
from .plan import Part, Plan
from .report import Row
from .series import Strike, end_of, in_series, must_mend_itself
from .tripwire import Tripwire

_TRIES = 10  # a name in a directory that was made just before can be missed
_OFTEN = 6  # of a step that comes again and again, so many are struck
_ANY_MOMENT = 4
NOT_HIT = f"not hit in {_TRIES} runs"
_DAEMON = "kill -9 of the daemon"


def parts() -> Iterator[Part]:
    """Two for each operation: its steps, and what has no name."""
    for kind in OPERATIONS:
        yield Part(f"{kind.name}: killed at a step", lambda plan, kind=kind: _at_steps(kind, plan))  # type: ignore[misc]
        yield Part(f"{kind.name}: killed anywhere", lambda plan, kind=kind: _anywhere(kind, plan))  # type: ignore[misc]


def _at_steps(kind: type[Operation], plan: Plan) -> Iterator[Row]:
    seed = plan.choices(f"{kind.name}: killed at a step")
    with laboratory() as lab:
        steps = steps_of(lab, kind)
    strikes = [
        Strike(_DAEMON, kind.name, step, partial(kill_at, kind=kind, step=step, count=count))
        for step, count in steps
    ]
    yield from in_series(strike for strike in strikes if seed.random() < plan.share)


def _anywhere(kind: type[Operation], plan: Plan) -> Iterator[Row]:
    """Its children, each kind once, and the daemon at moments of the time that a run takes."""
    seed = plan.choices(f"{kind.name}: killed anywhere")
    with laboratory() as lab:
        children, took_s = children_of(lab, kind)
    delays = [seed.uniform(0, took_s) for _ in range(_ANY_MOMENT)]
    strikes = [
        *(
            Strike(
                _fault_of(child),
                kind.name,
                f"`{child}`",
                partial(kill_child, kind=kind, victim=child, seed=seed),
            )
            for child in children
        ),
        *(
            Strike(_DAEMON, kind.name, "any moment", partial(kill_after, kind=kind, delay_s=delay))
            for delay in delays
        ),
    ]
    yield from in_series(strike for strike in strikes if seed.random() < plan.share)


def steps_of(lab: Lab, kind: type[Operation]) -> list[tuple[str, int]]:
    """Every step of an operation, as a run of it shows them, each with its number among those of the same name."""
    first = kind(lab)
    first.run()  # what only the first of its kind does is not a step that can be struck again
    first.clean()
    operation = kind(lab)
    seen: list[tuple[str, int]] = []
    with Tripwire(lab.state, lambda step, count: seen.append((step, count))):
        operation.run()
        nothing_left(lab)  # what goes on in the background is part of it
    operation.clean()
    return [
        (step, count)
        for step, count in seen
        if count == 1 or ("catalog" in step and count <= _OFTEN)
    ]


def kill_at(lab: Lab, kind: type[Operation], step: str, count: int = 1) -> Row:
    """Kill the daemon when it reaches a step, start it again, and judge."""
    for _ in range(_TRIES):
        operation = kind(lab)
        struck = threading.Event()

        def strike(seen: str, number: int, struck: threading.Event = struck) -> None:
            if (seen, number) == (step, count) and not struck.is_set():
                lab.kill()
                struck.set()

        with Tripwire(lab.state, strike):
            family = _strike_while(lab, operation, struck.is_set)
        if struck.is_set():
            where = step if count == 1 else f"{step} ({count})"
            return _after_kill(lab, operation, where, family)
        operation.settle()
        operation.clean()
    return Row(_DAEMON, kind.name, step, NOT_HIT, times=0)


def kill_after(lab: Lab, kind: type[Operation], delay_s: float) -> Row:
    """Kill the daemon some time after the operation began."""
    operation = kind(lab)
    began = time.monotonic()
    family = _strike_while(lab, operation, lambda: time.monotonic() - began >= delay_s)
    lab.kill()
    return _after_kill(lab, operation, "any moment", family)


def _strike_while(lab: Lab, operation: Operation, is_struck: Callable[[], bool]) -> set[int]:
    """Run the operation until something struck, or it ended and settled; answers the processes that were seen below it."""
    work = Background(operation.run)
    family: set[int] = set()
    quiet = 0.0
    while not is_struck() and quiet < 0.4:
        family |= set(descendants(lab.daemon.pid))
        quiet = 0.0 if work.is_running else quiet + 0.003
        time.sleep(0.003)
    work.join() if is_struck() else None
    return family


def _after_kill(lab: Lab, operation: Operation, where: str, family: set[int]) -> Row:
    """Start again and see what is left."""
    log_before = len(lab.daemon.log)
    lab.wait_for_end()
    operation.look()
    lab.restart()
    no_process_left(family)
    outcome = end_of(lab, operation)
    assert outcome in operation.after_kill, outcome
    return Row(_DAEMON, operation.name, where, f"{outcome}{_told(lab.daemon.log[log_before:])}")


def _told(log: str) -> str:
    """What the start says it cleaned up."""
    told = {
        "quarantine.cleaned": "quarantine emptied",
        "stale_file.removed": "locks and temporary files removed",
        "transaction.recovered": "the ref transaction finished",
        "mirror.adopted": "the mirror adopted",
        "leftovers.removed": "a half-built store removed",
    }
    found = [text for event, text in told.items() if event in log]
    return "; " + ", ".join(found) if found else ""


# -- its children -------------------------------------------------------------------------------------------------------


def descendants(pid: int) -> Iterator[int]:
    """The processes below one."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [
            int(child) for thread in threads for child in (thread / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield child
        yield from descendants(child)


def kind_of(pid: int) -> str:
    """What a child is: `worker`, the `fork server` of those, or the git command it runs."""
    words = _command(pid)
    if _is_forkserver(words):
        return "worker" if _is_forkserver(_command(_parent(pid))) else "fork server"
    if not words or Path(words[0]).name not in {"git", "git-upload-pack"}:
        return ""
    plain = [
        word
        for word in words[1:]
        if word and not word.startswith("-") and "=" not in word and "/" not in word
    ]
    return f"git {plain[0]}" if plain else Path(words[0]).name


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _is_at_work(pid: int) -> bool:
    """Rather than waiting for some."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"R", "D"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_forkserver(words: list[str]) -> bool:
    """So are the workers called that it forks."""
    return any("mirrord.workers.forkserver" in word for word in words)


def children_of(lab: Lab, kind: type[Operation]) -> tuple[list[str], float]:
    """The kinds of children that an operation has, and how long it takes."""
    operation = kind(lab)
    began = time.monotonic()
    work = Background(operation.run)
    seen: set[str] = set()
    while work.is_running:
        seen |= {kind_of(pid) for pid in descendants(lab.daemon.pid)}
    took_s = time.monotonic() - began
    operation.settle()
    operation.clean()
    return sorted(seen - {"", "git"}), took_s


def kill_child(lab: Lab, kind: type[Operation], victim: str, seed: random.Random) -> Row:
    """Kill one child of a kind, some time after it began; the daemon stays, and the operation ends well or with an error."""
    for _ in range(_TRIES):
        operation = kind(lab)
        pid = lab.daemon.pid
        work = Background(operation.run)
        struck = _kill_first(pid, victim, work, seed.choice((0.0, 0.002, 0.01)))
        work.join()
        assert lab.is_up or operation.may_end_daemon, "the daemon died with its child"
        if struck:
            if not lab.is_up:
                lab.restart()
            assert work.error is None or isinstance(work.error, Refused), (
                f"not one of our errors: {work.error!r}"
            )
            said = f"answered {work.error.code}" if isinstance(work.error, Refused) else "went on"
            if victim in {"worker", "fork server"}:
                _next_call(lab, operation)
            must_mend_itself(lab, operation)
            return Row(
                _fault_of(victim), kind.name, f"`{victim}`", f"{said}; {end_of(lab, operation)}"
            )
        operation.settle()
        operation.clean()
    return Row(_fault_of(victim), kind.name, f"`{victim}`", NOT_HIT, times=0)


def _next_call(lab: Lab, operation: Operation) -> None:
    """An idle worker that was killed may cost the next call instead, which then says so: an audit tells what it left."""
    audit = lab.finish(lab.call("POST", "audits", {"level": "quick", "heal": False}))
    told = {finding["mirror"] for finding in audit["findings"]}
    if operation.is_sound(operation.outcome()):
        assert told <= set(audit["left"]), f"false alarm: {audit['findings'][:2]}"


def _fault_of(victim: str) -> str:
    return f"kill -9 of a {'git' if victim.startswith('git') else victim}"


def _kill_first(daemon: int, victim: str, work: Background, delay_s: float) -> bool:
    while work.is_running:
        for pid in descendants(daemon):
            if kind_of(pid) == victim and (victim != "worker" or _is_at_work(pid)):
                time.sleep(delay_s)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return True
    return False
