"""Look at one mirror: which of its recorded commits can be served, and what keeps each alive. Runs in a worker, reads only.

One walk proves all commits at once; only when it fails are they told apart. Closures grow with ancestry, so the oldest commit
that fails is found by halving, what descends from it fails too, and what was proven is never walked again: the number of git
processes grows with the damage, not with the number of commits.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..model import AuditLevel, CommitId, CommitState, Reach
from .content import Damage, find_damage, unreadable
from .files import find_bad_files
from .graph import (
    PINS,
    TIMEOUT,
    UNTRUSTING,
    Graph,
    classify,
    first_absent_ancestor,
    lines_of,
    oldest_first,
    peel,
    read_graph,
)
from .lost import lost_refs
from .names import read_names, readable
from .past import incomplete_refs, lost_tips

_OID = re.compile(r"\b[0-9a-f]{40}\b")
_EXAMPLES = 10
_CORRUPT_SIGNS = re.compile(r"is corrupt|inflate|mismatch")


@dataclass(frozen=True, slots=True)
class Verdict:
    state: CommitState
    objects: tuple[str, ...] = ()
    detail: str = ""


@dataclass(slots=True)
class Examined:
    """`faults` are about the mirror itself, by file; a recorded commit need not be hit."""

    verdicts: dict[CommitId, Verdict] = field(default_factory=dict)
    reach: dict[CommitId, Reach] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


def examine(git_dir: Path, commits: Collection[CommitId], level: AuditLevel, pins: Collection[str] = ()) -> Examined:
    """Judge `commits` at `level`, and the mirror itself, which should have `pins`, given as OWNER/COMMIT."""
    names = read_names(git_dir)
    bad_files = find_bad_files(git_dir, level)
    result = Examined(faults={bad.name: bad.reason for bad in [*bad_files, *names.faults]})
    with readable(git_dir, names) as repository:
        damage = find_damage(repository, bad_files) if level is AuditLevel.CONTENT else Damage()
        result.faults = damage.files | result.faults
        _judge(repository, commits, level, damage, names.refs, names.head, result)
        result.faults |= lost_refs(repository, git_dir)
        if level is not AuditLevel.QUICK:
            proven = [oid for oid, verdict in result.verdicts.items() if verdict.state in {CommitState.OK, CommitState.UNPINNED}]
            result.faults = lost_tips(repository, names) | incomplete_refs(repository, names, level, proven) | result.faults
    lost_pins = (f"{PINS}{pin}" for pin in pins if f"{PINS}{pin}" not in names.refs)
    result.faults = dict.fromkeys(lost_pins, "it is gone, and the catalog has it") | result.faults
    return result


def _judge(
    git_dir: Path,
    commits: Collection[CommitId],
    level: AuditLevel,
    damage: Damage,
    names: Mapping[str, str],
    head: str | None,
    result: Examined,
) -> None:
    result.verdicts = _absent(git_dir, commits)
    present = [oid for oid in commits if oid not in result.verdicts]
    if level is not AuditLevel.QUICK:
        result.verdicts |= _Closures(git_dir, present, damage).judge()
    refs = peel(git_dir, names)
    pinned = {ref.rpartition("/")[2] for ref, oid in refs.items() if ref.startswith(PINS) and ref.endswith(oid)}
    for oid in present:
        unpinned = Verdict(CommitState.UNPINNED, detail="no pin keeps it")
        result.verdicts.setdefault(oid, Verdict(CommitState.OK) if oid in pinned else unpinned)
    graph = read_graph(git_dir, set(refs.values()), trusting=level is AuditLevel.QUICK)
    result.reach = classify(graph, refs, head, commits)


def _absent(git_dir: Path, commits: Collection[CommitId]) -> dict[CommitId, Verdict]:
    """Verdicts on the commits that are not there, are no commits, or whose tree is not there."""
    kinds = _kinds(git_dir, commits, "")
    verdicts = {
        oid: Verdict(CommitState.MISSING, (oid,), "the commit is not in the mirror") for oid in commits if kinds[oid] != "commit"
    }
    trees = _kinds(git_dir, [oid for oid in commits if oid not in verdicts], "^{tree}")
    lost = [CommitId(oid) for oid, kind in trees.items() if kind != "tree"]
    damaged = unreadable(git_dir, lost)
    for oid in lost:
        state, detail = (
            (CommitState.CORRUPT, "it is damaged") if oid in damaged else (CommitState.INCOMPLETE, "its tree is missing")
        )
        verdicts[oid] = Verdict(state, (oid,) if oid in damaged else (), detail)
    return verdicts


def _kinds(git_dir: Path, oids: Collection[str], suffix: str) -> dict[str, str]:
    """The type of what each name leads to; empty where it leads nowhere."""
    asked = sorted(oids)
    shown = run_git_sync(
        "cat-file",
        "--batch-check=%(objecttype)",
        git_dir=git_dir,
        stdin=lines_of(f"{oid}{suffix}" for oid in asked),
        ok=(0, 128),
        timeout=TIMEOUT,
        doing="look up commits",
    ).lines
    found = zip(asked, shown, strict=False)
    return dict.fromkeys(asked, "") | {oid: kind for oid, kind in found if " " not in kind}


class _Closures:
    """The search for the commits whose closure is not whole."""

    def __init__(self, git_dir: Path, commits: Sequence[CommitId], damage: Damage) -> None:
        self._git_dir = git_dir
        self._damage = damage
        self._commits = commits
        self._proven: list[str] = []
        self._verdicts: dict[CommitId, Verdict] = {}

    def judge(self) -> dict[CommitId, Verdict]:
        """Verdicts on those that fail; none for the others."""
        if not self._commits or self._probe(self._commits) is None:
            return {}
        graph = read_graph(self._git_dir, self._commits)
        for oid, absent in first_absent_ancestor(graph, self._commits).items():
            self._verdicts[CommitId(oid)] = Verdict(
                CommitState.INCOMPLETE, (absent,), f"commit {absent}, an ancestor, is missing"
            )
        remaining = self._remaining(graph)
        while remaining and self._probe(remaining) is not None:
            self._blame(graph, self._first_failing(remaining), remaining)
            remaining = [oid for oid in remaining if oid not in self._verdicts and oid not in self._proven]
        return self._verdicts

    def _remaining(self, graph: Graph) -> list[str]:
        return oldest_first(graph, [oid for oid in self._commits if oid not in self._verdicts])

    def _first_failing(self, remaining: Sequence[str]) -> str:
        """The first commit, oldest first, whose closure is not whole. All of them together fail."""
        good, bad = 0, len(remaining)
        while bad - good > 1:
            middle = (good + bad) // 2
            if self._probe(remaining[good:middle]) is None:
                self._proven += remaining[good:middle]
                good = middle
            else:
                bad = middle
        return remaining[good]

    def _blame(self, graph: Graph, culprit: str, remaining: Sequence[str]) -> None:
        """Everything that leads to `culprit` fails as it does."""
        verdict = self._probe([culprit]) or Verdict(CommitState.INCOMPLETE)
        for oid in _descendants(graph, culprit).intersection(remaining) | {culprit}:
            self._verdicts[CommitId(oid)] = verdict

    def _probe(self, commits: Sequence[str]) -> Verdict | None:
        """Walk the closures of `commits`, without those that were proven; None when they are whole."""
        revisions = [*commits, *(f"^{oid}" for oid in self._proven)]
        with tempfile.NamedTemporaryFile(prefix="mirrord-audit-") as listing:
            try:
                self._walk(revisions, Path(listing.name) if self._damage.objects else Path("/dev/null"))
            except (CorruptObjectError, GitFailedError) as error:
                return _verdict(self._git_dir, error)
            hit = sorted(line.decode() for line in listing.read().split(b"\n") if line.decode() in self._damage.objects)
        return Verdict(CommitState.CORRUPT, tuple(hit[:_EXAMPLES]), f"{len(hit)} damaged objects") if hit else None

    def _walk(self, revisions: Sequence[str], listing: Path) -> None:
        run_git_sync(
            *UNTRUSTING,
            "rev-list",
            "--objects",
            "--no-object-names",
            "--stdin",
            git_dir=self._git_dir,
            stdin=lines_of(revisions),
            stdout_path=listing,
            timeout=TIMEOUT,
            doing="walk closures",
        )


def _descendants(graph: Graph, culprit: str) -> set[str]:
    found = {culprit}
    for oid in oldest_first(graph, graph.keys()):
        if any(parent in found for parent in graph[oid]):
            found.add(oid)
    return found


def _verdict(git_dir: Path, error: CorruptObjectError | GitFailedError) -> Verdict:
    """Corrupt where git names an object that is there, incomplete where it names one that is not."""
    named = tuple(dict.fromkeys(_OID.findall(error.message)))[:_EXAMPLES]
    there = any(_kinds(git_dir, named, "").values()) or _CORRUPT_SIGNS.search(error.message)
    return Verdict(CommitState.CORRUPT if there else CommitState.INCOMPLETE, named, error.message)
