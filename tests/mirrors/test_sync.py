"""Syncing a mirror from real upstreams: refs, kept tips, history, faults, crashes."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from forge import serving
from gitrepos import Upstream, git

from mirrord.config import Settings
from mirrord.errors import (
    MirrordError,
    UpstreamEmptyError,
    UpstreamNotFoundError,
    UpstreamUnavailableError,
)
from mirrord.git.command import Git, GitResult
from mirrord.host.trash import Trash
from mirrord.mirrors.history import diff_records, list_records, read_record
from mirrord.mirrors.quarantine import Quarantine
from mirrord.mirrors.refs import JOURNAL, Moves, commit, journal_text, recover
from mirrord.mirrors.repository import HISTORY, INCOMING, KEPT, Repository
from mirrord.mirrors.sync import sync
from mirrord.mirrors.upstreams.credentials import Credentials
from mirrord.mirrors.upstreams.fetching import Fetcher
from mirrord.mirrors.upstreams.upstream import parse_upstream
from mirrord.model import MirrorName
from mirrord.protocol import Synced

HEADS_AND_TAGS = ("refs/heads/*", "refs/tags/*")
VERBS = {"cat-file", "fetch", "merge-base", "symbolic-ref", "update-ref"}
Body = Callable[[], Awaitable[object]]


class Site:
    """A mirror, its upstream and a quarantine below one directory."""

    def __init__(self, root: Path, upstream: Upstream) -> None:
        self.root = root
        self.upstream = upstream
        self.quarantine = Quarantine(root / "quarantine", Trash())
        self.quarantine.root.mkdir(parents=True)
        name = MirrorName("owner", "name")
        self.mirror = Repository(Git(home=root / "home"), name, root / "mirrors" / str(name))
        self.mirror.path.parent.mkdir()
        anyio.run(self.mirror.create)

    def fetcher(self, url: str | None = None) -> Fetcher:
        return Fetcher(
            self.mirror,
            parse_upstream(url or self.upstream.url),
            self.quarantine,
            timedelta(seconds=30),
            Credentials(Settings),
            first_pause=timedelta(),
        )

    def sync(self, *patterns: str, url: str | None = None) -> Synced:
        async def body() -> Synced:
            return await sync(self.fetcher(url), patterns or HEADS_AND_TAGS)

        return anyio.run(body)

    def refs(self) -> dict[str, str]:
        return anyio.run(self.mirror.all_refs)

    def fsck(self) -> None:
        git(self.mirror.path, "fsck", "--full", "--strict", "--no-dangling")

    def snapshot(self) -> dict[str, tuple[int, int, int]]:
        """Every file of the mirror, as a write to it would change it."""
        found = {}
        for directory, _, files in os.walk(self.mirror.path):
            for path in [Path(directory), *(Path(directory) / file for file in files)]:
                stat = path.lstat()
                found[str(path)] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        return found


@pytest.fixture
def site(tmp_path: Path, make_upstream: Callable[..., Upstream]) -> Site:
    upstream = make_upstream()
    upstream.history(3)
    upstream.git("tag", "-a", "v1", "-m", "one", "HEAD~1")
    return Site(tmp_path / "state", upstream)


def test_a_mirror_has_the_hashes_of_its_upstream(site: Site) -> None:
    """Branches, annotated tags and HEAD are those of upstream."""
    site.upstream.git("branch", "topic", "HEAD~2")
    result = site.sync()
    theirs = {
        ref: oid
        for oid, ref in (
            line.split("\t")
            for line in git(site.upstream.path, "ls-remote", site.upstream.url).splitlines()
        )
        if ref != "HEAD" and not ref.endswith("^{}")
    }
    assert {
        ref: oid for ref, oid in site.refs().items() if not ref.startswith("refs/mirrord/")
    } == theirs
    assert result.summary == "3 created"
    assert result.default_branch == "main"
    site.fsck()


def test_a_sync_without_news_writes_nothing(site: Site) -> None:
    """Not a file, not a time stamp."""
    site.sync()
    before = site.snapshot()
    assert not site.sync().changed
    assert site.snapshot() == before


def test_a_first_sync_writes_its_refs_without_a_git(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file: each object was seen when it came. Later moves are git's."""
    started, run = [], Git.run

    async def counted(self: Git, *args: str, **options: Any) -> GitResult:
        started.append(next(word for word in args if word in VERBS))
        return await run(self, *args, **options)

    monkeypatch.setattr(Git, "run", counted)
    site.sync()
    assert sorted(started) == ["cat-file", "fetch", "fetch"]  # the first asks for the refs
    assert site.refs().keys() == {"refs/heads/main", "refs/tags/v1", HISTORY}
    assert not [path for path in (site.mirror.path / "refs").rglob("*") if path.is_file()]
    site.fsck()
    started.clear()
    site.upstream.commit({"other": "x"})
    site.sync()
    assert "update-ref" in started
    site.fsck()


