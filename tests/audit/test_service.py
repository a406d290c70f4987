"""The audit against real damage: it says what cannot be served, whom it hits, and nothing where
nothing is wrong.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import anyio
import anyone
import pytest
from faults.undamaged import rounds as undamaged_rounds
from gitrepos import Upstream, git
from heal_parts import Daemon

from mirrord.audit.damage import run_fsck
from mirrord.audit.defects import Defect
from mirrord.audit.examine import Examined, examine
from mirrord.audit.object_files import find_bad_files
from mirrord.catalog import InstanceRow
from mirrord.errors import MirrorNotFoundError, NotFoundError
from mirrord.git import command as git_command
from mirrord.mirrors.proofs import PROOF
from mirrord.mirrors.repository import CONFIGURATION
from mirrord.model import (
    AuditLevel,
    CommitId,
    CommitRole,
    CommitState,
    Direction,
    FindingKind,
    MirrorName,
    Reach,
)
from mirrord.protocol import Audit, Progress, StartAudit

pytestmark = pytest.mark.slow

GIT_USERS = (
    "audit.damage",
    "audit.object_files",
    "audit.reading",
    "git.batch",
    "git.command",
)
ALL_LEVELS = list(AuditLevel)
DEEP_LEVELS = [AuditLevel.CLOSURE, AuditLevel.CONTENT]


class Site:
    """A bare repository with ten commits in a line, a side branch off the fifth, and a pin for
    each.
    """

    def __init__(self, root: Path) -> None:
        upstream = Upstream(root / "upstream")
        self.line = [CommitId(oid) for oid in upstream.history(10)]
        upstream.git("checkout", "-q", "-b", "side", self.line[4])
        self.side = [CommitId(upstream.commit({f"side{n}.txt": f"side {n}\n"})) for n in range(2)]
        upstream.git("checkout", "-q", "main")
        self.path = root / "mirror.git"
        git(root, "clone", "-q", "--mirror", upstream.url, str(self.path))
        self.commits = [*self.line, *self.side]
        pins = "".join(f"create refs/mirrord/pins/dataset/d/{oid} {oid}\n" for oid in self.commits)
        self.git("update-ref", "--stdin", stdin=pins.encode())
        (self.path / "config").write_text(CONFIGURATION)
        shutil.rmtree(self.path / "hooks")
        self.git("update-ref", "refs/mirrord/history", self.record())

    def record(self) -> str:
        """The refs as a sync records them."""
        refs = self.git("for-each-ref", "--format=%(objectname) %(refname)", "refs/heads") + "\n"
        blob = self.git("hash-object", "-w", "--stdin", stdin=refs.encode())
        entries = (f"100644 blob {blob}\t{name}\n" for name in ("refs", "moved"))
        tree = self.git("mktree", stdin="".join(entries).encode())
        return self.git("commit-tree", "-m", "sync", tree)

    def copy(self, root: Path) -> Site:
        copied = copy.copy(self)
        copied.path = root / "mirror.git"
        shutil.copytree(self.path, copied.path)
        return copied

    def git(self, *args: str, stdin: bytes | None = None) -> str:
        return git(self.path, *args, stdin=stdin)

    def examine(self, level: AuditLevel) -> Examined:
        return examine(self.path, self.commits, level)

    def states(self, level: AuditLevel) -> dict[CommitState, set[CommitId]]:
        found: dict[CommitState, set[CommitId]] = {}
        for oid, verdict in self.examine(level).verdicts.items():
            found.setdefault(verdict.state, set()).add(oid)
        return found

    def explode(self) -> None:
        """Every object a loose file, so that one can be damaged alone."""
        for pack in list((self.path / "objects/pack").glob("*.pack")):
            moved = self.path / pack.name
            pack.rename(moved)
            pack.with_suffix(".idx").unlink()
            for extra in (".rev", ".bitmap"):
                pack.with_suffix(extra).unlink(missing_ok=True)
            self.git("unpack-objects", "-q", stdin=moved.read_bytes())
            moved.unlink()

    def loose(self, oid: str) -> Path:
        return self.path / "objects" / oid[:2] / oid[2:]

    def overwrite(self, oid: str, other: str) -> None:
        """Give the loose object `oid` the bytes of `other`."""
        content = self.loose(other).read_bytes()
        self.loose(oid).unlink()
        self.loose(oid).write_bytes(content)

    @property
    def pack(self) -> Path:
        return next((self.path / "objects/pack").glob("*.pack"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def site(pristine: Site, tmp_path: Path) -> Site:
    return pristine.copy(tmp_path)


@pytest.mark.parametrize("level", ALL_LEVELS)
@pytest.mark.parametrize("exploded", [False, True])
def test_an_undamaged_mirror_raises_no_alarm(site: Site, level: AuditLevel, exploded: bool) -> None:
    if exploded:
        site.explode()
    result = site.examine(level)
    assert {verdict.state for verdict in result.verdicts.values()} == {CommitState.OK}
    assert (len(result.verdicts), result.defects) == (12, {})


def test_reach_says_the_best_thing_that_keeps_a_commit(site: Site) -> None:
    """Default branch before branch, tag, pull request, kept and pin."""
    site.git("update-ref", "refs/tags/t", site.side[0])
    site.git("update-ref", "-d", "refs/heads/side")
    assert site.examine(AuditLevel.QUICK).reach == {
        **dict.fromkeys(site.line, Reach.DEFAULT_BRANCH), site.side[0]: Reach.TAG, site.side[1]: Reach.PIN
    }  # fmt: skip
    site.git("update-ref", f"refs/mirrord/kept/{site.side[1]}", site.side[1])
    assert site.examine(AuditLevel.QUICK).reach[site.side[1]] is Reach.KEPT
    site.git("update-ref", "refs/pull/1/head", site.side[1])
    assert site.examine(AuditLevel.QUICK).reach[site.side[1]] is Reach.PULL_REQUEST
    site.git("update-ref", "refs/heads/again", site.side[1])
    assert site.examine(AuditLevel.QUICK).reach[site.side[1]] is Reach.BRANCH


def test_a_deleted_pin_is_unpinned_and_reached_by_nothing(site: Site) -> None:
    site.git("update-ref", "-d", "refs/heads/side")
    for oid in site.side:
        site.git("update-ref", "-d", f"refs/mirrord/pins/dataset/d/{oid}")
    result = site.examine(AuditLevel.CLOSURE)
    assert site.states(AuditLevel.CLOSURE)[CommitState.UNPINNED] == set(site.side)
    assert {result.reach[oid] for oid in site.side} == {Reach.NOTHING}


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_missing_tip_is_missing(site: Site, level: AuditLevel) -> None:
    site.explode()
    site.loose(site.side[1]).unlink()
    assert site.states(level)[CommitState.MISSING] == {site.side[1]}
    assert site.states(level)[CommitState.OK] == set(site.commits) - {site.side[1]}


@pytest.mark.parametrize("level", DEEP_LEVELS)
def test_a_missing_commit_hidden_by_a_commit_graph_is_found(site: Site, level: AuditLevel) -> None:
    """git walks over the hole with its commit-graph; the audit does not use that."""
    site.git("commit-graph", "write", "--reachable")
    site.explode()
    site.loose(site.line[7]).unlink()
    states = site.states(level)
    assert states[CommitState.MISSING] == {site.line[7]}
    assert states[CommitState.INCOMPLETE] == set(site.line[8:])
    assert states[CommitState.OK] == {*site.line[:7], *site.side}


@pytest.mark.parametrize("level", DEEP_LEVELS)
def test_a_missing_blob_hits_the_commits_that_have_it_in_their_past(
    site: Site, level: AuditLevel
) -> None:
    """It came with the third commit: the first two are whole, everything after is not, the side
    branch included.
    """
    site.explode()
    blob = site.git("rev-parse", f"{site.line[2]}:docs/page2.txt")
    site.loose(blob).unlink()
    result = site.examine(level)
    assert site.states(level) == {
        CommitState.OK: set(site.line[:2]),
        CommitState.INCOMPLETE: {*site.line[2:], *site.side},
    }
    assert {
        verdict.objects
        for verdict in result.verdicts.values()
        if verdict.state is CommitState.INCOMPLETE
    } == {(blob,)}


@pytest.mark.parametrize("level", DEEP_LEVELS)
def test_holes_in_two_branches_are_told_apart(site: Site, level: AuditLevel) -> None:
    site.explode()
    site.loose(site.git("rev-parse", f"{site.side[1]}:side1.txt")).unlink()
    site.loose(site.git("rev-parse", f"{site.line[8]}:docs")).unlink()
    assert site.states(level) == {
        CommitState.OK: {*site.line[:8], site.side[0]}, CommitState.INCOMPLETE: {*site.line[8:], site.side[1]}
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["blob", "tree", "commit"])
def test_swapped_loose_objects_are_corrupt(site: Site, kind: str) -> None:
    """A valid object under another's name passes every existence check and rev-list --verify-
    objects; not this one.
    """
    site.explode()
    name = {"blob": ":docs/page7.txt", "tree": ":docs", "commit": ""}[kind]
    victim = site.git("rev-parse", f"{site.line[7]}{name}")
    site.overwrite(victim, site.git("rev-parse", f"{site.line[6]}{name.replace('7', '6')}"))
    states = site.states(AuditLevel.CONTENT)
    assert states[CommitState.CORRUPT] == set(site.line[7:])
    assert states[CommitState.OK] == {*site.line[:7], *site.side}
    assert site.examine(AuditLevel.CONTENT).verdicts[site.line[9]].objects == (victim,)


def test_altered_bytes_in_a_pack_are_corrupt(site: Site) -> None:
    """One byte in the middle of the newest objects."""
    blob = site.git("rev-parse", f"{site.line[9]}:docs/page9.txt")
    offset = next(
        int(line.split()[0])
        for line in git(
            site.path, "show-index", stdin=site.pack.with_suffix(".idx").read_bytes()
        ).splitlines()
        if blob in line
    )
    data = bytearray(site.pack.read_bytes())
    data[offset + 4] ^= 0xFF
    site.pack.chmod(0o644)
    site.pack.write_bytes(data)
    result = site.examine(AuditLevel.CONTENT)
    states = site.states(AuditLevel.CONTENT)
    assert states == {
        CommitState.OK: {*site.line[:9], *site.side},
        CommitState.CORRUPT: {site.line[9]},
    }
    assert result.verdicts[site.line[9]].objects == (blob,)
    assert list(result.defects) == [site.pack.name]


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_pack_that_is_not_its_indexs_is_of_no_use(site: Site, level: AuditLevel) -> None:
    """git does not open a pack that ends with another checksum than its index names: every object
    of it is missing.
    """
    data = bytearray(site.pack.read_bytes())
    data[-1] ^= 0xFF
    site.pack.chmod(0o644)
    site.pack.write_bytes(data)
    result = site.examine(level)
    assert site.pack.name in result.defects
    assert {verdict.state for verdict in result.verdicts.values()} == {CommitState.MISSING}


@pytest.mark.parametrize("level", DEEP_LEVELS)
def test_a_truncated_pack_is_found(site: Site, level: AuditLevel) -> None:
    site.pack.chmod(0o644)
    os.truncate(site.pack, site.pack.stat().st_size // 2)
    result = site.examine(level)
    assert site.pack.name in result.defects
    assert CommitState.OK not in {verdict.state for verdict in result.verdicts.values()}


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_deleted_pack_is_found(site: Site, level: AuditLevel) -> None:
    name = site.pack.name
    site.pack.unlink()
    result = site.examine(level)
    assert result.defects[name] == Defect(FindingKind.PACK, "it is missing, but its index exists")
    assert {verdict.state for verdict in result.verdicts.values()} == {CommitState.MISSING}


def test_a_pack_that_git_is_removing_is_no_damage(site: Site) -> None:
    """git (2.39) takes the pack away before its index, and a big one takes a while."""
    index = site.pack.with_name(f"pack-{'1' * 40}.idx")
    shutil.copy(site.pack.with_suffix(".idx"), index)
    removal = threading.Timer(0.5, index.unlink)
    removal.start()
    assert find_bad_files(site.path, AuditLevel.QUICK) == []
    removal.join()


def test_a_directory_that_git_is_removing_is_no_damage(site: Site) -> None:
    """It comes and goes while the audit looks."""
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            (site.path / "objects/f8").mkdir()
            (site.path / "objects/f8").rmdir()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(come_and_go)
        try:
            for _ in range(50):
                assert find_bad_files(site.path, AuditLevel.CLOSURE) == []
        finally:
            is_over.set()


def test_a_truncated_loose_object_hangs_nobody(site: Site) -> None:
    """libgit2 1.9.7 spins on it for ever; git does not."""
    site.explode()
    blob = site.git("rev-parse", f"{site.line[9]}:docs/page9.txt")
    content = site.loose(blob).read_bytes()
    site.loose(blob).unlink()
    site.loose(blob).write_bytes(content[: len(content) // 2])
    assert site.states(AuditLevel.CONTENT)[CommitState.CORRUPT] == {site.line[9]}


def test_damage_outside_every_recorded_closure_hits_nobody(site: Site) -> None:
    site.explode()
    stray = site.git("hash-object", "-w", "--stdin", stdin=b"stray\n")
    site.loose(stray).unlink()
    site.loose(stray).write_bytes(b"garbage")
    assert set(site.states(AuditLevel.CONTENT)) == {CommitState.OK}


def test_many_commits_take_few_processes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of git processes does not grow with the number of recorded commits."""
    count = 0
    real = git_command.run_git_sync

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        return real(*args, **kwargs)  # type: ignore[arg-type]

    for module in GIT_USERS:
        monkeypatch.setattr(f"mirrord.{module}.run_git_sync", counting)
    site.examine(AuditLevel.CONTENT)
    assert count < 12


