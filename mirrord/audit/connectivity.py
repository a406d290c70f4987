"""Find missing and damaged objects of a repository, and the commits and refs that reach them.

git reads without commit-graph and multi-pack index, which can hide missing objects. One walk proves
all commits. Where it fails, the oldest failing commit is bisected, so the number of git processes
grows with the damage, not with the commits. Reads only, in a worker.
"""

import hashlib
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import BatchObject, GitResult, lines_of, read_objects_sync, run_git_sync
from ..git.configuration import UNTRUSTING
from ..git.packs import packs_in
from ..mirrors.repository import HISTORY, PINS
from ..model import AuditLevel, CommitId, CommitState, FindingKind
from .object_files import TIMEOUT, BadFile, Defect, FileKind

OBJECT_ID = re.compile(r"\b[0-9a-f]{40}\b")
_PARENT = re.compile(rb"^parent ([0-9a-f]{40})$", re.MULTILINE)

Graph = dict[str, tuple[str, ...]]
"""Commit to parents, for every commit that can be read."""

read_objects = partial(read_objects_sync, options=UNTRUSTING, timeout=TIMEOUT, bisect=True)


def run_git(git_dir: Path, doing: str, *args: str, **more: Any) -> GitResult:
    """Call `run_git_sync` without the files that can hide missing objects."""
    return run_git_sync(*UNTRUSTING, *args, git_dir=git_dir, timeout=TIMEOUT, doing=doing, **more)


def look_up(
    git_dir: Path, names: Iterable[str], read: Collection[str] = ()
) -> dict[str, BatchObject]:
    """Look up the objects of `names`, and of `read` with their bytes; leave out missing ones."""
    found = read_objects(git_dir, read, info=sorted(set(names)), doing="look up objects")
    return {one.name: one for one in found if one.exists}


def object_kinds(git_dir: Path, oids: Iterable[str]) -> dict[str, str]:
    """Return the type of each object; empty where it is missing or unreadable."""
    found = look_up(git_dir, asked := set(oids))
    return {oid: found[oid].kind if oid in found else "" for oid in asked}


# -- the commit graph ------------------------------------------------------------------------------


def read_graph(git_dir: Path, tips: Collection[str]) -> Graph:
    """Read the commits that `tips` reach; where git cannot walk, all commits of the repository."""
    command = ("rev-list", "--parents", "--stdin")
    try:
        walked = run_git(git_dir, "walk commits", *command, stdin=lines_of(sorted(tips)))
    except (CorruptObjectError, GitFailedError):
        return {commit.oid: parents_in(commit.data) for commit in iter_commits(git_dir)}
    return {oid: tuple(parents) for oid, *parents in map(str.split, walked.lines)}


def iter_commits(git_dir: Path) -> Iterator[BatchObject]:
    """Read every readable commit, reachable or not."""
    doing = "read all commits"
    # ids alone: git (2.39) dies of a pack that is too short when it lists types too
    command = ("cat-file", "--batch-all-objects", "--unordered", "--buffer")
    oids = run_git(git_dir, doing, *command, "--batch-check=%(objectname)").lines
    known = read_objects(git_dir, (), info=oids, bisect=False, doing=doing)
    commits = [one.oid for one in known if one.kind == "commit"]
    return (one for one in read_objects(git_dir, commits, doing=doing) if one.exists)


def parents_in(commit: bytes) -> tuple[str, ...]:
    return tuple(oid.decode() for oid in _PARENT.findall(commit.partition(b"\n\n")[0]))


def oldest_first(graph: Graph, commits: Collection[str]) -> list[str]:
    """Sort `commits` so that each comes after its ancestors."""
    position = {oid: n for n, oid in enumerate(TopologicalSorter(graph).static_order())}
    return sorted(commits, key=lambda oid: (position.get(oid, -1), oid))


def ancestors(graph: Graph, tips: Iterable[str], seen: set[str] | None = None) -> set[str]:
    """Return `tips` and all their ancestors; adds to `seen`, and stops at commits in it."""
    seen = set() if seen is None else seen
    pending = [tip for tip in tips if tip not in seen]
    while pending:
        oid = pending.pop()
        if oid not in seen:
            seen.add(oid)
            pending.extend(graph.get(oid, ()))
    return seen


def first_absent_ancestor(graph: Graph, commits: Collection[str]) -> dict[str, str]:
    """Map those of `commits` that have an ancestor missing from the graph to that ancestor."""
    absent = {oid: oid for parents in graph.values() for oid in parents if oid not in graph}
    for oid in oldest_first(graph, graph.keys()) if absent else ():
        blamed = next((absent[parent] for parent in graph[oid] if parent in absent), None)
        if blamed:
            absent[oid] = blamed
    return {oid: absent[oid] for oid in commits if oid in absent and oid in graph}


# -- damaged objects -------------------------------------------------------------------------------

# Wrong authors, dates and modes, which real histories have. Broken links have no such message id.
_HARMLESS = re.compile(
    r"notice: |(?:error|warning) in (?:commit|tree|tag|blob) [0-9a-f]{40}: [a-z][A-Za-z]+: "
)


class Fsck(NamedTuple):
    """The result of an fsck; `named` are the objects in its complaints."""

    is_sound: bool
    named: set[str]


class Damage(NamedTuple):
    """Objects whose content does not match their ids, and damaged packs with the reason."""

    objects: set[str]
    packs: dict[str, str]


