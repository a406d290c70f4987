"""The heal against real damage, with real donors: git fsck and the audit are the judges, and no bad
byte is ever thrown away. MIRRORD_SEED chooses a third of it; all is done with MIRRORD_DAMAGES=all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import git
from heal_parts import Furnished, House, a_third, flip, refs_of, snapshot, truncate, write

from mirrord.mirrors.repository import HISTORY
from mirrord.model import AuditLevel, CommitState, MirrorName
from mirrord.protocol import Audit, StartAudit

pytestmark = pytest.mark.slow

FORK = MirrorName("fork", "name")


# -- what is done to it ----------------------------------------------------------------------------


def derived(it: Furnished, pattern: str) -> Path:
    return next((it.mirror / "objects").glob(pattern))


def rename_pack(it: Furnished, name: str) -> Path:
    """git reads each `*.idx`; the multi-pack index would name the old one."""
    pack = it.pack()
    for file in list(pack.parent.glob("multi-pack-index*")):
        file.unlink()
    for file in list(pack.parent.glob(f"{pack.stem}.*")):
        file.rename(file.with_name(name + file.suffix))
    return pack.with_name(f"{name}.pack")


def loose_blob(it: Furnished) -> Path:
    it.explode()
    return it.loose(it.object("main:docs/page2.txt"))


def swap(it: Furnished) -> None:
    path = loose_blob(it)
    write(path, it.loose(it.object("main:docs/page1.txt")).read_bytes())


def delete_ref(it: Furnished, ref: str) -> None:
    git(it.mirror, "update-ref", "-d", ref)


def kept(it: Furnished) -> str:
    return next(ref for ref in it.refs if ref.startswith("refs/mirrord/kept/"))


def pin_of(it: Furnished, owner: str) -> str:
    return next(ref for ref in it.refs if ref.startswith(f"refs/mirrord/pins/{owner}/"))


def append_packed(it: Furnished, line: bytes) -> None:
    path = it.mirror / "packed-refs"
    write(path, path.read_bytes() + line)


def drop_packed_line(it: Furnished, part: str) -> None:
    path = it.mirror / "packed-refs"
    write(
        path,
        b"".join(
            line
            for line in path.read_bytes().splitlines(keepends=True)
            if part.encode() not in line
        ),
    )


FAULTS: dict[str, Callable[[Furnished], object]] = {
    "missing commit": lambda it: it.lose("main~2"),
    "missing tip": lambda it: it.lose("main"),
    "missing tree": lambda it: it.lose("main~1:docs"),
    "missing root tree": lambda it: it.lose("main^{tree}"),
    "missing blob": lambda it: it.lose("main:docs/page1.txt"),
    "missing tag": lambda it: it.lose("v1"),
    "truncated loose object": lambda it: truncate(loose_blob(it)),
    "empty loose object": lambda it: write(loose_blob(it), b""),
    "altered loose object": lambda it: flip(loose_blob(it)),
    "swapped loose object": swap,
    "altered pack": lambda it: flip(it.pack()),
    "altered pack header": lambda it: flip(it.pack(), 0.0),
    "altered pack trailer": lambda it: flip(it.pack(), 1.0),
    "truncated pack": lambda it: truncate(it.pack()),
    "nearly whole pack": lambda it: truncate(it.pack(), 0.95),
    "pack of a few bytes": lambda it: write(it.pack(), it.pack().read_bytes()[:14]),
    "empty pack": lambda it: write(it.pack(), b""),
    "missing pack": lambda it: it.pack().unlink(),
    "missing pack and index": lambda it: [
        file.unlink() for file in it.pack().parent.glob(f"{it.pack().stem}.*")
    ],
    "sound pack of another name": lambda it: rename_pack(it, "old.backup"),
    "altered pack of another name": lambda it: flip(rename_pack(it, "backup")),
    "empty pack of another name": lambda it: write(rename_pack(it, "backup"), b""),
    "altered index of another name": lambda it: flip(
        rename_pack(it, "backup").with_suffix(".idx"), 0.9
    ),
    "altered index": lambda it: flip(it.pack().with_suffix(".idx"), 0.9),
    "truncated index": lambda it: truncate(it.pack().with_suffix(".idx")),
    "missing index": lambda it: it.pack().with_suffix(".idx").unlink(),
    "altered pack and truncated index": lambda it: (
        flip(it.pack(), 0.9),
        truncate(it.pack().with_suffix(".idx")),
    ),
    "altered rev": lambda it: flip(it.pack().with_suffix(".rev")),
    "truncated multi-pack index": lambda it: truncate(derived(it, "pack/multi-pack-index")),
    "altered commit-graph": lambda it: flip(derived(it, "info/commit-graphs/*.graph")),
    "truncated commit-graph chain": lambda it: truncate(
        derived(it, "info/commit-graphs/commit-graph-chain")
    ),
    "planted alternates": lambda it: write(
        it.mirror / "objects/info/alternates", b"/nonexistent/objects\n"
    ),
    "lost HEAD": lambda it: (it.mirror / "HEAD").unlink(),
    "empty HEAD": lambda it: write(it.mirror / "HEAD", b""),
    "lost config": lambda it: (it.mirror / "config").unlink(),
    "garbled config": lambda it: write(it.mirror / "config", b"\0\0[core"),
    "truncated config": lambda it: truncate(it.mirror / "config"),
    "zero-length branch": lambda it: write(it.mirror / "refs/heads/main", b""),
    "zero-length pin": lambda it: write(it.mirror / pin_of(it, "dataset"), b""),
    "garbled kept ref": lambda it: (
        drop_packed_line(it, "/kept/"),
        write(it.mirror / kept(it), b"\0" * 41),
    ),
    "zero-length ref history": lambda it: write(it.mirror / "refs/mirrord/history", b""),
    "bad line in packed-refs": lambda it: append_packed(it, b"what is this\n"),
    "unfinished packed-refs": lambda it: truncate(it.mirror / "packed-refs", 0.8),
    "lost packed-refs": lambda it: (it.mirror / "packed-refs").unlink(),
    "deleted branch": lambda it: delete_ref(it, "refs/heads/main"),
    "deleted branch, and a lock in the way": lambda it: (
        delete_ref(it, "refs/heads/main"),
        write(it.mirror / "packed-refs.lock", b""),
    ),
    "deleted pin of a dataset": lambda it: delete_ref(it, pin_of(it, "dataset")),
    "deleted ref history": lambda it: delete_ref(it, "refs/mirrord/history"),
    "planted replace ref": lambda it: git(
        it.mirror, "replace", it.object("main"), it.object("main~1")
    ),
    "planted packed replace ref": lambda it: (
        git(it.mirror, "replace", it.object("main"), it.object("main~1")),
        git(it.mirror, "pack-refs", "--all"),
    ),
}


LOSES_HISTORY = {
    "altered pack",
    "altered pack of another name",
    "empty pack of another name",
    "truncated pack",
    "pack of a few bytes",
    "empty pack",
    "missing pack",
    "missing pack and index",
    "altered pack and truncated index",
}
"""Only this mirror has its ref history: what cannot be salvaged of it is gone."""


@pytest.mark.parametrize("fault", a_third(FAULTS))
def test_every_fault_is_found_and_healed(furnished: Furnished, fault: str) -> None:
    """By audit first; afterwards git, the audit and every ref are as before, and the bad bytes are
    in quarantine.
    """
    FAULTS[fault](furnished)
    before = snapshot(furnished.mirror)

    async def body(house: House) -> None:
        healed = await house.heal()
        assert healed.repairs, "not found"
        assert (healed.counts, healed.findings, healed.affected) == ({CommitState.OK: 3}, [], [])
        git(house.mirror, "fsck", "--full")
        must_be_as_before(refs_of(house.mirror), furnished.refs, history=fault not in LOSES_HISTORY)
        assert "refs/replace/" not in "".join(refs_of(house.mirror))
        must_be_kept(house, before, healed)

    furnished.live(body)


def must_be_as_before(refs: dict[str, str], before: dict[str, str], *, history: bool) -> None:
    """Every ref of before; the ref history continues, or restarts where no donor has its records."""
    assert HISTORY in refs
    wanted = {ref: oid for ref, oid in before.items() if history or ref != HISTORY}
    assert {ref: oid for ref, oid in refs.items() if ref in wanted} == wanted


def must_be_kept(house: House, before: dict[str, str], healed: Audit) -> None:
    """What a heal took out is in the evidence, whole, and the record says so."""
    for repair in healed.repairs:
        for file in repair.files:
            if before.get(file) is None:
                continue
            place = Path(str(repair.kept_in)) / file
            assert hashlib.sha256(place.read_bytes()).hexdigest() == before[file]
            record = json.loads((Path(str(repair.kept_in)) / "record.json").read_text())
            assert (
                next(entry for entry in record["files"] if entry["path"] == file)["sha256"]
                == before[file]
            )
    after = set(snapshot(house.mirror).values()) | set(
        snapshot(house.damaged).values() if house.damaged.exists() else ()
    )
    gone = [name for name, digest in before.items() if digest not in after and "tmp_" not in name]
    assert not gone, "bytes were thrown away"


def test_pins_of_persons_come_back(furnished: Furnished) -> None:
    """The catalog knows whose they are; the audit after the heal finds the ref again."""

    async def body(house: House) -> None:
        pin = pin_of(furnished, "person/7")
        git(house.mirror, "update-ref", "-d", pin)
        await house.heal()
        assert pin in refs_of(house.mirror)

    furnished.live(body)


# -- donors ----------------------------------------------------------------------------------------


def a_fallback(house: House) -> str:
    """A mirror with the history of this one under another URL."""
    git(house.root, "clone", "-q", "--mirror", str(house.upstream.path), str(house.root / "name-b"))
    return f"file://{house.root}/{{name}}-b"


async def a_fork(house: House) -> None:
    """Another mirror on this host, of a repository with the same history."""
    git(
        house.root,
        "clone",
        "-q",
        "--mirror",
        str(house.upstream.path),
        str(house.root / "fork.git"),
    )
    await house.mirrors.add(FORK.repo, f"file://{house.root / 'fork.git'}")
    await house.mirrors.sync(FORK)


def closure_packs(house: House) -> None:
    """A closure pack of the newest recorded commit."""
    layer = house.state_dir / "templates/owner__name/packs" / ("0" * 40)
    layer.mkdir(parents=True)
    listing = git(house.mirror, "rev-list", "--objects", "--no-object-names", "main")
    git(house.mirror, "pack-objects", "-q", str(layer / "pack"), stdin=f"{listing}\n".encode())


HOLES = {
    "commit": "main~1",
    "tree": "main~1:docs",
    "root tree": "main~1^{tree}",
    "blob": "main:docs/page1.txt",
    "tip": "main",
}


@pytest.mark.parametrize("donor", ["fallback", "fork", "closure packs", "intact part"])
def test_each_donor_alone_repairs_every_kind_of_hole(furnished: Furnished, donor: str) -> None:
    """Upstream is away; all holes at once, and for the intact part the bytes of the lost objects in
    a damaged pack only.
    """

    async def body(house: House) -> None:
        try:
            if donor == "fork":
                await a_fork(house)
            if donor == "closure packs":
                closure_packs(house)
            fallbacks = [a_fallback(house)] if donor == "fallback" else []
            with house.without_upstream(*fallbacks):
                flip(furnished.pack(), 1.0) if donor == "intact part" else furnished.lose(
                    *HOLES.values()
                )
                healed = await house.audits.run(
                    StartAudit(mirrors=["owner/name"], heal=True, level=AuditLevel.CONTENT)
                )
            assert (healed.counts, healed.findings) == ({CommitState.OK: 3}, [])
            assert any(donor in name or "name-b" in name for name in healed.repairs[0].objects), (
                healed.repairs
            )
            git(house.mirror, "fsck", "--full")
            assert refs_of(house.mirror) == furnished.refs
        finally:
            await house.catalog.delete_mirror(FORK.key)
            for left in ("fork.git", "name-b", "state/mirrors/fork__name"):
                shutil.rmtree(house.root / left, ignore_errors=True)

    furnished.live(body)


def test_what_nobody_has_stays_as_it_was_and_is_tried_again(furnished: Furnished) -> None:
    """A damaged blob without a donor: the file stays, the instances are named, and a donor that
    comes back heals it later.
    """

    async def body(house: House) -> None:
        path = loose_blob(furnished)
        flip(path)
        broken = path.read_bytes()
        with house.without_upstream():
            audit = await house.heal()
        assert path.read_bytes() == broken
        assert "owner__name-0" in audit.affected
        assert audit.repairs[0].unhealed == [path.parent.name + path.name]
        assert [
            reason
            for donor, reason in audit.repairs[0].refusals.items()
            if donor.startswith("upstream")
        ]
        assert house.heals.due() == []
        healed = await house.heal()
        assert (healed.counts, healed.affected) == ({CommitState.OK: 3}, [])

    furnished.live(body)


def test_what_was_left_open_is_tried_at_once_after_a_start(furnished: Furnished) -> None:
    """And no more when an audit of all content has found the mirror sound."""

    async def body(house: House) -> None:
        furnished.lose("main:docs/page1.txt")
        with house.without_upstream():
            await house.heal()
        restarted = house.make_heals()
        await restarted.open()
        assert (house.heals.due(), restarted.due()) == ([], [house.name])
        restarted.settle(await house.audits.run(StartAudit(level=AuditLevel.CONTENT, heal=False)))
        assert restarted.due() == [house.name]
        await house.heal()
        restarted.settle(await house.audits.run(StartAudit(level=AuditLevel.CONTENT, heal=False)))
        assert restarted.due() == []
        later = house.make_heals()
        await later.open()
        assert later.due() == []

    furnished.live(body)


def test_a_donor_that_lies_is_not_believed(furnished: Furnished) -> None:
    """A closure pack whose index gives the lost blob's name to other bytes: nothing of it comes in,
    upstream heals.
    """

    async def body(house: House) -> None:
        closure_packs(house)
        pack = next(house.state_dir.glob("templates/*/packs/*/*.pack"))
        flip(pack)
        furnished.lose("main:docs/page1.txt")
        healed = await house.heal()
        assert (healed.counts, healed.findings) == ({CommitState.OK: 3}, [])
        assert not any("closure" in name for name in healed.repairs[0].objects)

    furnished.live(body)


# -- no damage -------------------------------------------------------------------------------------


def test_an_undamaged_mirror_raises_no_alarm_and_is_not_touched(furnished: Furnished) -> None:
    """Packed, loose, and at every level."""

    async def body(house: House) -> None:
        for exploded in (False, True):
            if exploded:
                furnished.explode()
            before = snapshot(house.mirror)
            for level in AuditLevel:
                audit = await house.audits.run(StartAudit(heal=True, level=level))
                assert (audit.findings, audit.repairs) == ([], [])
            assert snapshot(house.mirror) == before

    furnished.live(body)


# -- crashes ---------------------------------------------------------------------------------------

_HEAL = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import anyio
from gitrepos import Upstream
from heal_parts import House
steps = 0
def watch(event, arguments):
    global steps
    if event in ("os.rename", "os.link") and "mirrors/owner__name" in str(arguments):
        steps += 1
        if steps == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
async def run():
    upstream = object.__new__(Upstream)
    upstream.path = Path({upstream!r})
    house = House(Path({root!r}), upstream)
    await house.open()
    sys.addaudithook(watch)
    await house.heal()
    await house.close()
if __name__ == "__main__":
    anyio.run(run)
"""