# -- the service -----------------------------------------------------------------------------------


def with_daemon(
    tmp_path: Path, upstream: Upstream, body: Callable[[Daemon], Awaitable[None]]
) -> None:
    async def run() -> None:
        daemon = Daemon(tmp_path, upstream)
        await daemon.open()
        try:
            await body(daemon)
        finally:
            await daemon.close()

    anyio.run(run)


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    upstream = Upstream(tmp_path / "name")
    upstream.history(4)
    return upstream


def recorded(upstream: Upstream) -> dict[str, CommitId]:
    return {f"owner__name-{n}": CommitId(upstream.git("rev-parse", f"HEAD~{n}")) for n in range(3)}


def test_an_audit_is_saved_and_says_that_all_is_well(tmp_path: Path, upstream: Upstream) -> None:
    """Everything recorded, counted by state and by reach."""

    async def body(daemon: Daemon) -> None:
        await daemon.mirror_and_pin(recorded(upstream))
        audit = await daemon.audits.run(StartAudit(level=AuditLevel.CONTENT))
        assert audit.counts == {CommitState.OK: 3}
        assert audit.reach == {Reach.DEFAULT_BRANCH: 3}
        assert (audit.findings, audit.affected, audit.mirrors) == ([], [], ["owner__name"])
        assert await daemon.audits.get(audit.id) == audit
        assert await daemon.audits.list_audits() == [audit]
        with pytest.raises(NotFoundError):
            await daemon.audits.get("nonsense")

    with_daemon(tmp_path, upstream, body)