def test_a_fetch_into_quarantine_changes_nothing_in_the_mirror(site: Site) -> None:
    """No ref, no file: git's own guard is off, because git 2.53 refuses every fetch with it."""
    site.sync()
    new = site.upstream.commit({"other": "x"})
    site.upstream.git("tag", "-a", "v2", "-m", "two")
    before, refs, objects = site.snapshot(), site.refs(), site.quarantine.root / "objects"
    objects.mkdir()

    async def body() -> None:
        await site.fetcher().fetch_into(objects, [new], site.upstream.url)

    anyio.run(body)
    assert any(objects.glob("pack/*.idx"))
    assert site.refs() == refs
    assert site.snapshot() == before


def test_a_force_push_keeps_the_old_tip(site: Site) -> None:
    """The branch follows, the old tip stays with its whole history."""
    site.sync()
    old = site.upstream.git("rev-parse", "HEAD")
    site.upstream.git("reset", "--quiet", "--hard", "HEAD~1")
    new = site.upstream.commit({"other": "x"})
    result = site.sync()
    refs = site.refs()
    assert refs["refs/heads/main"] == new
    assert refs[f"{KEPT}{old}"] == old
    assert [(c.kind, c.kept) for c in result.changes] == [("forced", True)]
    site.fsck()


def test_a_forward_push_keeps_nothing(site: Site) -> None:
    """The new tip reaches the old one."""
    site.sync()
    site.upstream.commit({"other": "x"})
    assert [(c.kind, c.kept) for c in site.sync().changes] == [("forwarded", False)]
    assert not [ref for ref in site.refs() if ref.startswith(KEPT)]


def test_a_deletion_keeps_the_tip(site: Site) -> None:
    """A branch and an annotated tag that upstream deleted are still there, under our name."""
    site.upstream.git("checkout", "--quiet", "-b", "topic")
    tip = site.upstream.commit({"topic": "x"})
    site.upstream.git("checkout", "--quiet", "main")
    site.sync()
    tag = site.refs()["refs/tags/v1"]
    site.upstream.git("branch", "-D", "topic")
    site.upstream.git("tag", "-d", "v1")
    site.sync()
    refs = site.refs()
    assert "refs/heads/topic" not in refs
    assert refs[f"{KEPT}{tip}"] == tip
    assert refs[f"{KEPT}{tag}"] == tag


def test_a_branch_may_become_a_directory_of_branches(site: Site) -> None:
    """`a` renamed to `a/b`, and back."""
    site.upstream.git("branch", "a")
    site.sync()
    site.upstream.git("branch", "-m", "a", "a/b")
    site.sync()
    assert "refs/heads/a/b" in site.refs()
    site.upstream.git("branch", "-m", "a/b", "a2")
    site.upstream.git("branch", "-m", "a2", "a")
    site.sync()
    assert "refs/heads/a" in site.refs()


def test_upstream_cannot_plant_refs_of_ours(site: Site) -> None:
    """Neither our namespace nor replace refs come from outside, whatever the patterns say."""
    head = site.upstream.git("rev-parse", "HEAD")
    for ref in (
        f"{KEPT}{'1' * 40}",
        "refs/mirrord/pins/person/0/x",
        HISTORY,
        f"refs/replace/{head}",
        "refs/other/x",
    ):
        site.upstream.git("update-ref", ref, f"{head}~1")
    site.sync("refs/*")
    refs = site.refs()
    assert refs[HISTORY] != site.upstream.git("rev-parse", "HEAD~1")
    assert [ref for ref in refs if ref.startswith("refs/mirrord/")] == [HISTORY]
    assert not [ref for ref in refs if ref.startswith("refs/replace/")]
    assert "refs/other/x" in refs


