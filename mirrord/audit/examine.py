"""Examine one mirror: the recorded commits that can be served, and the refs that keep them alive.

One long git proves everything: a walk at level `closure`, fsck at level `content`. Files and refs
are read beside it. The search for damage begins only where that git complains. Runs in a worker, on
threads of low priority. Reads only.
"""

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..catalog import MirrorRow, RecordedRow
from ..config.values import is_accepted
from ..git.batch import BatchObject
from ..git.packs import packs_in
from ..host.processes import lower_priority
from ..mirrors.pins import is_pin
from ..mirrors.refs import packed_refs
from ..mirrors.repository import HISTORY, KEPT, OURS, PINS
from ..model import (
    AuditLevel,
    CommitId,
    CommitRole,
    CommitState,
    FindingKind,
    MirrorName,
    Reach,
    utc_now,
)
from ..protocol import Audit, AuditPart, Finding, ProgressSink, Repair, StartAudit
from ..quoting import encode_name, quote_name
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


# -- a stand-in for a mirror: a repository with its refs and links to its good objects -------------
#
# An audit reads it where git would stop at the mirror's bad files. A heal works in it, so that the
# mirror stays as it was until everything is proven. It has no configuration, commit-graph, bitmap
# or multi-pack index, so every object that git finds in it is good.


@contextmanager
def readable(git_dir: Path, files: RefFiles, strange: Collection[BadFile]) -> Iterator[Path]:
    """Return the mirror, or a stand-in where git would refuse it, or follow planted files."""
    if not files.bad and not strange:
        yield git_dir
        return
    with tempfile.TemporaryDirectory(prefix="mirrord-stand-in-") as directory:
        stand_in = Path(directory)
        if strange:
            # git follows symbolic links, so their findings affect no commit
            unread = [bad for bad in strange if not is_readable_link(git_dir / bad.path)]
            make_stand_in(git_dir, unread, files.refs, stand_in, link=os.symlink)
        else:  # one link, in case the mirror is packed during the audit
            (stand_in / "objects").symlink_to(git_dir / "objects")
        _write_refs(stand_in, files.refs, files.head)
        yield stand_in


def is_readable_link(path: Path) -> bool:
    return path.is_symlink() and (path.is_file() or path.is_dir())


def make_stand_in(
    git_dir: Path,
    bad_files: Collection[BadFile],
    refs: Mapping[str, str],
    into: Path,
    *,
    link: Callable[[Path, Path], None] = os.link,
) -> None:
    """Make `into` a repository that has `refs` and the objects of good files.

    A hard link survives when a file of the mirror moves; a symbolic one crosses file systems.
    """
    bad = {bad.path for bad in bad_files}
    make_repository(into, refs)
    if "objects" in bad:
        return
    for index in () if "objects/pack" in bad else packs_in(git_dir / "objects/pack", ".idx"):
        pack = index.with_suffix(".pack")
        if bad.isdisjoint({f"objects/pack/{index.name}", f"objects/pack/{pack.name}"}):
            # git finds a pack by its index, which therefore comes last
            link(pack, into / "objects/pack" / pack.name)
            link(index, into / "objects/pack" / index.name)
    for directory in (git_dir / "objects").glob("[0-9a-f][0-9a-f]"):
        if f"objects/{directory.name}" in bad:
            continue
        target = into / "objects" / directory.name
        names = os.listdir(directory)
        good = [name for name in names if f"objects/{directory.name}/{name}" not in bad]
        if len(good) == len(names):  # git writes nothing into it
            target.symlink_to(directory)
            continue
        target.mkdir()
        for name in good:
            link(directory / name, target / name)


def make_repository(path: Path, refs: Mapping[str, str] | None = None) -> None:
    """Make an empty repository with refs, whose objects come later."""
    (path / "objects/pack").mkdir(parents=True)
    _write_refs(path, refs or {}, None)


def _write_refs(repository: Path, refs: Mapping[str, str], head: str | None) -> None:
    (repository / "HEAD").write_bytes(encode_name(f"ref: {head or 'refs/heads/main'}\n"))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "packed-refs").write_bytes(packed_refs(refs))


def borrow_from(repository: Path, *lenders: Path) -> None:
    """Let git in `repository` read the objects of others, by alternates."""
    info = repository / "objects/info"
    info.mkdir(exist_ok=True)
    (info / "alternates").write_text("".join(f"{lender / 'objects'}\n" for lender in lenders))


# -- findings, parts and the report of an audit ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class MirrorJudgement:
    """The audit of one mirror: its recorded commits and what was found.

    `unresolved` are the instances without a base commit, because the mirror lacks their branches;
    `accept` are the findings that the configuration accepts.
    """

    name: MirrorName
    rows: Collection[RecordedRow]
    examined: Examined
    accept: Collection[str] = ()
    healed: int = 0
    repair: Repair | None = None
    row: MirrorRow | None = None
    unresolved: Collection[str] = ()


