"""What a finding means to who asked: exit statuses, findings that are accepted, mirrors that are gone,
and errors in our words.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from heal_parts import Furnished, House, flip, refs_of, write
from pydantic import ValidationError

from mirrord import Client
from mirrord.cli.main import run
from mirrord.config import AuditSettings
from mirrord.errors import DamagedMirrorError, MirrordError
from mirrord.git.objects.repository import Objects
from mirrord.mirrors.repository import CONFIGURATION, HISTORY
from mirrord.model import AuditLevel, CommitState, FindingKind
from mirrord.protocol import StartAudit

pytestmark = pytest.mark.slow

ALL = ["owner__name-0", "owner__name-1", "owner__name-2"]


# -- exit statuses ---------------------------------------------------------------------------------


def call(running: Daemon, *words: str) -> tuple[int, str, str]:
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    )
    with redirect_stdout(out), redirect_stderr(err):
        status = run(["--socket", str(running.socket), *words])
    return status, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


def lose_pin(mirror: Path) -> None:
    git(
        mirror,
        "update-ref",
        "-d",
        git(mirror, "for-each-ref", "--format=%(refname)", "refs/mirrord/pins/"),
    )


def bloat_unrecorded(mirror: Path) -> None:
    """A damaged pack that no recorded commit needs."""
    blob = git(mirror, "hash-object", "-w", "--stdin", stdin=b"nobody needs it\n" * 50)
    git(mirror, "pack-objects", "-q", "objects/pack/pack", stdin=f"{blob}\n".encode())
    git(mirror, "prune-packed")
    flip(min((mirror / "objects/pack").glob("*.pack"), key=lambda pack: pack.stat().st_size), 0.6)


HARMLESS: dict[str, Callable[[Path], None]] = {
    "an unpinned commit": lose_pin,
    "a lost HEAD": lambda mirror: (mirror / "HEAD").unlink(),
    "an unreadable HEAD": lambda mirror: write(mirror / "HEAD", b"\0" * 20),
    "a damaged pack that nobody needs": bloat_unrecorded,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("statuses")
    upstream = Upstream(root / "demo+project")
    commits = upstream.history(3)
    accept = '[audit]\naccept = ["planted Demo/project hooks/*"]\n'
    with daemon(f'[upstream]\nurl = "file://{root}/{{owner}}+{{name}}"\n{accept}') as running:
        with Client(running.socket) as client:
            client.wait(client.add_mirror("demo/project"))
            client.pin("demo/project", commits[1])
        yield running


@pytest.mark.parametrize("damage", HARMLESS)
def test_what_affects_no_instance_is_status_8_until_it_is_healed(
    running: Daemon, damage: str
) -> None:
    HARMLESS[damage](running.state_dir / "mirrors/demo__project")
    status, out, _ = call(running, "audit", "--no-heal", "--level", "content")
    assert (status, "1 finding" in out or "2 findings" in out) == (8, True), out
    status, out, err = call(running, "heal")
    assert (status, "healed" in out) == (0, True), (out, err)
    assert call(running, "audit", "--no-heal", "--level", "content")[0] == 0


def test_a_mirror_that_git_cannot_open_is_status_8_and_in_our_words(running: Daemon) -> None:
    """A checkout says what to do, and a sync does not follow upstream into it."""
    mirror = running.state_dir / "mirrors/demo__project"
    (mirror / "HEAD").unlink()
    (mirror / "HEAD").mkdir()
    status, _, err = call(running, "checkout", "demo/project@main~2")
    assert (status, "heal" in err) == (8, True), err
    assert not {"Repository", "not a git repository", str(mirror)} & set(err.split()), err
    assert call(running, "mirror", "sync", "demo/project")[0] == 8
    assert call(running, "mirror", "show", "demo/project")[0] == 8
    assert call(running, "heal", "demo/project")[0] == 0
    status, out, _ = call(running, "mirror", "show", "demo/project", "--json")
    assert (status, json.loads(out)["state"]) == (0, "ready")


def test_a_finding_that_is_accepted_is_told_and_no_failure(running: Daemon) -> None:
    """And starts no heal; beside it any other finding is a failure."""
    mirror = running.state_dir / "mirrors/demo__project"
    write(mirror / "hooks/post-update", b"#!/bin/sh\n")
    status, out, _ = call(running, "audit", "--level", "quick")
    assert (status, "planted, accepted" in out, "1 finding accepted" in out) == (0, True, True), out
    write(mirror / "commondir", b"elsewhere\n")
    assert call(running, "audit", "--no-heal", "--level", "quick")[0] == 8
    assert (mirror / "hooks/post-update").exists()
    assert call(running, "heal")[0] == 0
    assert not (mirror / "hooks/post-update").exists()


# -- a mirror that is gone -------------------------------------------------------------------------


def as_file(mirror: Path) -> None:
    shutil.rmtree(mirror)
    mirror.write_bytes(b"what is this\n")


GONE: dict[str, Callable[[Path], object]] = {
    "deleted": shutil.rmtree,
    "renamed": lambda mirror: mirror.rename(mirror.parent.parent / "aside"),
    "a file": as_file,
}


@pytest.mark.parametrize("donor", ["upstream", "bundle"])
@pytest.mark.parametrize("how", GONE)
def test_a_mirror_that_is_gone_comes_back(furnished: Furnished, how: str, donor: str) -> None:
    """From upstream, with what only pins and kept refs had where a bundle has it; from the bundle
    alone where upstream is away: then all of it, the ref history too.
    """

    async def body(house: House) -> None:
        if donor == "bundle":
            await house.bundle(house.dropped / "b.bundle")
        GONE[how](house.mirror)
        found = await house.audits.run(StartAudit(heal=False, level=AuditLevel.QUICK))
        assert (found.counts, found.affected) == ({CommitState.NOT_MIRRORED: 3}, ALL)
        assert FindingKind.LAYOUT in {finding.kind for finding in found.findings}
        if donor == "bundle":
            with house.without_upstream():
                healed = await house.heal()
        else:
            healed = await house.heal()
        assert (healed.counts, [finding.detail for finding in healed.findings]) == (
            {CommitState.OK: 3},
            [],
        )
        git(house.mirror, "fsck", "--full")

    furnished.live(body)
    shutil.rmtree(furnished.root / "state/aside", ignore_errors=True)
    now = refs_of(furnished.mirror)
    lasting = {
        ref: oid
        for ref, oid in furnished.refs.items()
        if donor == "bundle" or ("/kept/" not in ref and ref != HISTORY)
    }
    assert {ref: now.get(ref) for ref in lasting} == lasting


def test_a_mirror_that_nobody_has_stays_gone_and_says_so(furnished: Furnished) -> None:
    async def body(house: House) -> None:
        shutil.rmtree(house.mirror)
        with house.without_upstream():
            audit = await house.heal()
        assert not house.mirror.exists()
        assert audit.affected == ALL
        assert audit.repairs[0].error

    furnished.live(body)


# -- reports -------------------------------------------------------------------------------------


def test_a_sync_does_not_follow_upstream_with_a_foreign_configuration(furnished: Furnished) -> None:
    """With sha256 in it, git sees no tag, and a sync would take them all away."""

    async def body(house: House) -> None:
        before = refs_of(house.mirror)
        write(
            house.mirror / "config",
            CONFIGURATION.encode() + b"[extensions]\n\tobjectFormat = sha256\n",
        )
        for work in (house.mirrors.sync, house.mirrors.maintain):
            with pytest.raises(DamagedMirrorError, match="objectFormat"):
                await work(house.name)
        await house.heal()
        assert refs_of(house.mirror) == before
        assert (await house.mirrors.sync(house.name)).changed is False

    furnished.live(body)


def test_a_history_that_lost_records_and_went_on_is_joined(furnished: Furnished) -> None:
    """The record that the catalog knows comes back, and what was recorded since stays."""

    async def body(house: House) -> None:
        git(house.mirror, "update-ref", HISTORY, f"{HISTORY}~1")
        house.upstream.git("branch", "since", "HEAD~1")
        await house.mirrors.sync(house.name)
        since = refs_of(house.mirror)[HISTORY]
        found = await house.audits.run(StartAudit(heal=False, level=AuditLevel.QUICK))
        assert [(finding.kind, finding.subject) for finding in found.findings] == [
            (FindingKind.REF_MOVED, HISTORY)
        ]
        healed = await house.heal()
        assert healed.findings == []
        records = git(house.mirror, "rev-list", HISTORY).split()
        assert {since, furnished.refs[HISTORY]} <= set(records)
        house.upstream.git("branch", "-D", "since")
        await house.mirrors.sync(house.name)
        assert (
            await house.audits.run(StartAudit(heal=False, level=AuditLevel.CONTENT))
        ).findings == []

    furnished.live(body)


def test_pins_that_are_made_meanwhile_are_no_finding(furnished: Furnished) -> None:
    """Refs come before rows; the holder of the mirror's lock may be between the two."""

    async def body(house: House) -> None:
        tip = furnished.refs["refs/heads/main"]
        git(house.mirror, "update-ref", f"refs/mirrord/pins/person/9/{tip}", tip)
        async with house.mirrors.lock(house.name):
            found = await house.audits.run(StartAudit(heal=False, level=AuditLevel.QUICK))
        assert found.findings == []
        found = await house.audits.run(StartAudit(heal=False, level=AuditLevel.QUICK))
        assert [finding.kind for finding in found.findings] == [FindingKind.PIN_UNKNOWN]

    furnished.live(body)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("plantd", "did you mean planted?"),
        ("planted psf", "letters, digits"),
        ("planted a/b c d", "is not KIND"),
    ],
)
def test_what_can_be_accepted_is_checked(line: str, fault: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(fault)):
        AuditSettings(accept=(line,))


@pytest.mark.parametrize("what", ["HEAD", "objects", "refs"])
def test_a_damaged_repository_is_told_in_our_words(furnished: Furnished, what: str) -> None:
    path = furnished.mirror / what
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(MirrordError) as told:
        Objects(furnished.mirror)
    assert (told.value.code, told.value.exit_status) == ("corrupt-object", 8)
    assert "mirrord heal" in str(told.value.hint)
