"""The commit graph of a mirror in memory: who is whose ancestor.

Read by git, without its commit-graph file. Where a commit is missing, so that git cannot walk, the graph is put
together from every commit that the object store has. Runs in a worker.
"""

from __future__ import annotations

import re
import tempfile
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of
from ..git.command import GitResult, run_git_sync
from ..git.environment import UNTRUSTING
from ..mirrors.repository import HISTORY, PINS
from ..model import AuditLevel, CommitId, CommitState, FindingKind
from .fsck import Damage
from .object_files import TIMEOUT, Fault
from .ref_files import Names

_PARENT = re.compile(rb"^parent ([0-9a-f]{40})$", re.MULTILINE)

Graph = dict[str, tuple[str, ...]]
"""Commit to parents, for every commit that can be read."""


def read_graph(git_dir: Path, tips: Collection[str]) -> Graph:
    """Every commit that `tips` lead to."""
    try:
        walked = run_git_sync(
            *UNTRUSTING,
            "rev-list",
            "--parents",
            "--stdin",
            git_dir=git_dir,
            stdin=lines_of(sorted(tips)),
            timeout=TIMEOUT,
            doing="walk commits",
        )
    except (CorruptObjectError, GitFailedError):
        return _read_store(git_dir)
    words = (line.split() for line in walked.lines)
    return {oid: tuple(parents) for oid, *parents in words}


def _read_store(git_dir: Path) -> Graph:
    """Every commit in the object store, for a mirror that git cannot walk."""
    # by id: asked for the types of all objects, git (2.39) dies of a pack that is too short to be opened
    listed = _cat_file(
        git_dir, "--batch-all-objects", "--unordered", "--batch-check=%(objectname)"
    ).stdout
    shown = _cat_file(git_dir, "--batch-check=%(objecttype) %(objectname)", stdin=listed)
    pending = deque([[line.split()[1] for line in shown.lines if line.startswith("commit ")]])
    graph: Graph = {}
    while pending:
        some = pending.popleft()
        try:
            graph |= _read_commits(git_dir, some)
        except (CorruptObjectError, GitFailedError):
            middle = len(some) // 2
            pending.extend([some[:middle], some[middle:]] if middle else [])
    return graph


def _cat_file(git_dir: Path, *options: str, stdin: bytes | None = None) -> GitResult:
    return run_git_sync(
        *UNTRUSTING,
        "cat-file",
        "--buffer",
        *options,
        git_dir=git_dir,
        stdin=stdin,
        timeout=TIMEOUT,
        doing="read objects",
    )


def _read_commits(git_dir: Path, oids: Collection[str]) -> Graph:
    output = _cat_file(git_dir, "--batch", stdin=lines_of(oids)).stdout
    graph: Graph = {}
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        words = output[at:end].split()
        at = end + 1
        if len(words) == 3:
            header = output[at : at + int(words[2])].partition(b"\n\n")[0]
            graph[words[0].decode()] = tuple(parent.decode() for parent in _PARENT.findall(header))
            at += int(words[2]) + 1
    return graph


def oldest_first(graph: Graph, commits: Collection[str]) -> list[str]:
    """`commits` in an order in which no commit comes before its ancestor."""
    children: dict[str, list[str]] = {}
    waiting: dict[str, int] = {}
    for oid, parents in graph.items():
        known = [parent for parent in parents if parent in graph]
        waiting[oid] = len(known)
        for parent in known:
            children.setdefault(parent, []).append(oid)
    ready = deque(oid for oid, count in waiting.items() if not count)
    position: dict[str, int] = {}
    while ready:
        oid = ready.popleft()
        position[oid] = len(position)
        for child in children.get(oid, ()):
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    return sorted(commits, key=lambda oid: (position.get(oid, -1), oid))


def ancestors(graph: Graph, tips: Iterable[str], *, seen: set[str] | None = None) -> set[str]:
    """`tips` and all they lead to; adds to `seen` and does not go where that was."""
    seen = set() if seen is None else seen
    pending = [tip for tip in tips if tip not in seen]
    while pending:
        oid = pending.pop()
        if oid not in seen:
            seen.add(oid)
            pending.extend(graph.get(oid, ()))
    return seen