def test_upstream_cannot_prune_refs_of_ours(site: Site) -> None:
    """A pin stays when upstream has fewer refs than before."""
    site.sync()
    pin = "refs/mirrord/pins/person/0/" + site.upstream.git("rev-parse", "HEAD~2")
    git(site.mirror.path, "update-ref", pin, site.upstream.git("rev-parse", "HEAD~2"))
    site.upstream.git("tag", "-d", "v1")
    site.sync("refs/*")
    assert pin in site.refs()


def test_pull_request_heads_come_when_configured(site: Site) -> None:
    """A pattern with the star in the middle takes what it names and nothing else."""
    site.upstream.git("update-ref", "refs/pull/1/head", "HEAD~1")
    site.upstream.git("update-ref", "refs/pull/1/merge", "HEAD~2")
    site.sync(*HEADS_AND_TAGS, "refs/pull/*/head")
    assert "refs/pull/1/head" in site.refs()
    assert "refs/pull/1/merge" not in site.refs()


# -- ref history -----------------------------------------------------------------------------------


@pytest.mark.parametrize("speaks_v2", [True, False])
def test_refs_that_nobody_follows_do_not_cross_the_wire(site: Site, speaks_v2: bool) -> None:
    """HEAD and the configured refs are asked for by prefix; an old upstream sends all it has."""
    site.upstream.git("update-ref", "refs/heads/café", "HEAD")
    tip = site.upstream.git("rev-parse", "HEAD").strip()
    lines = "".join(f"create refs/pull/{number}/head {tip}\n" for number in range(2000))
    site.upstream.git("update-ref", "--stdin", stdin=lines.encode())
    with serving(site.upstream.path.parent) as forge:
        forge.speaks_v2 = speaks_v2
        url = f"{forge.url}/{site.upstream.path.name}/.git"
        first = site.sync(url=url)
        assert {"refs/heads/main", "refs/heads/café", "refs/tags/v1"} <= site.refs().keys()
        assert (first.ref_count, first.default_branch) == (3, "main")
        forge.sent_bytes, before = 0, len(forge.requests)
        assert not site.sync(url=url).changed
        assert (forge.sent_bytes < 5000) == speaks_v2
        assert len(forge.requests) - before == 2
        site.sync("refs/heads/*", "refs/pull/7*", url=url)
        assert "refs/pull/777/head" in site.refs() and "refs/pull/1/head" not in site.refs()


