"""The plan of a mirror's refs; and the last step of a heal, the only one that changes the mirror.

Objects come first, so that the mirror never has less than before. Every file that is replaced is in
the quarantine before another one gets its name, and every change is one rename. So a crash between
any two leaves a mirror for the next heal. Functions for a thread; the caller holds the mirror's
lock.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..audit import refs as audited
from ..audit.defects import BadFile, FileKind
from ..audit.graph import iter_commits, parents_in, read_graph
from ..audit.reading import look_up, object_kinds
from ..audit.refs import RefFiles
from ..errors import ConflictError, full_disk_named
from ..host.files import sync_directory
from ..mirrors.history import NOTHING_RECORDED, blobs_of
from ..mirrors.quarantine import DAMAGED
from ..mirrors.refs import directories_of, packed_refs, write_durably
from ..mirrors.repository import CONFIGURATION, HISTORY, KEPT, OURS
from ..model import MirrorName, utc_now
from ..presence import exists, is_file, is_symlink, lexists, matching
from ..quoting import encode_name

# in this order: without its index, no git opens a pack that is on its way out
_OF_PACK = (".idx", ".pack", ".rev", ".bitmap", ".mtimes")
_OUR_COMMITTER = re.compile(rb"committer mirrord <mirrord@localhost> (\d+) ")


@dataclass(slots=True)
class RefPlan:
    """The right refs and HEAD, where they are lost, broken or moved.

    The name of a pin or kept ref has its object; the newest record of the ref history, which the
    catalog knows, has HEAD and the other refs. Commits that a record, or a corrected ref, had and
    that nothing reaches any more are kept.

    `restore` are refs to make, `drop` refs to remove; `head` is the target of HEAD. `branches` are
    the tips of two branches of records that the history must join. `remnant` is the newest record
    left where newer ones are lost, from which the history continues. Refs on disk are newer than
    it, so it only gives refs that are gone and whose commits are not kept.
    """

    restore: dict[str, str] = field(default_factory=dict)
    drop: set[str] = field(default_factory=set)
    head: str | None = None
    branches: tuple[str, ...] = ()
    remnant: str | None = None

    def refs(self, files: RefFiles) -> dict[str, str]:
        """Return all refs after the heal."""
        staying = {ref: oid for ref, oid in files.refs.items() if ref not in self.drop}
        return {**staying, **self.restore}


def plan_refs(
    stand_in: Path, files: RefFiles, default_branch: str | None, record: str | None
) -> RefPlan:
    """Plan the refs. `stand_in` has the readable refs, and every object that was found.

    `record` is a record that the history must have.
    """
    plan = RefPlan()
    wrong = {bad.path for bad in files.bad if bad.path.startswith("refs/")}
    plan.restore = {ref: oid for ref in wrong if (oid := audited.oid_in_name(ref))}
    plan.drop = wrong - plan.restore.keys()
    history, plan.branches = _history(stand_in, files, record)
    if history and files.refs.get(HISTORY) != history:
        plan.restore[HISTORY] = history
        is_older = record != history and (record or HISTORY in files.refs)
        plan.remnant = history if is_older else None
    tips = plan.branches or ((history,) if history else ())
    past = {oid for tip in tips for oid in audited.recorded_tips(stand_in, tip)}
    recorded, head, *_ = audited.read_record(stand_in, history) if history else NOTHING_RECORDED
    lost = {ref: oid for ref, oid in recorded.items() if files.refs.get(ref) != oid}
    if plan.remnant:
        gone = lost.keys() - files.refs.keys()
        lost = {ref: lost[ref] for ref in gone if f"{KEPT}{lost[ref]}" not in files.refs}
    plan.restore |= lost
    # refs that are a directory of a restored one, or below it, are in its way
    above = {directory for ref in plan.restore for directory in directories_of(ref, 2)}
    restored = plan.restore.keys()
    below = {ref for ref in files.refs if not restored.isdisjoint(directories_of(ref, 2))}
    in_the_way = below | (above & files.refs.keys())
    plan.drop = (plan.drop | (in_the_way - recorded.keys())) - plan.restore.keys()

    refs = plan.refs(files)
    moved = {ref: oid for ref, oid in files.refs.items() if refs.get(ref) != oid}
    astray = {*files.astray.values(), *moved.values()}
    if plan.remnant:
        astray.discard(str(record))  # an incomplete record
    kinds = object_kinds(stand_in, astray - set(refs.values()))
    plan.restore |= {f"{KEPT}{oid}": oid for oid, kind in kinds.items() if kind == "tag"}
    plan.restore |= audited.unkept(stand_in, past | astray, plan.refs(files))

    refs = plan.refs(files)
    branches = [ref for ref in sorted(refs) if ref.startswith("refs/heads/")]
    default = f"refs/heads/{default_branch}" if default_branch else None
    known_heads = [files.head, head] if plan.remnant else [head, files.head]
    wanted = [*known_heads, default, "refs/heads/main", "refs/heads/master", *branches]
    plan.head = next((ref for ref in wanted if ref in refs), files.head)
    return plan


def _history(
    stand_in: Path, files: RefFiles, record: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """Find the tip of the ref history; and both tips, if it lost `record` and got records since."""
    tip = files.refs.get(HISTORY)
    tip = tip if tip and audited.is_record(stand_in, tip) else None
    if record is None or not audited.is_record(stand_in, record):
        return tip or _find_history(stand_in, files.refs), ()
    past = audited.record_ids(stand_in, record)
    since = audited.record_ids(stand_in, tip) if tip else set()
    if tip is None or past is None or since is None or tip in past:
        return record, ()
    return tip, () if record in since else (record, tip)


def _find_history(stand_in: Path, refs: Mapping[str, str]) -> str | None:
    """Find the newest record that no other one builds on.

    Commits that upstream's refs reach are upstream's, even if they look like records.
    """
    kinds = object_kinds(stand_in, {oid for ref, oid in refs.items() if not ref.startswith(OURS)})
    upstreams = read_graph(stand_in, [oid for oid, kind in kinds.items() if kind == "commit"])
    candidates: dict[str, tuple[int, str]] = {}
    parents: dict[str, tuple[str, ...]] = {}
    for commit in iter_commits(stand_in):
        header = commit.data.partition(b"\n\n")[0]
        ours = _OUR_COMMITTER.search(header)
        if ours and b"\n\nRefs: " in commit.data and commit.oid not in upstreams:
            candidates[commit.oid] = int(ours[1]), commit.oid
            parents[commit.oid] = parents_in(commit.data)
    blobs = look_up(stand_in, [name for oid in candidates for name in blobs_of(oid)])
    lists = audited.read_lists(stand_in, candidates)
    real = {
        oid
        for oid in candidates
        if all(name in blobs for name in blobs_of(oid))
        and any(lists.get(blobs[name].oid) for name in blobs_of(oid))
    }
    last = real.difference(*(parents[oid] for oid in real))
    return max(last, key=lambda oid: candidates[oid], default=None)


# -- the changes -----------------------------------------------------------------------------------


class DamagedFiles:
    """`quarantine/damaged/<mirror>/<time>-<id>/`: files of one heal at their old paths.

    Only a person removes anything from there. `record.json` is written before the first file moves,
    so a crash leaves each file in one place or the other.
    """

    def __init__(
        self, quarantine: Path, name: MirrorName, git_dir: Path, bad_files: Collection[BadFile]
    ) -> None:
        now = utc_now()
        own = quarantine / DAMAGED / str(name)
        self.path = own / f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self._git_dir = git_dir
        if not bad_files:
            return
        self.path.mkdir(parents=True, mode=0o700)
        files = []
        for bad in sorted(bad_files):
            file = git_dir / bad.path
            entry = bad._asdict() | {"kind": str(bad.kind), "size_bytes": None, "sha256": None}
            if is_file(file) and not is_symlink(file):
                with file.open("rb") as stream:
                    entry["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
                entry["size_bytes"] = file.stat().st_size
            files.append(entry)
        record = {"mirror": str(name), "at": now.isoformat(), "files": files}
        write_durably(self.path / "record.json", json.dumps(record, indent=1).encode())
        # each may be new, and a new name is durable only once the directory above is flushed
        for directory in (own, own.parent, quarantine):
            sync_directory(directory)

    def move(self, relative: str) -> None:
        """Move a file of the mirror in here, if it exists."""
        source = self._git_dir / relative
        if lexists(source):
            target = self._target_of(relative)
            source.rename(target)
            sync_directory(target.parent)
            sync_directory(source.parent)

    def link(self, relative: str) -> None:
        """Link a file in here; it stays in its place until another is renamed over it."""
        source = self._git_dir / relative
        if exists(source) and not exists(self.path / relative):
            target = self._target_of(relative)
            os.link(source, target)
            sync_directory(target.parent)

    def _target_of(self, relative: str) -> Path:
        target = self.path / relative
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return target


def publish(
    name: MirrorName,
    git_dir: Path,
    quarantine: Path,
    work: Path,
    bad_files: Collection[BadFile],
    plan: RefPlan,
) -> Path | None:
    """Change the mirror at `git_dir`; return where the bad files are.

    `work` has the new packs in `objects/pack`.
    """
    with full_disk_named(f"mirror {name}"):
        damaged = DamagedFiles(quarantine, name, git_dir, bad_files)
        for bad in bad_files:
            if bad.kind is FileKind.LAYOUT:
                damaged.move(bad.path)
        for directory in ("objects/pack", "refs"):
            (git_dir / directory).mkdir(parents=True, exist_ok=True)
        going: dict[str, None] = {}
        # a multi-pack index is moved before the packs that it names
        for bad in sorted(bad_files, key=lambda bad: bad.kind is not FileKind.DERIVED):
            if bad.kind in {FileKind.PACK, FileKind.INDEX}:  # with all other files of the pack
                stem = bad.path.rpartition(".")[0]  # git finds a pack by its index
                going |= dict.fromkeys(stem + end for end in _OF_PACK)
            elif bad.kind is not FileKind.LAYOUT and bad.path.startswith("objects/"):
                going[bad.path] = None
        packs = matching(work / "objects/pack", "pack-*")
        # indexes last: from its index on git reads a pack
        for file in sorted(packs, key=lambda file: (file.suffix == ".idx", file.name)):
            path = f"objects/pack/{file.name}"
            if path in going or not exists(git_dir / path):  # else it is the same
                damaged.link(path)
                file.rename(git_dir / path)
        sync_directory(git_dir / "objects/pack")
        new = {f"objects/pack/{file.name}" for file in packs}
        for path in going:
            if path not in new:
                damaged.move(path)
        _write_refs(name, git_dir, work / "new", damaged, bad_files, plan)
    return damaged.path if bad_files else None


def _write_refs(
    name: MirrorName,
    git_dir: Path,
    new: Path,
    damaged: DamagedFiles,
    bad_files: Collection[BadFile],
    plan: RefPlan,
) -> None:
    def replace(path: str, content: bytes) -> None:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        damaged.link(path)
        new.rename(git_dir / path)
        sync_directory(git_dir)

    paths = {bad.path for bad in bad_files}
    if "config" in paths:
        replace("config", CONFIGURATION.encode())
    if "HEAD" in paths:
        replace("HEAD", encode_name(f"ref: {plan.head or 'refs/heads/main'}\n"))
    if "packed-refs" in paths or plan.restore or plan.drop:
        lock = git_dir / "packed-refs.lock"  # git's own: it may be moving a ref
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError as error:
            fact = f"cannot restore refs of mirror {name}: git is packing them"
            raise ConflictError(fact, hint="try again later") from error
        try:
            packed = audited.read_packed(git_dir)
            staying = {ref: oid for ref, oid in packed.items() if ref not in plan.drop}
            replace("packed-refs", packed_refs({**staying, **plan.restore}))
        finally:
            lock.unlink(missing_ok=True)
    for bad in bad_files:
        if bad.kind in {FileKind.REF, FileKind.PLANTED}:
            damaged.move(bad.path)