def test_findings_name_the_instances_that_are_hit(tmp_path: Path, upstream: Upstream) -> None:
    """The newest blob is gone: the newest instance is hit, and healed from upstream when asked."""

    async def body(daemon: Daemon) -> None:
        await daemon.mirror_and_pin(recorded(upstream))
        blob = upstream.git("rev-parse", "HEAD:docs/page3.txt")
        drop_object(daemon.mirrors.path(daemon.name), blob)
        proof = daemon.mirrors.path(daemon.name) / PROOF
        assert proof.exists()
        audit = await daemon.audits.run(StartAudit(heal=False))
        assert not proof.exists()
        assert audit.counts == {CommitState.OK: 2, CommitState.INCOMPLETE: 1}
        assert (audit.affected, audit.findings[0].objects) == (["owner__name-0"], [blob])
        assert audit.findings[0].instances == ["owner__name-0"]
        healed = await daemon.audits.run(StartAudit(heal=True, level=AuditLevel.CONTENT))
        assert (healed.healed, healed.counts, healed.affected) == (1, {CommitState.OK: 3}, [])

    with_daemon(tmp_path, upstream, body)


def test_a_lost_pin_is_found_and_pinned_again(tmp_path: Path, upstream: Upstream) -> None:
    """It can be served, so no instance is affected."""

    async def body(daemon: Daemon) -> None:
        commits = recorded(upstream)
        await daemon.mirror_and_pin(commits)
        oid = commits["owner__name-1"]
        git(
            daemon.mirrors.path(daemon.name),
            "update-ref",
            "-d",
            f"refs/mirrord/pins/dataset/lite/{oid}",
        )
        audit = await daemon.audits.run(StartAudit(heal=False))
        assert (audit.counts, audit.affected) == ({CommitState.OK: 2, CommitState.UNPINNED: 1}, [])
        audit = await daemon.audits.run(StartAudit(heal=True))
        assert (audit.counts, audit.healed) == ({CommitState.OK: 3}, 1)

    with_daemon(tmp_path, upstream, body)


