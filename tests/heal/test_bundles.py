"""Bundles as donors of a heal: of this mirror and of others, whole and incremental, damaged and
hostile, dropped and sent.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from daemons import daemon
from gitrepos import Upstream, git
from heal_parts import Furnished, House, flip, refs_of, truncate, write

from mirrord import Client
from mirrord.bundles.bundle_file import header_bytes
from mirrord.cli.main import run
from mirrord.mirrors.history import list_records
from mirrord.mirrors.repository import HISTORY
from mirrord.model import AuditLevel, CommitState
from mirrord.protocol import Audit, StartAudit

pytestmark = pytest.mark.slow

HOLES = (
    "main",
    "main~1",
    "main~1^{tree}",
    "main:docs/page1.txt",
    "v1",
    "refs/mirrord/history",
    "refs/mirrord/history~1:refs",
)
SOUND: tuple[dict[CommitState, int], list[object]] = ({CommitState.OK: 3}, [])


def told(audit: Audit) -> str:
    return json.dumps([repair.to_json() for repair in audit.repairs])


def test_a_bundle_repairs_every_kind_of_hole(furnished: Furnished) -> None:
    """Upstream is away; tips, trees, blobs, a tag, and what only bundles have: records of the ref
    history and a kept tip.
    """
    kept = next(ref for ref in furnished.refs if "/kept/" in ref)

    async def body(house: House) -> None:
        await house.bundle(house.dropped / "monday.bundle")
        furnished.lose(*HOLES, kept)
        with house.without_upstream():
            healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert sum(healed.repairs[0].objects.values()) == len(HOLES) + 1
        assert list(healed.repairs[0].objects) == ["bundle monday.bundle"]
        git(house.mirror, "fsck", "--full")
        assert refs_of(house.mirror) == furnished.refs

    furnished.live(body)


def test_a_bundle_of_another_repository_is_a_donor(furnished: Furnished, tmp_path: Path) -> None:
    """One that plain git made of a fork: it names no mirror, and its refs have other names."""

    async def body(house: House) -> None:
        git(tmp_path, "clone", "-q", str(house.upstream.path), "fork")
        git(tmp_path / "fork", "branch", "-m", "main", "trunk")
        house.dropped.mkdir()
        git(
            tmp_path / "fork", "bundle", "create", "-q", str(house.dropped / "fork.bundle"), "trunk"
        )
        furnished.lose("main:docs/page1.txt", "main~1")
        with house.without_upstream():
            healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert healed.repairs[0].objects == {"bundle fork.bundle": 2}
        assert refs_of(house.mirror) == furnished.refs

    furnished.live(body)


def test_an_incremental_bundle_is_a_donor_on_top_of_the_mirror(furnished: Furnished) -> None:
    """Its pack is thin: deltas against what the mirror has. What came before its record it does not
    have.
    """

    async def body(house: House) -> None:
        records = await list_records(house.mirrors.repository(house.name))
        await house.bundle(house.dropped / "tuesday.bundle", since=records[-1].id)
        furnished.lose("main^{tree}", "main:after")
        with house.without_upstream():
            healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        furnished.restore_files()
        await house.bundle(house.dropped / "tuesday.bundle", since=records[-1].id)
        furnished.lose("main:docs/page1.txt")
        with house.without_upstream():
            open_still = await house.heal()
        assert open_still.repairs[0].unhealed_count == 1

    furnished.live(body)


def test_incremental_bundles_follow_the_one_they_build_on(furnished: Furnished) -> None:
    """Both commits of a line are lost: the later bundle can be opened when the earlier one has
    given.
    """

    async def body(house: House) -> None:
        records = await list_records(house.mirrors.repository(house.name))
        await house.bundle(house.dropped / "a-later.bundle", since=records[-1].id)
        await house.bundle(house.dropped / "b-whole.bundle")
        for file in (house.mirror / "objects/pack").iterdir():
            file.unlink()
        with house.without_upstream():
            healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert refs_of(house.mirror) == furnished.refs

    furnished.live(body)


@pytest.mark.parametrize("damage", ["altered", "truncated", "no bundle", "head only", "hostile"])
def test_a_bad_bundle_is_told_and_harms_nothing(furnished: Furnished, damage: str) -> None:
    """What is needed comes from upstream; nothing of the bundle comes in."""

    async def body(house: House) -> None:
        file = house.dropped / "bad.bundle"
        await house.bundle(file)
        if (
            damage == "hostile"
        ):  # missing objects, refs that are not allowed, the pack of another bundle
            blob = git(house.upstream.path, "hash-object", "-w", "--stdin", stdin=b"evil")
            pack = git_pack(house.upstream.path, blob)
            names = {
                "refs/heads/../../evil": "1" * 40,
                "refs/replace/" + furnished.object("main"): blob,
                "refs/heads/x": blob,
            }
            write(file, header_bytes([], names) + pack)
        elif damage == "altered":
            flip(file, 0.9)
        elif damage == "truncated":
            truncate(file, 0.7)
        else:
            write(
                file, b"hello" if damage == "no bundle" else file.read_bytes().partition(b"\n\n")[0]
            )
        furnished.lose("main:docs/page1.txt")
        with house.without_upstream():
            open_still = await house.heal()
        assert open_still.repairs[0].unhealed_count == 1
        assert ("bundle bad.bundle" in open_still.repairs[0].refusals) == (damage != "hostile"), (
            told(open_still)
        )
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert not any("bundle" in donor for donor in healed.repairs[0].objects)
        assert refs_of(house.mirror) == furnished.refs

    furnished.live(body)


def git_pack(repository: Path, *oids: str) -> bytes:
    done = git(
        repository,
        "pack-objects",
        "-q",
        str(repository / "p"),
        stdin="".join(f"{oid}\n" for oid in oids).encode(),
    )
    return (repository / f"p-{done}.pack").read_bytes()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_lost_ref_history_goes_on_from_the_newest_bundle(
    furnished: Furnished, *, is_known: bool
) -> None:
    """Records, name and kept refs are gone, and upstream has the rest: old records and kept tips are
    there again. Where the catalog knows the newest record, it is the newest again.
    """

    async def body(house: House) -> None:
        if not is_known:
            await house.catalog.update_mirror(house.name.key, history=None)
        records = await list_records(house.mirrors.repository(house.name))
        await house.bundle(house.dropped / "b.bundle")
        for file in (house.mirror / "objects/pack").iterdir():
            file.unlink()
        lines = (house.mirror / "packed-refs").read_bytes().splitlines(keepends=True)
        write(
            house.mirror / "packed-refs",
            b"".join(line for line in lines if b"/kept/" not in line and b"/history" not in line),
        )
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert ("continued from" in healed.repairs[0].history) != is_known
        after = await list_records(house.mirrors.repository(house.name))
        old = after if is_known else after[1:]
        assert [record.id for record in old] == [record.id for record in records]
        assert is_known or after[0].summary.startswith("continued by a heal")
        assert {ref: oid for ref, oid in refs_of(house.mirror).items() if ref != HISTORY} == {
            ref: oid for ref, oid in furnished.refs.items() if ref != HISTORY
        }

    furnished.live(body)


def test_a_ref_history_that_nobody_has_begins_anew_and_says_so(furnished: Furnished) -> None:
    async def body(house: House) -> None:
        furnished.lose("refs/mirrord/history~1:refs", "refs/mirrord/history~1")
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert "new one was begun" in healed.repairs[0].history
        (record,) = await list_records(house.mirrors.repository(house.name))
        assert record.summary.startswith("begun anew by a heal")

    furnished.live(body)


@pytest.mark.parametrize("part", ["", ":moved", ":"], ids=["commit", "blob", "tree"])
def test_refs_stay_where_only_the_newest_record_is_lost(furnished: Furnished, part: str) -> None:
    """They are newer than the record before it lists; the history continues from that record."""

    async def body(house: House) -> None:
        house.upstream.commit({"later": "1"})
        await house.mirrors.sync(house.name)
        repository = house.mirrors.repository(house.name)
        before, records = refs_of(house.mirror), await list_records(repository)
        furnished.lose(f"{HISTORY}{part}")
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND
        assert "continued from what is here" in healed.repairs[0].history
        after = refs_of(house.mirror)
        assert before.pop(HISTORY) != after.pop(HISTORY)
        assert after == before
        first, *old = await list_records(repository)
        assert first.summary.startswith("continued by a heal")
        assert old == records[1:]

    furnished.live(body)


def test_a_bundle_that_is_found_later_brings_the_old_records_back(
    furnished: Furnished, tmp_path: Path
) -> None:
    """After those made since a heal restarted the ref history; once, however often it is imported."""
    file = tmp_path / "found.bundle"

    async def body(house: House) -> None:
        await house.bundle(file)
        repository = house.mirrors.repository(house.name)
        old = [record.id for record in await list_records(repository)]
        furnished.lose("refs/mirrord/history", "refs/mirrord/history~1")
        await house.heal()
        house.upstream.commit({"later": "1"})
        await house.mirrors.sync(house.name)
        since = await list_records(repository)
        assert len(since) == 2
        for _ in range(2):
            await house.bundles.import_file(file)
            records = await list_records(repository)
            assert records[0].summary.startswith("import: ")
            assert [record.id for record in records[1:]] == [record.id for record in since] + old
        healed = await house.heal()
        assert (healed.counts, healed.findings) == SOUND

    furnished.live(body)


def test_a_lent_bundle_is_a_donor_for_its_time(furnished: Furnished, tmp_path: Path) -> None:
    async def body(house: House) -> None:
        await house.bundle(tmp_path / "lent")
        furnished.lose("main:docs/page1.txt")
        request = StartAudit(mirrors=["owner/name"], heal=True, level=AuditLevel.CONTENT)
        with house.without_upstream():
            assert (await house.audits.run(request)).affected
            with house.heals.lending(tmp_path / "lent"):
                healed = await house.audits.run(request)
        assert (healed.counts, healed.findings) == SOUND
        assert healed.repairs[0].objects == {"the bundle that was sent": 1}

    furnished.live(body)


def test_the_command_line_sends_a_bundle(tmp_path: Path) -> None:
    """As content through the socket; nothing of it stays, and a bad one ends before anything
    starts.
    """
    upstream = Upstream(tmp_path / "demo+project")
    commits = upstream.history(3)
    text = f'[upstream]\nurl = "file://{tmp_path}/{{owner}}+{{name}}"\n'

    def call(*words: str | Path) -> tuple[int, str, str]:
        out, err = (
            io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
        )
        with redirect_stdout(out), redirect_stderr(err):
            status = run(["--socket", str(running.socket), *map(str, words)])
        return status, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()

    with daemon(text) as running, Client(running.socket) as client:
        client.wait(client.add_mirror("demo/project"))
        client.pin("demo/project", commits[1])
        assert call("bundle", "create", "demo/project", tmp_path / "b")[0] == 0
        upstream.path.rename(tmp_path / "away")
        mirror = running.state_dir / "mirrors/demo__project"
        for file in (mirror / "objects/pack").glob("*.pack"):
            write(file, b"")
        (tmp_path / "bad").write_bytes(b"nothing")
        for words, hint in (
            (("--bundle", tmp_path / "b"), "name one mirror"),
            (("demo/project", "--bundle", tmp_path), "file"),
        ):
            status, _, err = call("heal", *words)
            assert (status, hint in err) == (2, True), err
        assert call("heal", "demo/project", "--bundle", tmp_path / "bad")[0] == 2
        assert call("heal", "no/body", "--bundle", tmp_path / "b")[0] == 4
        status, out, err = call("heal", "demo/project", "--bundle", tmp_path / "b")
        assert status == 0, (out, err)
        assert "objects from the bundle that was sent" in out
        audit = client.wait(client.start_audit(level=AuditLevel.CONTENT, heal=False))
        assert (audit.result or {})["findings"] == []
        assert [path.name for path in (running.state_dir / "quarantine").iterdir()] == ["damaged"]