def first_absent_ancestor(graph: Graph, commits: Collection[str]) -> dict[str, str]:
    """For each of `commits` that leads to a commit which is not in the graph: that one."""
    absent = {
        parent: parent for parents in graph.values() for parent in parents if parent not in graph
    }
    if not absent:
        return {}
    for oid in oldest_first(graph, graph.keys()):
        blamed = next((absent[parent] for parent in graph[oid] if parent in absent), None)
        if blamed:
            absent[oid] = blamed
    return {oid: absent[oid] for oid in commits if oid in absent and oid in graph}


class Known(NamedTuple):
    oid: str
    kind: str


@dataclass(frozen=True, slots=True)
class Answers:
    """`objects` by the name asked for, without those that lead nowhere; `text` is the blob's, None where it cannot be read."""

    objects: dict[str, Known]
    text: bytes | None = None


def ask(git_dir: Path, names: Collection[str], *, blob: str | None = None) -> Answers:
    """Look up `names`, which are object ids or lead on from one (`ID^{tree}`), and read `blob`, all with one process."""
    asked = sorted(set(names))
    lines = [f"info {name}" for name in asked] + ([f"contents {blob}"] if blob else [])
    if not lines:
        return Answers({})
    done = run_git_sync(
        *UNTRUSTING, "cat-file", "--batch-command", "--buffer",
        git_dir=git_dir, stdin=lines_of(lines), ok=range(256), timeout=TIMEOUT, doing="look up objects",
    )  # fmt: skip
    if done.status and len(lines) > 1:
        return _ask_by_halves(git_dir, asked, blob)
    if done.status:
        return Answers({})
    return _answers(asked, done.stdout, blob is not None)


def _ask_by_halves(git_dir: Path, asked: list[str], blob: str | None) -> Answers:
    middle = len(asked) // 2
    if blob is not None:
        return Answers(ask(git_dir, asked).objects, ask(git_dir, (), blob=blob).text)
    return Answers(ask(git_dir, asked[:middle]).objects | ask(git_dir, asked[middle:]).objects)


def _answers(asked: list[str], output: bytes, has_blob: bool) -> Answers:
    at = 0
    objects: dict[str, Known] = {}
    for name in asked:
        end = output.index(b"\n", at)
        words = output[at:end].decode("utf-8", "surrogateescape").split(" ")
        at = end + 1
        if len(words) == 3 and words[2].isdigit():  # else it says "missing"
            objects[name] = Known(words[0], words[1])
    if not has_blob:
        return Answers(objects)
    head, _, text = output[at:].partition(b"\n")
    return Answers(objects, text[:-1] if head.split()[1:2] == [b"blob"] else None)


# -- names that lead on -----------------------------------------------------------------------------------------------


def peeled(oid: str) -> str:
    """How git is asked for the commit that an object leads to."""
    return f"{oid}^{{commit}}"


def tree_of(oid: str) -> str:
    """How git is asked for the tree of a commit."""
    return f"{oid}^{{tree}}"


def peel(refs: Mapping[str, str], known: Mapping[str, Known]) -> dict[str, str]:
    """Every ref to the commit it names, through its tag objects; those that name none are left out."""
    return {ref: known[name].oid for ref, oid in refs.items() if (name := peeled(oid)) in known}


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


_MOST_TIPS = 2000


@dataclass(frozen=True, slots=True)
class Missing:
    """`commits` may hold tips of unknown kind. `whole` are commits whose ancestors are all there, the latest ones."""

    commits: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    whole: tuple[str, ...] = ()

    @property
    def all(self) -> frozenset[str]:
        return self.commits | self.others

    def __bool__(self) -> bool:
        return bool(self.commits or self.others)


def find_missing(repository: Path, tips: Collection[str]) -> Missing:
    """What is missing of the closures of `tips`, as far as what is there tells."""
    kinds = kinds_of(repository, tips)
    lost, kinds = _follow_tags(repository, kinds)
    if not lost and _is_whole(repository, kinds):
        return Missing()
    commits = [oid for oid, kind in kinds.items() if kind == "commit"]
    graph = read_graph(repository, commits)
    reached = ancestors(graph, commits)
    present = reached & graph.keys()
    others = _walk_trees(
        repository, [*present, *(oid for oid, kind in kinds.items() if kind in {"tree", "blob"})]
    )
    absent = lost | (reached - present)
    return Missing(frozenset(absent), frozenset(others), _latest_whole(graph, present))