def test_a_lost_gold_commit_is_found_and_its_instance_can_be_served(
    tmp_path: Path, upstream: Upstream
) -> None:
    async def body(daemon: Daemon) -> None:
        commits = recorded(upstream)
        await daemon.mirror_and_pin(commits)
        base, gold = commits["owner__name-1"], CommitId("d" * 40)
        roles = ((base, CommitRole.BASE), (gold, CommitRole.GOLD))
        told = (daemon.name, base, Direction.FORWARD, roles, None, None, (), ())
        smith = (daemon.name, None, Direction.REVERSE, (), None, None, (), (), "bug.1")
        await daemon.record_rows([InstanceRow("gold", "", *told), InstanceRow("bug.1", "", *smith)])
        audit = await daemon.audits.run(StartAudit(heal=False, dataset="lite"))
        lost, branch = audit.findings
        assert (lost.commit, lost.roles, lost.instances) == (gold, [CommitRole.GOLD], ["gold"])
        assert (branch.commit, branch.state, branch.instances) == (
            "",
            CommitState.MISSING,
            ["bug.1"],
        )
        assert branch.detail.endswith("branches that instances start from: 1")
        assert (audit.affected, audit.open_count) == (["bug.1"], 2)

    with_daemon(tmp_path, upstream, body)


