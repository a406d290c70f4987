"""Find missing objects of a repository, and the commits and refs that reach them.

git reads without commit-graph and multi-pack index, which can hide missing objects. One walk proves
all commits. Where it fails, the oldest failing commit is bisected, so the number of git processes
grows with the damage, not with the commits. Reads only, in a worker.
"""

import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import lines_of
from ..mirrors.repository import HISTORY, PINS
from ..model import AuditLevel, CommitId, CommitState, FindingKind
from .damage import Damage
from .defects import Defect
from .graph import ancestors, first_absent_ancestor, oldest_first, read_graph
from .reading import OBJECT_ID, look_up, object_kinds, read_objects, run_git


class CommitVerdict(NamedTuple):
    """The state of a commit, with examples of the `objects` that it lacks."""

    state: CommitState
    objects: tuple[str, ...] = ()
    detail: str = ""


def judge_closures(
    git_dir: Path, commits: Sequence[CommitId], damage: Damage
) -> dict[CommitId, CommitVerdict]:
    """Judge the `commits` whose closures are not whole; others get no verdict."""
    verdicts: dict[CommitId, CommitVerdict] = {}
    proven: list[str] = []  # never walked again
    if not commits or _probe(git_dir, commits, proven, damage) is None:
        return verdicts
    graph = read_graph(git_dir, commits)
    for oid, absent in first_absent_ancestor(graph, commits).items():
        detail = f"commit {absent}, an ancestor, is missing"
        verdicts[CommitId(oid)] = CommitVerdict(CommitState.INCOMPLETE, (absent,), detail)
    remaining = oldest_first(graph, [oid for oid in commits if oid not in verdicts])
    while remaining and _probe(git_dir, remaining, proven, damage) is not None:
        good, bad = 0, len(remaining)  # bisect to the first that fails
        while bad - good > 1:
            middle = (good + bad) // 2
            if _probe(git_dir, remaining[good:middle], proven, damage) is None:
                proven += remaining[good:middle]
                good = middle
            else:
                bad = middle
        culprit = remaining[good]
        verdict = _probe(git_dir, [culprit], proven, damage) or CommitVerdict(
            CommitState.INCOMPLETE
        )
        failing = {culprit}  # and its descendants
        for oid in oldest_first(graph, graph.keys()):
            if any(parent in failing for parent in graph[oid]):
                failing.add(oid)
        verdicts |= {CommitId(oid): verdict for oid in failing.intersection(remaining)}
        remaining = [oid for oid in remaining if oid not in verdicts and oid not in proven]
    return verdicts


def _probe(
    git_dir: Path, commits: Sequence[str], proven: Sequence[str], damage: Damage
) -> CommitVerdict | None:
    """Walk the closures of `commits`, except those of `proven`; None when they are whole."""
    with tempfile.NamedTemporaryFile(prefix="mirrord-audit-") as listing:
        path = Path(listing.name if damage.objects else "/dev/null")
        try:
            _walk(git_dir, commits, proven, "--no-object-names", stdout_path=path)
        except (CorruptObjectError, GitFailedError) as error:
            # corrupt if git names an object that exists, else incomplete
            named = tuple(dict.fromkeys(OBJECT_ID.findall(error.message)))[:10]
            signs = r"is corrupt|inflate|mismatch"
            is_corrupt = look_up(git_dir, named) or re.search(signs, error.message)
            state = CommitState.CORRUPT if is_corrupt else CommitState.INCOMPLETE
            return CommitVerdict(state, named, error.message)
        hit = sorted(damage.objects.intersection(listing.read().decode().split("\n")))
    if not hit:
        return None
    return CommitVerdict(CommitState.CORRUPT, tuple(hit[:10]), f"{len(hit)} damaged objects")


def find_hole(git_dir: Path, tips: Iterable[str], proven: Iterable[str] = ()) -> str | None:
    """Return git's message if an object is missing behind `tips`, but not behind `proven`."""
    wanted = sorted(set(tips))
    if not wanted:
        return None
    try:
        _walk(git_dir, wanted, proven, "--quiet")
    except (CorruptObjectError, GitFailedError) as error:
        return error.message.partition(": ")[2]
    return None


