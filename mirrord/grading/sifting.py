"""Sifts an agent's change by the rules: what is dropped, reported, or refuses the grade."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from ..errors import SteeringRefusedError
from ..git.modes import SYMLINK
from ..model import Policy, SteeringKind
from ..patches.fit import Change
from ..protocol import Steering
from ..quoting import decode_name, quote_name
from ..trees.reader import parents
from .conditions import CONDITIONS
from .context import Context
from .names import seen_through
from .rules import Rule, RuleBook

# findings of one rule in an answer; further ones are counted
NAMED = 100

Action = Literal["applied", "dropped", "restored", "left", "refused"]
ACTIONS: dict[Policy, Action] = {
    Policy.REPORT: "applied",
    Policy.DROP: "dropped",
    Policy.REFUSE: "refused",
}


class Policies(NamedTuple):
    """What to do with a finding: the policy of the request, of an own rule, or as configured."""

    default: Policy
    kinds: Mapping[SteeringKind, Policy]
    asked: Policy | None = None
    asked_kinds: Mapping[SteeringKind, Policy] = {}

    @property
    def text(self) -> str:
        """The policies as a request spells them, without those of own rules."""
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


class Drop(NamedTuple):
    """A path to leave out whatever the rules say of it, because of what the environment loads."""

    path: bytes
    rule: str
    detail: str


class Sifted(NamedTuple):
    """The changes that are kept, the paths that are dropped, and all findings."""

    changes: list[Change]
    dropped: list[bytes]
    steering: list[Steering]


def sift(
    context: Context,
    book: RuleBook,
    policies: Policies,
    left: Iterable[Steering] = (),
    drops: Iterable[Drop] = (),
) -> Sifted:
    """Apply rules and policies to a change; `left` are findings outside of it.

    Raises SteeringRefusedError with all findings if a policy refuses one.
    """
    steering: list[Steering] = []
    gone: set[bytes] = set()
    for drop in drops:
        if drop.path in context.changes:
            steering.append(finding(book.named(drop.rule), drop.path, "dropped", drop.detail))
            gone.add(drop.path)
    tests = _PathSet(change.path for change in context.tests.changes)
    for path, change in context.changes.items():
        if path in tests.paths or tests.are_obstructed_by(change):
            steering.append(finding(book.named("test-patch-path"), path, "restored"))
            gone.add(path)
            continue
        findings = list(iter_findings(book, change, context))
        actions = {ACTIONS[policies.of(rule)] for rule, _ in findings}
        if "dropped" in actions:
            gone.add(path)
        for rule, detail in findings:
            action = ACTIONS[policies.of(rule)]
            action = "dropped" if action == "applied" and path in gone else action
            steering.append(finding(rule, path, action, detail))
    back = _PathSet(path for path in gone if context.changes[path].old is not None)
    for path, change in context.changes.items():
        if path not in gone and back.are_obstructed_by(change):
            steering.append(finding(book.named("displaced"), path, "dropped"))
            gone.add(path)
    steering = in_order([*steering, *left], book)
    must_not_refuse(steering)
    kept = [change for path, change in context.changes.items() if path not in gone]
    return Sifted(kept, sorted(gone), steering)


def in_order(steering: Iterable[Steering], book: RuleBook) -> list[Steering]:
    """Return findings in the order of the table, not too many of a rule."""
    return cut(sorted(steering, key=lambda item: book.place(item.rule)), NAMED)


def must_not_refuse(steering: Iterable[Steering]) -> None:
    """Raise SteeringRefusedError with all findings if one is refused."""
    if refused := [item for item in steering if item.action == "refused"]:
        names = sorted({f"{item.path} ({item.rule})" for item in refused})
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise SteeringRefusedError(
            f"cannot grade the change: it could steer the tests: {', '.join(names[:5])}{more}",
            hint="check it; `--policy drop` leaves it out, `--policy report` applies it",
            steering=[item.to_json() for item in steering],
        )


class _PathSet:
    """Paths that the tree must be able to have."""

    def __init__(self, paths: Iterable[bytes]) -> None:
        self.paths = set(paths)
        self._above = {above for path in self.paths for above in parents(path)}

    def are_obstructed_by(self, change: Change) -> bool:
        """Return whether a change has a file where one of them needs a directory, or vice versa."""
        if change.mode is None or not self.paths:
            return False
        return change.path in self._above or not self.paths.isdisjoint(parents(change.path))


def iter_findings(book: RuleBook, change: Change, context: Context) -> Iterator[tuple[Rule, str]]:
    """Iterate over the rules that apply to a change, with details; a rule applies to a link if it
    applies to a file that is seen through it.
    """
    direct = list(_iter_direct(book, change, context))
    yield from direct
    if change.mode != SYMLINK:
        return
    seen = {rule.name for rule, _ in direct}
    for behind in seen_through(change, context):
        for rule, _ in _iter_direct(book, behind, context):
            if rule.name not in seen:
                seen.add(rule.name)
                yield rule, f"a link; shows {quote_name(behind.path)}"


def _iter_direct(book: RuleBook, change: Change, context: Context) -> Iterator[tuple[Rule, str]]:
    for rule in book.matching(change.path):
        if not rule.when:
            yield rule, "removed" if change.mode is None else ""
            continue
        name, *words = rule.when
        detail = CONDITIONS[name](change, context, *words)
        if detail is not None:
            yield rule, detail


def finding(rule: Rule, path: bytes, action: Action, detail: str = "") -> Steering:
    name = decode_name(path)
    return Steering(rule=rule.name, kind=rule.kind, path=name, action=action, detail=detail)


def cut(steering: Iterable[Steering], most: int) -> list[Steering]:
    """Return at most `most` findings of each rule; the last one counts the others."""
    by_rule: dict[str, list[Steering]] = {}
    for item in steering:
        by_rule.setdefault(item.rule, []).append(item)
    for some in by_rule.values():
        if (more := len(some) - most) > 0:
            last = some[most - 1]
            detail = f"{last.detail}, and {more:,} more".removeprefix(", ")
            some[most - 1 :] = [Steering(**{**vars(last), "detail": detail})]
    return [item for some in by_rule.values() for item in some]