def test_a_mirror_that_was_never_made_is_not_mirrored(tmp_path: Path, upstream: Upstream) -> None:
    async def body(daemon: Daemon) -> None:
        await daemon.record(MirrorName("some", "where"), {"some__where-1": CommitId("1" * 40)})
        audit = await daemon.audits.run(StartAudit(heal=False))
        assert (audit.counts, audit.affected) == ({CommitState.NOT_MIRRORED: 1}, ["some__where-1"])
        with pytest.raises(MirrorNotFoundError):
            await daemon.audits.run(StartAudit(mirrors=["no/such"]))
        with pytest.raises(NotFoundError):
            await daemon.audits.run(StartAudit(dataset="none"))

    with_daemon(tmp_path, upstream, body)


def drop_object(mirror: Path, oid: str) -> None:
    """Pack everything again without one object."""
    listing = git(
        mirror, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)"
    ).splitlines()
    keep = "\n".join(name for name in listing if name != oid).encode()
    old = list((mirror / "objects/pack").iterdir())
    git(mirror, "pack-objects", "-q", str(mirror / "objects/pack/pack"), stdin=keep)
    for file in old:
        file.unlink(missing_ok=True)
    for directory in (mirror / "objects").glob("[0-9a-f][0-9a-f]"):
        shutil.rmtree(directory)


