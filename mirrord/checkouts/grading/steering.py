"""What in an agent's change could steer the tests, and the change that is left of it. Pure.

Paths of the test patch are the tests' whatever the agent did there, or above or below them. Of the
rest the policy of a rule's kind decides. Nothing is dropped by halves: what stands in the way of a
path that goes back to the base, a file in the place of its directory, goes too.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from ...errors import SteeringRefusedError
from ...model import Policy, SteeringKind
from ...protocol import Steering
from ..files.reader import parents
from ..patches.fit import Change
from .conditions import CONDITIONS, Look
from .rules import Rule, RuleBook

NAMED = 100
"""Findings of one rule in an answer; the rest is counted."""

Action = Literal["applied", "dropped", "restored", "left", "refused"]
_ACTIONS: dict[Policy, Action] = {
    Policy.REPORT: "applied",
    Policy.DROP: "dropped",
    Policy.REFUSE: "refused",
}


class Policies(NamedTuple):
    """What to do, by kind: as the request asks, else as an own rule says, else as configured."""

    default: Policy
    kinds: Mapping[SteeringKind, Policy]
    asked: Policy | None = None
    asked_kinds: Mapping[SteeringKind, Policy] = {}

    @property
    def text(self) -> str:
        """As a request spells them; own rules may have others."""
        general = self.asked or self.default
        kinds = {kind: self.asked or policy for kind, policy in self.kinds.items()}
        kinds |= self.asked_kinds
        special = (
            f"{kind}={kinds[kind]}" for kind in SteeringKind if kinds.get(kind, general) != general
        )
        return ",".join([general, *special])

    def of(self, rule: Rule) -> Policy:
        return (
            self.asked_kinds.get(rule.kind)
            or self.asked
            or rule.policy
            or self.kinds.get(rule.kind)
            or self.default
        )


class Sifted(NamedTuple):
    """The agent's change without what is dropped, and all that was noticed in it."""

    changes: list[Change]
    dropped: list[bytes]
    steering: list[Steering]


def sift(look: Look, book: RuleBook, policies: Policies, left: Iterable[Steering] = ()) -> Sifted:
    """Raises SteeringRefusedError where a policy refuses, naming everything that was noticed.

    `left` is what was noticed outside of the change.
    """
    steering: list[Steering] = []
    gone: set[bytes] = set()
    tests = _Places(change.path for change in look.tests.changes)
    for path, change in look.changes.items():
        if path in tests.paths or tests.are_hindered_by(change):
            steering.append(noted(book.named("test-patch-path"), path, "restored"))
            gone.add(path)
            continue
        findings = list(iter_findings(book, change, look))
        actions = {_ACTIONS[policies.of(rule)] for rule, _ in findings}
        if "dropped" in actions:
            gone.add(path)
        for rule, detail in findings:
            action = _ACTIONS[policies.of(rule)]
            action = "dropped" if action == "applied" and path in gone else action
            steering.append(noted(rule, path, action, detail))
    back = _Places(path for path in gone if look.changes[path].old is not None)
    for path, change in look.changes.items():
        if path not in gone and back.are_hindered_by(change):
            steering.append(noted(book.named("displaced"), path, "dropped"))
            gone.add(path)
    steering = sorted([*steering, *left], key=lambda found: book.place(found.rule))
    if refused := [found for found in steering if found.action == "refused"]:
        raise _refusal(refused, cut(steering, NAMED))
    kept = [change for path, change in look.changes.items() if path not in gone]
    return Sifted(kept, sorted(gone), cut(steering, NAMED))


class _Places:
    """Paths that the tree has to have room for."""

    def __init__(self, paths: Iterable[bytes]) -> None:
        self.paths = set(paths)
        self._above = {above for path in self.paths for above in parents(path)}

    def are_hindered_by(self, change: Change) -> bool:
        """Whether it puts a file where one of them needs a directory, or the reverse."""
        if change.mode is None or not self.paths:
            return False
        return change.path in self._above or not self.paths.isdisjoint(parents(change.path))


def iter_findings(book: RuleBook, change: Change, look: Look) -> Iterator[tuple[Rule, str]]:
    """The rules that hold for a change, with a detail each."""
    for rule in book.matching(change.path):
        if not rule.when:
            yield rule, "removed" if change.mode is None else ""
            continue
        name, *words = rule.when
        detail = CONDITIONS[name](change, look, *words)
        if detail is not None:
            yield rule, detail


def noted(rule: Rule, path: bytes, action: Action, detail: str = "") -> Steering:
    name = printable(path)
    return Steering(rule=rule.name, kind=rule.kind, path=name, action=action, detail=detail)


def printable(path: bytes) -> str:
    return path.decode(errors="backslashreplace")


def cut(steering: Iterable[Steering], most: int) -> list[Steering]:
    """At most so many findings of one rule; the last of them has the number of the others."""
    by_rule: dict[str, list[Steering]] = {}
    for each in steering:
        by_rule.setdefault(each.rule, []).append(each)
    for some in by_rule.values():
        if (more := len(some) - most) > 0:
            last = some[most - 1]
            detail = f"{last.detail}, and {more:,} more".removeprefix(", ")
            some[most - 1 :] = [Steering(**{**vars(last), "detail": detail})]
    return [each for some in by_rule.values() for each in some]


def _refusal(refused: list[Steering], steering: list[Steering]) -> SteeringRefusedError:
    names = sorted({f"{found.path} ({found.rule})" for found in refused})
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return SteeringRefusedError(
        f"cannot grade the change: it has what could steer the tests: {', '.join(names[:5])}{more}",
        hint="look at it; `--policy drop` leaves it out, `--policy report` applies it",
        steering=[found.to_json() for found in steering],
    )
