"""Which of many commits do not have their whole closure, and what each of those lacks. Runs in a worker, reads only.

One walk proves all commits at once; only when it fails are they told apart. Closures grow with ancestry, so the oldest commit
that fails is found by halving, what descends from it fails too, and what was proven is never walked again: the number of git
processes grows with the damage, not with the number of commits.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of
from ..git.command import run_git_sync
from ..git.environment import UNTRUSTING
from ..model import CommitId, CommitState
from .content import Damage
from .graph import TIMEOUT, Graph, first_absent_ancestor, oldest_first, read_graph
from .questions import ask

_OID = re.compile(r"\b[0-9a-f]{40}\b")
_EXAMPLES = 10
_CORRUPT_SIGNS = re.compile(r"is corrupt|inflate|mismatch")


@dataclass(frozen=True, slots=True)
class Verdict:
    state: CommitState
    objects: tuple[str, ...] = ()
    detail: str = ""


def are_whole(git_dir: Path, commits: Collection[str]) -> bool:
    """Whether one walk finds every object that `commits` reach."""
    if not commits:
        return True
    try:
        _walk(git_dir, sorted(commits), "--quiet")
    except (CorruptObjectError, GitFailedError):
        return False
    return True


class Closures:
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
            remaining = [
                oid for oid in remaining if oid not in self._verdicts and oid not in self._proven
            ]
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
                _walk(
                    self._git_dir,
                    revisions,
                    listing=Path(listing.name) if self._damage.objects else Path("/dev/null"),
                )
            except (CorruptObjectError, GitFailedError) as error:
                return _verdict(self._git_dir, error)
            hit = sorted(
                line.decode()
                for line in listing.read().split(b"\n")
                if line.decode() in self._damage.objects
            )
        return (
            Verdict(CommitState.CORRUPT, tuple(hit[:_EXAMPLES]), f"{len(hit)} damaged objects")
            if hit
            else None
        )


def _walk(
    git_dir: Path, revisions: Sequence[str], *options: str, listing: Path | None = None
) -> None:
    run_git_sync(
        *UNTRUSTING, "rev-list", "--objects", "--no-object-names", *options, "--stdin",
        git_dir=git_dir, stdin=lines_of(revisions), stdout_path=listing, timeout=TIMEOUT, doing="walk closures",
    )  # fmt: skip


def _descendants(graph: Graph, culprit: str) -> set[str]:
    found = {culprit}
    for oid in oldest_first(graph, graph.keys()):
        if any(parent in found for parent in graph[oid]):
            found.add(oid)
    return found


def _verdict(git_dir: Path, error: CorruptObjectError | GitFailedError) -> Verdict:
    """Corrupt where git names an object that is there, incomplete where it names one that is not."""
    named = tuple(dict.fromkeys(_OID.findall(error.message)))[:_EXAMPLES]
    there = ask(git_dir, named).objects or _CORRUPT_SIGNS.search(error.message)
    return Verdict(CommitState.CORRUPT if there else CommitState.INCOMPLETE, named, error.message)
