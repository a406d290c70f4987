"""What needs attention, from the status of the daemon."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..protocol import Mirror, Status
from .output import cell, count, moment, problem_of, styled

# of [checkouts] max: the last tenth is when an operator can still act
_NEARLY_FULL = 0.9


_WARNING = "warning: "


class Attention(NamedTuple):
    """Something that needs attention; `action` is the command to start with."""

    kind: str
    fact: str
    action: str = ""


def problems_of(status: Status) -> Iterator[Attention]:
    """Yield what needs attention, the worst first."""
    reasons = status.health.reasons
    for reason in reasons:
        if not reason.startswith(_WARNING):
            yield Attention("degraded", reason, _action_for(reason))
    yield from _audit_problems(status)
    yield from _mirror_problems(status.mirrors)
    for dataset in status.datasets:
        faults = [(dataset.fault_count, "bad row"), (dataset.unpinned_count, "unpinned commit")]
        if fact := ", ".join(count(number, noun) for number, noun in faults if number):
            show = f"mirrord dataset show {dataset.name}"
            yield Attention("problem", f"dataset {dataset.name}: {fact}", show)
    for job in status.jobs:
        if job.last_error and not job.name.startswith("sync/"):  # a problem of its mirror
            yield Attention(
                "problem", f"job {job.name}: {job.last_error}", "mirrord operation list"
            )
    if status.checkout_count > status.checkout_max * _NEARLY_FULL:
        fact = f"{status.checkout_count:,} of at most {status.checkout_max:,} checkouts are held"
        yield Attention("problem", fact, "mirrord status --watch")
    for reason in reasons:
        if reason.startswith(_WARNING):
            yield Attention("warning", reason)


def _action_for(reason: str) -> str:
    if "nearly full" in reason or "inodes" in reason:
        return "mirrord du; mirrord gc"
    if "can be synced" in reason:
        return "mirrord mirror list"
    if reason.startswith("dataset "):
        return f"mirrord dataset show {reason.split()[1].rstrip(':')}"
    return "journalctl -t mirrord -p warning"


def _audit_problems(status: Status) -> Iterator[Attention]:
    audit = status.last_audit
    if audit is None:
        return
    when = moment(audit.finished_at)
    if audit.affected_count:
        fact = f"{count(audit.affected_count, 'instance')} cannot be served (audit of {when})"
        yield Attention("problem", fact, "mirrord audit; mirrord heal")
    elif audit.open_count:
        fact = f"{count(audit.open_count, 'finding')} of the audit of {when}"
        yield Attention("problem", fact, "mirrord audit")
    if audit.left_count:
        fact = f"the audit of {when} could not check {count(audit.left_count, 'mirror')}"
        yield Attention("problem", fact, "mirrord audit")


# of mirrors with the same problem, in one line
_NAMES_SHOWN = 3


def _mirror_problems(mirrors: Sequence[Mirror]) -> Iterator[Attention]:
    """Yield one for each kind of problem of mirrors."""
    by_problem: dict[str, list[str]] = {}
    for mirror in mirrors:
        if problem := problem_of(mirror):
            by_problem.setdefault(problem, []).append(mirror.name)
    for problem, names in sorted(by_problem.items(), key=lambda item: -len(item[1])):
        more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
        fact = f"{count(len(names), 'mirror')}: {problem}: {', '.join(names[:_NAMES_SHOWN])}{more}"
        yield Attention("problem", fact, f"mirrord mirror show {names[0]}")


# SGR: red and yellow, of every terminal's 16 colours
_COLOURS = {"degraded": "31", "problem": "31", "warning": "33"}


def attention_lines(problems: list[Attention]) -> Iterator[str]:
    for problem in problems:
        kind = styled(f"{problem.kind}:", _COLOURS[problem.kind])
        yield f"{kind} {cell(problem.fact.removeprefix(_WARNING))}"
        if problem.action:
            yield f"  -> {cell(problem.action)}"