def test_a_kill_before_each_change_loses_nothing(tmp_path: Path, furnished: Furnished) -> None:
    """A damaged pack, a lost HEAD, a bad ref and a deleted pin at once; killed at each step in
    turn, and healed by the next.
    """
    flip(furnished.pack())
    (furnished.mirror / "HEAD").unlink()
    write(furnished.mirror / "refs/heads/main", b"")
    drop_packed_line(furnished, "/person/7/")
    before = snapshot(furnished.mirror)
    shutil.copytree(furnished.root / "state", tmp_path / "state", symlinks=True)
    at = -6
    while True:
        at += 8
        script = tmp_path / "heal.py"
        script.write_text(
            _HEAL.format(
                tests=str(Path(__file__).parents[2] / "tests/support"),
                at=at,
                upstream=str(furnished.upstream.path),
                root=str(tmp_path),
            ),
            encoding="utf-8",
        )
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode != -signal.SIGKILL:
            break
        present = set(snapshot(tmp_path / "state/mirrors/owner__name").values())
        present |= set(snapshot(tmp_path / "state/quarantine/damaged").values())
        assert not [name for name, digest in before.items() if digest not in present], (
            f"lost at step {at}"
        )
    assert done.returncode == 0
    assert at > 3
    mirror = tmp_path / "state/mirrors/owner__name"
    git(mirror, "fsck", "--full")
    assert set(furnished.refs) <= refs_of(mirror).keys()