# -- interrupted, and gone on with -----------------------------------------------------------------


async def mirrors_of(daemon: Daemon, upstream: Upstream, count: int) -> list[str]:
    """Mirrors of the same upstream under several names."""
    names = [f"owner__m{number}" for number in range(count)]
    for name in names:
        await daemon.mirrors.add(name, url=f"file://{upstream.path}")
        await daemon.mirrors.sync(MirrorName.parse(name))
    return names


async def interrupted_after(daemon: Daemon, done: int, request: StartAudit) -> Audit:
    """An audit that is cancelled while it looks at the mirror after the first `done`."""
    reached = asyncio.Event()
    work = asyncio.ensure_future(
        daemon.audits.run(
            request, lambda progress: reached.set() if progress.done == done else None
        )
    )
    await reached.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    return (await daemon.audits.list_audits())[0]


@pytest.mark.parametrize("level", DEEP_LEVELS)
def test_an_interrupted_audit_says_what_it_left_and_goes_on_there(
    tmp_path: Path, upstream: Upstream, level: AuditLevel
) -> None:
    """Under the same id; what was judged before is not looked at again."""

    async def body(daemon: Daemon) -> None:
        names = await mirrors_of(daemon, upstream, 4)
        partial = await interrupted_after(daemon, 2, StartAudit(level=level))
        assert (partial.mirrors, partial.left) == (names[:2], names[2:])
        assert await daemon.audits.find_unfinished(level) == partial.started_at
        told: list[Progress] = []
        whole = await daemon.audits.run(StartAudit(level=level), told.append, resume=True)
        assert [(each.done, each.total, each.note) for each in told] == [
            (2, 4, names[2]), (3, 4, names[3]), (4, 4, "")
        ]  # fmt: skip
        assert (whole.id, whole.started_at) == (partial.id, partial.started_at)
        assert (whole.mirrors, whole.left) == (names, [])
        assert await daemon.audits.find_unfinished(level) is None
        assert [audit.id for audit in await daemon.audits.list_audits()] == [whole.id]

    with_daemon(tmp_path, upstream, body)


def test_an_audit_that_a_crash_ended_goes_on_after_the_start(
    tmp_path: Path, upstream: Upstream
) -> None:
    """A crash leaves no partial audit on record, only what was said of each mirror."""

    async def begin(daemon: Daemon) -> None:
        await mirrors_of(daemon, upstream, 3)
        partial = await interrupted_after(daemon, 1, StartAudit())
        place = daemon.state_dir / "catalog.sqlite3"
        with closing(sqlite3.connect(place)) as catalog, catalog:
            catalog.execute("DELETE FROM audits WHERE id = ?", [partial.id])

    async def go_on(daemon: Daemon) -> None:
        seen: list[str] = []
        whole = await daemon.audits.run(
            StartAudit(), lambda progress: seen.append(progress.note), resume=True
        )
        assert seen == ["owner__m1", "owner__m2", ""]
        assert whole.mirrors == ["owner__m0", "owner__m1", "owner__m2"]

    with_daemon(tmp_path, upstream, begin)
    with_daemon(tmp_path, upstream, go_on)