@dataclass(slots=True)
class AuditRun:
    """A running audit; `parts` are the judged mirrors, `left` the others, by mirror key."""

    request: StartAudit
    level: AuditLevel
    progress: ProgressSink | None
    id: str
    started_at: datetime
    parts: dict[str, AuditPart] = field(default_factory=dict)
    left: dict[str, MirrorName] = field(default_factory=dict)
    failures: list[Finding] = field(default_factory=list)

    def report(self) -> Audit:
        parts = sorted(self.parts.values(), key=lambda part: part.mirror.lower())
        findings = [*(finding for part in parts for finding in part.findings), *self.failures]
        return Audit(
            id=self.id, level=self.level, dataset=self.request.dataset,
            mirrors=[part.mirror for part in parts],
            left=sorted(map(str, self.left.values())),
            started_at=self.started_at, finished_at=utc_now(),
            counts=dict(sum((Counter(part.counts) for part in parts), Counter())),
            reach=dict(sum((Counter(part.reach) for part in parts), Counter())),
            findings=findings,
            open_count=sum(not finding.accepted for finding in findings),
            affected=sorted({instance for part in parts for instance in part.affected}),
            healed=sum(part.healed for part in parts),
            repairs=[part.repair for part in parts if part.repair],
        )  # fmt: skip


def part_of(judged: MirrorJudgement, stores: Mapping[str, str]) -> AuditPart:
    """Make the part of one mirror; `stores` are damaged templates and stores, with their fate.

    Commits that only persons pinned are not counted, but have findings.
    """
    recorded = {row.commit for row in judged.rows}
    verdicts, reach = judged.examined.verdicts, judged.examined.reach
    findings = list(findings_of(judged))
    for what, fate in sorted(stores.items()):
        findings.append(_finding(judged, FindingKind.STORE, what, detail=f"{what}: {fate}"))
    servable = {CommitState.OK, CommitState.UNPINNED}
    if judged.unresolved:
        fact = f"the mirror lacks branches that instances start from: {len(judged.unresolved)}"
        ids, state = sorted(judged.unresolved), CommitState.MISSING
        finding = _finding(judged, FindingKind.MISSING, detail=fact, state=state, instances=ids)
        findings.append(finding)
    open_ = [finding for finding in findings if not finding.accepted]
    broken = {finding.commit for finding in open_ if finding.state not in servable}
    bases = (row for row in judged.rows if row.role is CommitRole.BASE)
    broken |= {
        commit
        for subject, defect in judged.examined.defects.items()
        if defect.commits and not _is_accepted(judged, defect.kind, subject)
        for commit in defect.commits
    }
    unservable = {row.instance for row in bases if row.commit in broken}
    return AuditPart(
        mirror=str(judged.name),
        counts=dict(Counter(verdicts[oid].state for oid in verdicts if oid in recorded)),
        reach=dict(Counter(reach[oid] for oid in reach if oid in recorded)),
        findings=findings,
        affected=sorted({*judged.unresolved, *unservable}),
        healed=judged.healed,
        repair=judged.repair,
    )


def unjudged(name: MirrorName, reason: str, accept: Collection[str]) -> Finding:
    """Make the finding of a mirror that could not be examined; its commits are not counted."""
    judged = MirrorJudgement(name, (), Examined(), accept)
    return _finding(judged, FindingKind.UNJUDGED, detail=f"it could not be judged: {reason}")


def is_sound(judged: MirrorJudgement) -> bool:
    """True if a heal has nothing to do: what fsck refuses is whole, as upstream made it."""
    return all(
        finding.accepted or finding.kind is FindingKind.REFUSED for finding in findings_of(judged)
    )


def findings_of(judged: MirrorJudgement) -> Iterator[Finding]:
    """Iterate over a finding for each bad commit, then for each defect of the mirror."""
    verdicts = sorted(judged.examined.verdicts.items())
    bad = [(oid, verdict) for oid, verdict in verdicts if verdict.state is not CommitState.OK]
    blemished = {oid for defect in judged.examined.defects.values() for oid in defect.commits}
    instances: dict[str, set[str]] = {oid: set() for oid in {*blemished, *(oid for oid, _ in bad)}}
    roles: dict[str, set[CommitRole]] = {oid: set() for oid in instances}
    for row in judged.rows if instances else ():
        if row.commit in instances:
            instances[row.commit].add(row.instance)
            roles[row.commit].add(row.role)
    for oid, verdict in bad:
        yield _finding(
            judged, FindingKind(verdict.state), oid, commit=oid, state=verdict.state,
            reach=judged.examined.reach.get(oid), instances=sorted(instances[oid]),
            roles=sorted(roles[oid]),
            objects=list(verdict.objects), detail=verdict.detail,
        )  # fmt: skip
    for subject, defect in sorted(judged.examined.defects.items()):
        affected = {instance for oid in defect.commits for instance in instances[oid]}
        yield _finding(
            judged, defect.kind, subject, instances=sorted(affected),
            objects=[subject] if defect.kind is FindingKind.REFUSED else [],
            detail=f"{quote_name(subject)}: {defect.reason}",
        )  # fmt: skip


def _is_accepted(judged: MirrorJudgement, kind: FindingKind, subject: str) -> bool:
    return is_accepted(judged.accept, kind, judged.name, quote_name(subject))


def _finding(judged: MirrorJudgement, kind: FindingKind, subject: str = "", **more: Any) -> Finding:
    more.setdefault("state", CommitState.CORRUPT)
    return Finding(
        mirror=str(judged.name), kind=kind, subject=subject,
        accepted=_is_accepted(judged, kind, subject), **more,
    )  # fmt: skip