def _walk(
    git_dir: Path, tips: Iterable[str], proven: Iterable[str], *options: str, **more: Any
) -> None:
    names = lines_of([*tips, *(f"^{oid}" for oid in proven)])
    command = ("rev-list", "--objects", *options, "--stdin")
    run_git(git_dir, "walk closures", *command, stdin=names, **more)


def incomplete_refs(
    git_dir: Path, refs: Mapping[str, str], level: AuditLevel, proven: Collection[str]
) -> dict[str, Defect]:
    """Find the first ref that reaches a missing object: the ref history, at `content` any ref.

    `proven` are whole commits. One ref is enough, because a heal looks at all refs.
    """
    kinds = object_kinds(git_dir, refs.values())
    present = {ref: oid for ref, oid in sorted(refs.items()) if kinds[oid] and PINS not in ref}
    others = [ref for ref in present if ref != HISTORY] if level is AuditLevel.CONTENT else []
    incomplete = {}
    for suspects in ([HISTORY] if HISTORY in present else [], others):
        if reason := find_hole(git_dir, [present[ref] for ref in suspects], proven):
            while len(suspects) > 1:
                half = suspects[: len(suspects) // 2]
                has_hole = find_hole(git_dir, [present[ref] for ref in half], proven)
                suspects = half if has_hole else suspects[len(half) :]
            reason = f"it reaches a missing object: {reason}"
            incomplete[suspects[0]] = Defect(FindingKind.REF_INCOMPLETE, reason)
    return incomplete


class MissingObjects(NamedTuple):
    """Objects that a repository lacks; `commits` may include tips of unknown type.

    `whole` are the latest commits that have all ancestors.
    """

    commits: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    whole: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.commits or self.others)

    @property
    def all(self) -> frozenset[str]:
        return self.commits | self.others


def find_missing(stand_in: Path, tips: Collection[str]) -> MissingObjects:
    """Find the missing objects that existing ones in the closures of `tips` refer to.

    A walk of git (2.39) ends at the first missing commit. Therefore the graph is made from all
    existing commits, and the trees of all of them are walked at once. Objects behind a missing tree
    show once that is restored.
    """
    lost: set[str] = set()
    kinds: dict[str, str] = {}
    pending = object_kinds(stand_in, tips)
    while pending:  # follow tags to their targets
        lost |= {oid for oid, kind in pending.items() if not kind}
        kinds |= {oid: kind for oid, kind in pending.items() if kind}
        tags = [oid for oid, kind in pending.items() if kind == "tag"]
        read = read_objects(stand_in, tags, bisect=False, doing="read tags")
        targets = {tag.data[7:47].decode("ascii", "replace") for tag in read}  # after "object "
        pending = object_kinds(stand_in, targets - kinds.keys() - lost)
    if not lost and find_hole(stand_in, kinds) is None:
        return MissingObjects()
    commits = [oid for oid, kind in kinds.items() if kind == "commit"]
    graph = read_graph(stand_in, commits)
    reached = ancestors(graph, commits)
    present = reached & graph.keys()
    starts = [*present, *(oid for oid, kind in kinds.items() if kind in {"tree", "blob"})]
    # --no-walk: of a missing parent git 2.39 would die, whatever --missing says
    options = ("--objects", "--no-object-names", "--missing=print", "--no-walk", "--stdin")
    walked = run_git(stand_in, "walk trees", "rev-list", *options, stdin=lines_of(starts))
    broken = first_absent_ancestor(graph, present)
    sound = {oid for oid in present if oid not in broken}
    latest = sound - {parent for oid in sound for parent in graph[oid]}
    return MissingObjects(
        frozenset(lost | (reached - present)),
        frozenset(line[1:] for line in walked.lines if line.startswith("?")),
        tuple(sorted(latest)[:2000]),
    )