def test_what_was_not_looked_at_for_longest_comes_first(tmp_path: Path, upstream: Upstream) -> None:
    """A person's audit of everything starts from the beginning, with the mirrors that were left."""

    async def body(daemon: Daemon) -> None:
        names = await mirrors_of(daemon, upstream, 3)
        await daemon.audits.run(StartAudit())
        await interrupted_after(daemon, 1, StartAudit())
        seen: list[str] = []
        await daemon.audits.run(StartAudit(), lambda progress: seen.append(progress.note))
        assert seen == [*names[1:], names[0], ""]

    with_daemon(tmp_path, upstream, body)


def make_too_deep(directory: Path) -> None:
    """Directories whose path is longer than the kernel takes."""
    descriptor = os.open(directory, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=descriptor)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)


def test_a_mirror_that_cannot_be_judged_keeps_no_other_waiting(
    tmp_path: Path, upstream: Upstream
) -> None:
    """It is a finding, and it is left."""

    async def body(daemon: Daemon) -> None:
        names = await mirrors_of(daemon, upstream, 3)
        make_too_deep(daemon.mirrors.path(MirrorName.parse(names[1])) / "refs")
        audit = await daemon.audits.run(StartAudit(heal=False))
        assert (audit.mirrors, audit.left) == ([names[0], names[2]], [names[1]])
        assert [finding.mirror for finding in audit.findings] == [names[1]]

    with_daemon(tmp_path, upstream, body)


# -- what else is found ----------------------------------------------------------------------------


def test_a_hole_behind_what_only_a_person_pinned_is_found(
    tmp_path: Path, upstream: Upstream
) -> None:
    """It is counted apart from what datasets record."""

    async def body(daemon: Daemon) -> None:
        await daemon.mirror_and_pin({})
        tip = CommitId(upstream.git("rev-parse", "HEAD"))
        assert await daemon.mirrors.pin(daemon.name, [tip], owner="person/7", reason="paper") == {}
        drop_object(
            daemon.mirrors.path(daemon.name), upstream.git("rev-parse", "HEAD:docs/page3.txt")
        )
        audit = await daemon.audits.run(StartAudit(heal=False))
        assert [(finding.commit, finding.state) for finding in audit.findings] == [
            (tip, CommitState.INCOMPLETE)
        ]
        assert (audit.counts, audit.affected) == ({}, [])
        assert audit.pinned == {CommitState.INCOMPLETE: 1}

    with_daemon(tmp_path, upstream, body)


@pytest.mark.parametrize(("name", "text"), [("shallow", "{0}\n"), ("info/grafts", "{0}\n")])
@pytest.mark.parametrize("level", DEEP_LEVELS)
def test_a_planted_cut_of_history_hides_nothing(
    site: Site, level: AuditLevel, name: str, text: str
) -> None:
    """git ends its walks there; the audit tells the file, and finds what is missing behind it."""
    site.explode()
    (site.path / "info").mkdir(exist_ok=True)
    (site.path / name).write_text(text.format(site.line[5]))
    assert list(site.examine(level).defects) == [name]
    site.loose(site.line[2]).unlink()
    states = site.states(level)
    assert states[CommitState.MISSING] == {site.line[2]}
    assert states[CommitState.INCOMPLETE] == {*site.line[3:], *site.side}


def test_a_multi_pack_index_hides_nothing(site: Site) -> None:
    """One that names objects of a pack that is gone is not asked."""
    site.git("multi-pack-index", "write")
    for file in (site.path / "objects/pack").glob("pack-*"):
        file.unlink()
    for level in ALL_LEVELS:
        assert set(site.states(level)) == {CommitState.MISSING}


@pytest.mark.parametrize(
    "content", [b"MIDX\1\1\0\0" + bytes(60), b"MIDX\1\1\x09\0" + bytes(8)], ids=["no names", "cut"]
)
def test_a_multi_pack_index_of_no_sense_is_a_finding(site: Site, content: bytes) -> None:
    """Its checksum is right, as a forger would make it."""
    (site.path / "objects/pack/multi-pack-index").write_bytes(
        content + hashlib.sha1(content).digest()
    )
    assert list(site.examine(AuditLevel.CLOSURE).defects) == ["multi-pack-index"]