def _follow_tags(repository: Path, kinds: Mapping[str, str]) -> tuple[set[str], dict[str, str]]:
    """Absent objects among the tips or at the end of tag objects, and all the others by kind."""
    lost: set[str] = set()
    known: dict[str, str] = {}
    pending = dict(kinds)
    while pending:
        lost |= {oid for oid, kind in pending.items() if not kind}
        known |= {oid: kind for oid, kind in pending.items() if kind}
        targets = set(_targets(repository, [oid for oid, kind in pending.items() if kind == "tag"]))
        pending = kinds_of(repository, targets - known.keys() - lost) if targets else {}
    return lost, known


def _targets(repository: Path, tags: Collection[str]) -> Iterator[str]:
    if not tags:
        return
    output = run_git_sync(
        "cat-file",
        "--batch",
        git_dir=repository,
        stdin=lines_of(tags),
        timeout=TIMEOUT,
        doing="read tags",
    ).stdout
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        size = int(output[at:end].split()[2])
        yield output[end + 8 : end + 48].decode("ascii", "replace")  # after "object "
        at = end + size + 2


def _is_whole(repository: Path, kinds: Mapping[str, str]) -> bool:
    try:
        run_git_sync(
            "rev-list", "--objects", "--quiet", "--stdin", git_dir=repository, stdin=lines_of(kinds), timeout=TIMEOUT,
            doing="walk closures",
        )  # fmt: skip
    except (CorruptObjectError, GitFailedError):
        return False
    return True


def _walk_trees(repository: Path, starts: Collection[str]) -> set[str]:
    """Missing trees and blobs of all `starts`, parents of commits not followed."""
    shown = run_git_sync(
        "rev-list", "--objects", "--no-object-names", "--missing=print", "--no-walk", "--stdin",
        git_dir=repository,
        stdin=lines_of(starts),
        timeout=TIMEOUT,
        doing="walk trees",
    )  # fmt: skip
    return {line[1:] for line in shown.lines if line.startswith("?")}


def _latest_whole(graph: Graph, present: Collection[str]) -> tuple[str, ...]:
    broken = first_absent_ancestor(graph, present)
    sound = [oid for oid in present if oid not in broken]
    parents = {parent for oid in sound for parent in graph[oid]}
    return tuple(sorted(oid for oid in sound if oid not in parents))[:_MOST_TIPS]


def incomplete_refs(
    repository: Path, names: Names, level: AuditLevel, proven: Collection[str]
) -> dict[str, Fault]:
    """A fault for the first ref whose objects are not all there: of the ref history, and at level `content` of all refs.

    Nothing is walked behind `proven`, commits that are whole. One fault is enough for a heal, which looks at all of them.
    """
    kinds = kinds_of(repository, names.refs.values())
    there = {ref: oid for ref, oid in sorted(names.refs.items()) if kinds[oid] and PINS not in ref}
    found = {}
    for refs in (
        [HISTORY],
        [ref for ref in there if ref != HISTORY] if level is AuditLevel.CONTENT else [],
    ):
        tips = {ref: there[ref] for ref in refs if ref in there}
        if reason := _hole(repository, tips.values(), proven):
            first = _first_with_a_hole(repository, tips, proven)
            reason = f"not all that it reaches is here: {reason}"
            found[first] = Fault(FindingKind.REF_INCOMPLETE, reason)
    return found


def _hole(repository: Path, tips: Iterable[str], proven: Iterable[str]) -> str | None:
    """What git says where something is missing behind `tips`."""
    wanted = sorted(set(tips))
    if not wanted:
        return None
    revisions = [*wanted, *(f"^{oid}" for oid in proven)]
    walk = ("rev-list", "--objects", "--quiet", "--stdin")
    try:
        run_git_sync(
            *UNTRUSTING,
            *walk,
            git_dir=repository,
            stdin=lines_of(revisions),
            timeout=TIMEOUT,
            doing="walk what refs reach",
        )
    except (CorruptObjectError, GitFailedError) as error:
        return error.message.removeprefix("cannot walk what refs reach: ")
    return None


def _first_with_a_hole(repository: Path, tips: Mapping[str, str], proven: Collection[str]) -> str:
    refs = list(tips)
    while len(refs) > 1:
        half = refs[: len(refs) // 2]
        refs = half if _hole(repository, [tips[ref] for ref in half], proven) else refs[len(half) :]
    return refs[0]


def kinds_of(repository: Path, oids: Iterable[str]) -> dict[str, str]:
    """The type of each object; empty where it is not there, or git cannot tell."""
    known = ask(repository, asked := set(oids)).objects
    return {oid: known[oid].kind if oid in known else "" for oid in asked}