def run_fsck(git_dir: Path) -> Fsck:
    """Hash every object and walk from every ref; again if packs were removed during the first.

    `rev-list --verify-objects` does not do: git 2.39 hashes neither trees nor most commits in it,
    and ends with status 0 after a mismatch.
    """
    packs = git_dir / "objects/pack"
    command = ("fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs")
    for _ in range(2):
        before = set(packs_in(packs, ".pack"))
        done = run_git(git_dir, "fsck", *command, ok=range(256))
        output = f"{done.stderr}\n{done.stdout.decode('utf-8', 'replace')}".splitlines()
        complaints = [line for line in output if line and not _HARMLESS.match(line)]
        # status 1 is a bad object and 4 a bad pack; both may stand for harmless complaints
        is_sound = not done.status & ~(1 | 4) and not complaints
        if is_sound or before <= set(packs_in(packs, ".pack")):
            break
    return Fsck(is_sound, set(OBJECT_ID.findall("\n".join(complaints))))


def find_damage(git_dir: Path, bad_files: Collection[BadFile], named: Collection[str]) -> Damage:
    """Find the damage behind the objects that an fsck named, and behind bad checksums of files.

    Verifies each pack, and reads each suspected object again: git may have a good copy of it.
    """
    packs: dict[str, str] = {}
    for index in packs_in(git_dir / "objects/pack", ".idx"):
        pack = index.with_suffix(".pack")
        try:  # not by `git verify-pack`, which when killed leaves this command running
            run_git_sync(
                "index-pack", "--verify", str(pack),
                git_dir=git_dir, timeout=TIMEOUT, doing=f"verify {index.name}",
            )  # fmt: skip
        except (CorruptObjectError, GitFailedError) as error:
            if index.exists():
                packs[pack.name] = error.message
    loose = {bad.object_id for bad in bad_files if bad.kind is FileKind.LOOSE}
    return Damage(unreadable(git_dir, sorted(loose | set(named))), packs)


def unreadable(git_dir: Path, oids: Collection[str]) -> set[str]:
    """Return those of `oids` that are missing, or whose content does not match."""
    listed = list(oids)
    bad: set[str] = set()
    for at in range(0, len(listed), 1000):  # their bytes are in memory together
        for found in read_objects(git_dir, listed[at : at + 1000], doing="read objects"):
            header = f"{found.kind} {len(found.data)}\0".encode()
            digest = hashlib.sha1(header + found.data, usedforsecurity=False)
            if not found.exists or digest.hexdigest() != found.name:
                bad.add(found.name)
    return bad


# -- commits with an incomplete closure ------------------------------------------------------------


class Verdict(NamedTuple):
    """The state of a commit, with examples of the `objects` that it lacks."""

    state: CommitState
    objects: tuple[str, ...] = ()
    detail: str = ""


def judge_closures(
    git_dir: Path, commits: Sequence[CommitId], damage: Damage
) -> dict[CommitId, Verdict]:
    """Judge the `commits` whose closures are not whole; others get no verdict."""
    verdicts: dict[CommitId, Verdict] = {}
    proven: list[str] = []  # never walked again
    if not commits or _probe(git_dir, commits, proven, damage) is None:
        return verdicts
    graph = read_graph(git_dir, commits)
    for oid, absent in first_absent_ancestor(graph, commits).items():
        detail = f"commit {absent}, an ancestor, is missing"
        verdicts[CommitId(oid)] = Verdict(CommitState.INCOMPLETE, (absent,), detail)
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
        verdict = _probe(git_dir, [culprit], proven, damage) or Verdict(CommitState.INCOMPLETE)
        failing = {culprit}  # and its descendants
        for oid in oldest_first(graph, graph.keys()):
            if any(parent in failing for parent in graph[oid]):
                failing.add(oid)
        verdicts |= {CommitId(oid): verdict for oid in failing.intersection(remaining)}
        remaining = [oid for oid in remaining if oid not in verdicts and oid not in proven]
    return verdicts


def _probe(
    git_dir: Path, commits: Sequence[str], proven: Sequence[str], damage: Damage
) -> Verdict | None:
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
            return Verdict(state, named, error.message)
        hit = sorted(damage.objects.intersection(listing.read().decode().split("\n")))
    if not hit:
        return None
    return Verdict(CommitState.CORRUPT, tuple(hit[:10]), f"{len(hit)} damaged objects")


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
    found = {}
    for suspects in ([HISTORY] if HISTORY in present else [], others):
        if reason := find_hole(git_dir, [present[ref] for ref in suspects], proven):
            while len(suspects) > 1:
                half = suspects[: len(suspects) // 2]
                has_hole = find_hole(git_dir, [present[ref] for ref in half], proven)
                suspects = half if has_hole else suspects[len(half) :]
            reason = f"it reaches a missing object: {reason}"
            found[suspects[0]] = Defect(FindingKind.REF_INCOMPLETE, reason)
    return found


# -- the objects that are missing ------------------------------------------------------------------


class Missing(NamedTuple):
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


def find_missing(stand_in: Path, tips: Collection[str]) -> Missing:
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
        return Missing()
    commits = [oid for oid, kind in kinds.items() if kind == "commit"]
    graph = read_graph(stand_in, commits)
    reached = ancestors(graph, commits)
    present = reached & graph.keys()
    starts = [*present, *(oid for oid, kind in kinds.items() if kind in {"tree", "blob"})]
    options = ("--objects", "--no-object-names", "--missing=print", "--no-walk", "--stdin")
    walked = run_git(stand_in, "walk trees", "rev-list", *options, stdin=lines_of(starts))
    broken = first_absent_ancestor(graph, present)
    sound = {oid for oid in present if oid not in broken}
    latest = sound - {parent for oid in sound for parent in graph[oid]}
    return Missing(
        frozenset(lost | (reached - present)),
        frozenset(line[1:] for line in walked.lines if line.startswith("?")),
        tuple(sorted(latest)[:2000]),
    )