def test_an_upstream_with_sha_256_is_named(site: Site, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--object-format=sha256", "other")
    git(tmp_path / "other", "commit", "--quiet", "--allow-empty", "--message=x")
    with pytest.raises(MirrordError, match="SHA-256"):
        site.sync(url=f"file://{tmp_path}/other")


def test_a_record_costs_what_moved(site: Site) -> None:
    """Records of many refs share one list; each still tells all refs of its time, in any order."""
    head = site.upstream.git("rev-parse", "HEAD")
    new = (f"create refs/tags/t{n} {head}\n" for n in range(40))
    site.upstream.git("update-ref", "--stdin", stdin="".join(new).encode())
    seen = []
    for number in range(8):
        site.upstream.git("tag", "--force", f"t{number}", site.upstream.commit({"n": str(number)}))
        site.upstream.git("tag", "--delete", f"t{number + 20}")
        site.sync()
        refs = site.refs()
        seen.append({ref: oid for ref, oid in refs.items() if not ref.startswith("refs/mirrord/")})
    site.fsck()
    tips = git(site.mirror.path, "rev-list", "--reverse", HISTORY).split()
    lists = {git(site.mirror.path, "rev-parse", f"{tip}:refs") for tip in tips}
    assert (len(tips), len(lists)) == (8, 2)

    async def recorded(tip: str) -> dict[str, str]:
        return (await read_record(site.mirror, tip)).followed

    assert [anyio.run(recorded, tip) for tip in tips] == seen


def test_each_change_is_recorded(site: Site) -> None:
    """The newest record is the set of refs as it is; the one before is as it was."""
    site.sync()
    first = {ref: oid for ref, oid in site.refs().items() if not ref.startswith("refs/mirrord/")}
    site.upstream.commit({"x": "y"})
    site.upstream.git("tag", "-d", "v1")
    site.sync()

    async def body() -> None:
        newest, oldest = await list_records(site.mirror)
        recorded = await read_record(site.mirror, oldest.id)
        assert (recorded.followed, recorded.head) == (first, "refs/heads/main")
        assert (newest.ref_count, oldest.ref_count) == (1, 2)
        assert newest.summary == "sync: 1 forwarded, 1 deleted"
        changes = await diff_records(
            site.mirror, oldest.id, newest.id, await site.mirror.all_refs()
        )
        assert [(c.ref, c.kind) for c in changes] == [
            ("refs/heads/main", "forwarded"),
            ("refs/tags/v1", "deleted"),
        ]

    anyio.run(body)


# -- bad upstreams ---------------------------------------------------------------------------------


def test_a_damaged_ref_does_not_block_the_rest(site: Site) -> None:
    """A blob is gone upstream that one branch needs: that branch is a fault, all others arrive."""
    site.upstream.git("checkout", "--quiet", "-b", "broken")
    broken = site.upstream.commit({"lost": "only here"})
    site.upstream.git("checkout", "--quiet", "main")
    for n in range(6):
        site.upstream.git("checkout", "--quiet", "-b", f"good{n}", "main")
        site.upstream.commit({f"good{n}": str(n)})
    blob = site.upstream.git("rev-parse", f"{broken}:lost")
    (site.upstream.path / ".git/objects" / blob[:2] / blob[2:]).unlink()
    result = site.sync()
    assert [(fault.ref, fault.commit) for fault in result.faults] == [("refs/heads/broken", broken)]
    assert {f"refs/heads/good{n}" for n in range(6)} <= site.refs().keys()
    assert "refs/heads/broken" not in site.refs()
    assert not [ref for ref in site.refs() if ref.startswith(INCOMING)]
    assert not list(site.quarantine.root.iterdir())
    site.fsck()


def test_a_connection_that_breaks_once_is_no_fault_of_the_only_new_object(site: Site) -> None:
    """It is asked for again at once: blamed, its refs would stay behind until the next sync, while
    the others move.
    """
    with serving(site.upstream.path.parent) as forge:
        url = f"{forge.url}/{site.upstream.path.name}/.git"
        site.sync(url=url)
        new = site.upstream.commit({"new": "1"})
        forge.packs_cut = 1
        assert not site.sync(url=url).faults
        assert forge.packs_cut == 0
        assert site.refs()["refs/heads/main"] == new
        site.upstream.commit({"new": "2"})
        forge.packs_cut = 99
        with pytest.raises(UpstreamUnavailableError, match="the connection was cut"):
            site.sync(url=url)
        assert forge.packs_cut == 89
        assert site.refs()["refs/heads/main"] == new


@pytest.mark.parametrize(
    ("cuts", "garbles", "empties"), [(1, 0, 0), (9, 0, 0), (0, 6, 0), (2, 2, 0), (0, 0, 2)]
)
def test_a_line_that_breaks_now_and_then_makes_no_ref_a_fault(
    site: Site, cuts: int, garbles: int, empties: int
) -> None:
    """What was asked for when it broke is asked for again, in parts, until the line holds."""
    for n in range(8):
        site.upstream.git("checkout", "--quiet", "--orphan", f"b{n}")
        site.upstream.commit({"a": f"{n}\n" * 50})
    site.upstream.git("checkout", "--quiet", "main")
    with serving(site.upstream.path.parent) as forge:
        forge.packs_cut, forge.packs_garbled, forge.packs_emptied = cuts, garbles, empties
        url = f"{forge.url}/{site.upstream.path.name}/.git"
        result = site.sync(url=url)
        assert (forge.packs_cut, forge.packs_garbled, forge.packs_emptied) == (0, 0, 0)
        assert result.faults == []
        assert site.refs()["refs/heads/main"] == site.upstream.git("rev-parse", "main")
        # one new commit, that nothing else tells apart from a damaged one
        new = site.upstream.commit({"new": "1"})
        forge.packs_cut, forge.packs_garbled, forge.packs_emptied = cuts, min(garbles, 3), empties
        assert site.sync(url=url).faults == []
    assert site.refs()["refs/heads/main"] == new


def test_a_ref_that_breaks_later_stays_where_it_was(site: Site) -> None:
    """What we have of it is served on; what upstream cannot give is reported."""
    site.upstream.git("checkout", "--quiet", "-b", "broken")
    good = site.upstream.commit({"fine": "1"})
    site.sync()
    bad = site.upstream.commit({"lost": "only here"})
    blob = site.upstream.git("rev-parse", f"{bad}:lost")
    (site.upstream.path / ".git/objects" / blob[:2] / blob[2:]).unlink()
    assert [fault.commit for fault in site.sync().faults] == [bad]
    assert site.refs()["refs/heads/broken"] == good


def test_an_empty_upstream_changes_nothing(
    site: Site, make_upstream: Callable[..., Upstream]
) -> None:
    """It has its own error, and the mirror keeps its refs."""
    site.sync()
    before = site.snapshot()
    with pytest.raises(UpstreamEmptyError):
        site.sync(url=make_upstream("empty").url)
    assert site.snapshot() == before


def test_an_absent_upstream_changes_nothing(site: Site, tmp_path: Path) -> None:
    site.sync()
    before = site.snapshot()
    with pytest.raises(UpstreamNotFoundError):
        site.sync(url=f"file://{tmp_path}/absent")
    assert site.snapshot() == before


def test_a_plain_path_is_an_upstream(site: Site) -> None:
    assert site.sync(url=str(site.upstream.path)).changed


# -- transactions ----------------------------------------------------------------------------------


def test_a_refused_transaction_moves_nothing(site: Site) -> None:
    """One impossible move takes all others with it."""
    site.sync()
    before = site.refs()
    head = before["refs/heads/main"]
    moves: Moves = {"refs/heads/new": (None, head), "refs/heads/main": ("1" * 40, head)}
    with pytest.raises(MirrordError):
        anyio.run(commit, site.mirror, moves)
    assert site.refs() == before
    assert not (site.mirror.path / JOURNAL).exists()


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_an_interrupted_transaction_is_finished(site: Site, moved: int) -> None:
    """A crash after any number of moves: the next start makes the others."""
    site.sync()
    head = site.refs()["refs/heads/main"]
    tag = site.refs()["refs/tags/v1"]
    moves: Moves = {"refs/heads/a/b": (None, head), "refs/tags/v1": (tag, None)}
    (site.mirror.path / JOURNAL).write_text(journal_text(moves), encoding="utf-8")
    for command in (["update-ref", "refs/heads/a/b", head], ["update-ref", "-d", "refs/tags/v1"])[
        :moved
    ]:
        git(site.mirror.path, *command)
    anyio.run(recover, site.mirror)
    assert site.refs()["refs/heads/a/b"] == head
    assert "refs/tags/v1" not in site.refs()
    assert not (site.mirror.path / JOURNAL).exists()


def test_first_refs_name_what_is_there(site: Site) -> None:
    """Many first refs are written at once, and one that names nothing takes all with it."""
    site.sync()
    head = site.refs()["refs/heads/main"]
    empty = replace(site.mirror, path=site.mirror.path.with_name("empty"))
    anyio.run(empty.create)
    (empty.objects / "info/alternates").write_text(f"{site.mirror.objects}\n")
    moves: Moves = {f"refs/heads/b{n}": (None, head) for n in range(60)}
    with pytest.raises(MirrordError):
        anyio.run(commit, empty, moves | {"refs/tags/none": (None, "1" * 40)})
    assert anyio.run(empty.all_refs) == {}
    anyio.run(commit, empty, moves)
    assert anyio.run(empty.all_refs) == dict.fromkeys(moves, head)


def test_many_refs_are_packed(site: Site) -> None:
    """A thousand new refs are not a thousand files."""
    head = site.upstream.git("rev-parse", "HEAD")
    site.upstream.git(
        "update-ref",
        "--stdin",
        stdin="".join(f"create refs/heads/b{n} {head}\n" for n in range(1000)).encode(),
    )
    assert site.sync().ref_count == 1002
    assert len([*(site.mirror.path / "refs/heads").rglob("*")]) < 10