def test_slips_that_real_histories_have_are_no_damage(site: Site) -> None:
    """fsck complains of the time zone and ends with 5; every object is what its name says."""
    tree = site.git("rev-parse", f"{site.line[9]}^{{tree}}")
    body = f"tree {tree}\nparent {site.line[9]}\nauthor a <a@b.c> 1 +051800\ncommitter a <a@b.c> 1 +051800\n\nx\n"
    oid = site.git(
        "hash-object", "-t", "commit", "--literally", "-w", "--stdin", stdin=body.encode()
    )
    site.git("update-ref", "refs/heads/main", oid)
    site.git("update-ref", "refs/mirrord/history", site.record())
    site.git("repack", "-adq")
    fsck = run_fsck(site.path)
    assert (fsck.is_sound, fsck.named) == (True, set())
    assert site.examine(AuditLevel.CONTENT).defects == {}


@pytest.mark.parametrize("level", DEEP_LEVELS)
def test_an_undamaged_mirror_is_walked_or_hashed_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, level: AuditLevel
) -> None:
    """One long git, one look-up, and one walk of commits for their reach, which is not done again
    while refs stay.
    """
    started: list[str] = []
    real = git_command.run_git_sync

    def counting(*args: str, **kwargs: object) -> object:
        started.append(next(word for word in args if not word.startswith(("-", "core."))))
        return real(*args, **kwargs)  # type: ignore[arg-type]

    for module in GIT_USERS:
        monkeypatch.setattr(f"mirrord.{module}.run_git_sync", counting)
    known = site.examine(level).reached
    long = "rev-list" if level is AuditLevel.CLOSURE else "fsck"
    started.clear()
    again = examine(site.path, site.commits, level, earlier=known)
    assert sorted(started) == sorted(["cat-file", long])
    assert (again.reached, again.defects) == (known, {})


def test_reach_is_asked_anew_when_a_ref_moved(site: Site) -> None:
    known = site.examine(AuditLevel.QUICK).reached
    site.git("update-ref", "-d", "refs/heads/side")
    assert (
        examine(site.path, site.commits, AuditLevel.QUICK, earlier=known).reach[site.side[1]]
        is Reach.PIN
    )


def test_what_an_audit_does_yields_to_whoever_serves(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads are nice, and so are the gits they start; the worker that runs them is as it was."""
    nice: set[int] = set()
    real = git_command.run_git_sync

    def looking(*args: str, **kwargs: object) -> object:
        nice.add(os.getpriority(os.PRIO_PROCESS, 0))
        return real(*args, **kwargs)  # type: ignore[arg-type]

    for module in GIT_USERS:
        monkeypatch.setattr(f"mirrord.{module}.run_git_sync", looking)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    site.examine(AuditLevel.CONTENT)
    assert nice == {15}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.root
def test_a_daemon_under_nice_audits_as_an_ordinary_user() -> None:
    """Who may not raise a priority: each audit ended by a bug there."""
    script = "import os; from mirrord.host.processes import lower_priority as do; do(); print(os.nice(0))"
    become = ["setpriv", f"--reuid={anyone.NOBODY}", f"--regid={anyone.NOBODY}", "--clear-groups"]
    done = subprocess.run(
        ["nice", "-n19", *become, *anyone.python(), "-c", script], cwd="/", capture_output=True
    )
    assert done.stdout == b"19\n", done.stderr


def test_mirrors_in_whatever_state_raise_no_alarm() -> None:
    """A part of what `make faults` does, which looks a thousand times."""
    assert {row.lost for row in undamaged_rounds(seed=2, numbers=range(12))} == {"nothing"}
