"""Examine one mirror: the recorded commits that can be served, and the refs that keep them alive.

One long git proves everything: a walk at level `closure`, fsck at level `content`. Files and refs
are read beside it. The search for damage begins only where that git complains. Runs in a worker, on
threads of low priority. Reads only.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..git.batch import BatchObject
from ..host.processes import lower_priority
from ..mirrors.pinrefs import is_pin
from ..mirrors.repository import HISTORY, KEPT, OURS, PINS
from ..model import AuditLevel, CommitId, CommitState, FindingKind, Reach
from ..quoting import encode_name
from . import connectivity
from .blemishes import judge_blemishes
from .connectivity import CommitVerdict
from .damage import Damage, Fsck, find_damage, run_fsck, unreadable
from .defects import BadFile, Defect
from .graph import ancestors, read_graph
from .layout import find_strange
from .lfs import find_bad_objects
from .object_files import find_bad_files, find_lying
from .reading import look_up
from .refs import (
    RefFiles,
    peeled_names,
    read_ref_files,
    recorded_tips,
    unkept,
    wrong_refs,
    wrongly_peeled,
)
from .stand_in import readable


class Reached(NamedTuple):
    """The kind of ref that keeps each commit alive; `lost` are kept refs that should exist.

    `key` identifies the refs and commits; it is empty where the result must not be used again.
    """

    key: str
    by_commit: dict[CommitId, Reach]
    lost: dict[str, Defect]


@dataclass(slots=True)
class Examined:
    """The result of an examination.

    `defects` are those of the mirror itself, by file or ref, whether or not they affect a recorded
    commit. `unknown` are pins that the catalog lacks.
    """

    verdicts: dict[CommitId, CommitVerdict] = field(default_factory=dict)
    reached: Reached = field(default_factory=lambda: Reached("", {}, {}))
    defects: dict[str, Defect] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()

    @property
    def reach(self) -> dict[CommitId, Reach]:
        return self.reached.by_commit


def examine(
    git_dir: Path,
    commits: Collection[CommitId],
    level: AuditLevel,
    pins: Collection[str] = (),
    earlier: Reached | None = None,
    record: str | None = None,
) -> Examined:
    """Judge `commits` at `level`, and the mirror itself.

    The mirror should have `pins`, given as OWNER/COMMIT, and `record` in its ref history. `earlier`
    is the reach that an earlier examination found.
    """
    # for the examination, the one long git, and the files
    with ThreadPoolExecutor(3, initializer=lower_priority) as threads:
        owned = {f"{PINS}{pin}" for pin in pins}
        return threads.submit(
            _examine, git_dir, sorted(commits), level, owned, earlier, record, threads
        ).result()


def _examine(
    git_dir: Path,
    commits: Sequence[CommitId],
    level: AuditLevel,
    pins: set[str],
    earlier: Reached | None,
    record: str | None,
    threads: ThreadPoolExecutor,
) -> Examined:
    files = read_ref_files(git_dir)
    with readable(git_dir, files, list(find_strange(git_dir))) as repository:
        checking = threads.submit(_check_files, git_dir, repository, level)
        history = [files.refs[HISTORY]] if HISTORY in files.refs else []
        proving = threads.submit(_prove, repository, [*commits, *history], level)
        values = set(files.refs.values())
        trees = {f"{oid}^{{tree}}" for oid in commits}
        names = {*commits, *values, *trees, *(f"{oid}^{{commit}}" for oid in values)}
        if level is not AuditLevel.QUICK:
            names.update(peeled_names(files))
        objects = look_up(repository, names, read=files.newest_record)
        refs = {
            ref: objects[peeled].oid
            for ref, oid in files.refs.items()
            if (peeled := f"{oid}^{{commit}}") in objects
        }
        reached = _reach_of(repository, files, refs, commits, earlier, level)
        (bad_files, lying), damage = checking.result(), Damage(set(), {})
        is_whole, fsck = proving.result()
        if fsck and (bad_files or not fsck.is_sound):
            bad_files = find_bad_files(git_dir, level)
            damage = find_damage(repository, bad_files, fsck.named)
        verdicts = _absent(repository, commits, objects)
        doubtful = [oid for oid in commits if oid not in verdicts]
        if is_whole and fsck and not damage.objects:  # fsck proved what refs reach
            doubtful = [oid for oid in doubtful if reached.by_commit[oid] is Reach.NOTHING]
        elif is_whole and not fsck:
            doubtful = []
        verdicts |= connectivity.judge_closures(repository, doubtful, damage)
        whole = [oid for oid in commits if oid not in verdicts]
        lfs = find_bad_objects(git_dir, whole, level)
        wrong = wrong_refs(repository, git_dir, files, objects, record)
        if not is_whole:
            proven = [oid for oid in commits if oid not in verdicts]
            wrong = connectivity.incomplete_refs(repository, files.refs, level, proven) | wrong
    pinned = {oid for ref, oid in refs.items() if ref.startswith(PINS) and ref.endswith(oid)}
    unpinned = CommitVerdict(CommitState.UNPINNED, detail="no pin keeps it")
    for oid in commits:
        verdicts.setdefault(oid, CommitVerdict(CommitState.OK) if oid in pinned else unpinned)
    judged = [*bad_files, *wrongly_peeled(files, objects), *files.bad]
    bad = {one.name: one.defect for one in judged}
    packs = {name: Defect(FindingKind.PACK, reason) for name, reason in damage.packs.items()}
    # pins that only the catalog has; not those whose commit is a finding already
    bad_commits = {oid for oid, verdict in verdicts.items() if verdict.state is not CommitState.OK}
    lost = [ref for ref in pins - files.refs.keys() if ref[-40:] not in bad_commits]
    lost_pin = Defect(FindingKind.PIN_LOST, "it is gone, and the catalog has it")
    refused = judge_blemishes(git_dir, fsck.blemishes, commits) if fsck and is_whole else {}
    of_refs = refused | dict.fromkeys(lost, lost_pin) | reached.lost
    defects = of_refs | packs | lying | lfs | bad | wrong
    unknown = frozenset(ref for ref in files.refs if ref not in pins and is_pin(ref))
    return Examined(verdicts, reached, defects, unknown)


def _check_files(
    git_dir: Path, repository: Path, level: AuditLevel
) -> tuple[list[BadFile], dict[str, Defect]]:
    """Find bad files; at level `content` also derived ones with wrong content.

    Full checksums are only needed after fsck complains, because it hashes every object.
    """
    bad_files = find_bad_files(git_dir, min(level, AuditLevel.CLOSURE, key=list(AuditLevel).index))
    is_deep = level is AuditLevel.CONTENT and not bad_files
    return bad_files, find_lying(repository) if is_deep else {}


def _prove(repository: Path, commits: Sequence[str], level: AuditLevel) -> tuple[bool, Fsck | None]:
    """Check that the closures of `commits` are whole, at level `content` those of all refs."""
    match level:
        case AuditLevel.QUICK:
            return True, None  # it does not walk closures
        case AuditLevel.CLOSURE:
            return connectivity.find_hole(repository, commits) is None, None
        case AuditLevel.CONTENT:
            fsck = run_fsck(repository)
            return fsck.is_sound, fsck


def _absent(
    repository: Path, commits: Sequence[CommitId], objects: Mapping[str, BatchObject]
) -> dict[CommitId, CommitVerdict]:
    """Judge the commits that are missing, are no commits, or have no tree."""
    verdicts: dict[CommitId, CommitVerdict] = {}
    without_tree = []
    for oid in commits:
        if oid not in objects or objects[oid].kind != "commit":
            verdicts[oid] = CommitVerdict(
                CommitState.MISSING, (oid,), "the commit is not in the mirror"
            )
        elif f"{oid}^{{tree}}" not in objects:
            without_tree.append(oid)
    incomplete = CommitVerdict(CommitState.INCOMPLETE, (), "its tree is missing")
    verdicts |= dict.fromkeys(without_tree, incomplete)
    for oid in map(CommitId, unreadable(repository, without_tree)):
        verdicts[oid] = CommitVerdict(CommitState.CORRUPT, (oid,), "it is damaged")
    return verdicts


def _reach_of(
    repository: Path,
    files: RefFiles,
    refs: Mapping[str, str],
    commits: Collection[CommitId],
    earlier: Reached | None,
    level: AuditLevel,
) -> Reached:
    """Find the best kind of ref that keeps each of `commits` alive, and kept refs that are gone.

    While the refs and `commits` stay the same, so does the result, because commits never change;
    then `earlier` is returned and nothing is walked.
    """
    named = (f"{refs[ref]} {ref}" for ref in sorted(refs))
    is_quick = level is AuditLevel.QUICK  # without lost refs
    lines = [str(is_quick), str(files.head), *sorted(commits), *named]
    key = hashlib.sha256(encode_name("\n".join(lines))).hexdigest()
    if earlier and earlier.key == key:
        return earlier
    graph = read_graph(repository, set(refs.values()))
    groups: dict[Reach, list[str]] = {reach: [] for reach in Reach}  # best first
    for ref, oid in refs.items():
        groups[_reach_by(ref, files.head)].append(oid)
    del groups[Reach.NOTHING]
    by_commit: dict[CommitId, Reach] = {}
    seen: set[str] = set()
    for reach, tips in groups.items():
        ancestors(graph, tips, seen)
        by_commit |= {oid: reach for oid in commits if oid in seen and oid not in by_commit}
    by_commit |= {oid: Reach.NOTHING for oid in commits if oid not in by_commit}
    lost: dict[str, Defect] = {}
    if HISTORY in files.refs and not is_quick:
        past = recorded_tips(repository, files.refs[HISTORY])
        defect = Defect(FindingKind.REF_LOST, "it is gone, and the ref history had its commit")
        lost = dict.fromkeys(unkept(repository, past, files.refs, graph), defect)
    needed = {*refs.values(), *(oid for parents in graph.values() for oid in parents)}
    if lost or not needed <= graph.keys():  # commits are missing
        return Reached("", by_commit, lost)
    return Reached(key, by_commit, {})


def _reach_by(ref: str, head: str | None) -> Reach:
    if ref == head:
        return Reach.DEFAULT_BRANCH
    # the first that fits counts, so what is below `refs/mirrord/` comes before OURS
    table = {KEPT: Reach.KEPT, PINS: Reach.PIN, OURS: Reach.NOTHING, "refs/tags/": Reach.TAG}
    # of GitHub, GitLab and Gerrit
    pulls = ("refs/pull/", "refs/merge-requests/", "refs/changes/")
    table |= dict.fromkeys(pulls, Reach.PULL_REQUEST)
    return next((reach for prefix, reach in table.items() if ref.startswith(prefix)), Reach.BRANCH)
