"""Heals of packs with more damage than the donors of the day can mend: what can be had is served,
and no byte is lost.
"""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from gitrepos import git
from heal_parts import Furnished, House, snapshot, write
from worker_calls import LONG

from mirrord.errors import MirrordError
from mirrord.model import AuditLevel, CommitId, CommitState, MirrorName
from mirrord.protocol import Audit, StartAudit
from mirrord.templates.packer import Packer
from mirrord.trees.tree import materialise

pytestmark = pytest.mark.slow

FORK = MirrorName("fork", "name")
HAD, LACKED = "main:docs/page2.txt", "main:docs/page1.txt"
_BLOB, _TREE = 3 << 4, 2 << 4
_TYPE = 7 << 4


def pack_everything(it: Furnished, *arguments: str) -> Path:
    """All objects in one pack, which a multi-pack index names: git looks there first."""
    it.explode()
    listing = git(it.mirror, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    made = git(
        it.mirror,
        "pack-objects",
        "-q",
        *arguments,
        "objects/pack/pack",
        stdin=f"{listing}\n".encode(),
    )
    git(it.mirror, "prune-packed", "-q")
    git(it.mirror, "multi-pack-index", "write")
    return it.mirror / f"objects/pack/pack-{made}.pack"


def place_of(pack: Path, oid: str) -> int:
    listed = git(
        pack.parent, "show-index", stdin=pack.with_suffix(".idx").read_bytes()
    ).splitlines()
    return next(int(line.split()[0]) for line in listed if line.split()[1] == oid)


def disguise(pack: Path, oid: str) -> None:
    """Have the pack call a blob a tree, and a tree a blob: its bytes unpack, and git gives them
    without a complaint.
    """
    data, at = bytearray(pack.read_bytes()), place_of(pack, oid)
    assert data[at] & _TYPE in {_BLOB, _TREE}
    data[at] ^= _BLOB ^ _TREE
    write(pack, bytes(data))


def spoil(pack: Path, oid: str) -> None:
    """Overwrite the first bytes of what is compressed."""
    data, at = bytearray(pack.read_bytes()), place_of(pack, oid)
    while data[at] & 0x80:
        at += 1
    data[at + 1 : at + 4] = b"\xff\xff\xff"
    write(pack, bytes(data))


def bundle_with(house: House, root: Path, *entries: str) -> None:
    """A bundle by plain git of another repository, that has nothing else of what the mirror has."""
    git(root, "clone", "-q", "--mirror", "--no-hardlinks", str(house.mirror), "stranger")
    tree = git(
        root / "stranger", "mktree", stdin="".join(f"{entry}\n" for entry in entries).encode()
    )
    git(
        root / "stranger",
        "branch",
        "trunk",
        git(root / "stranger", "commit-tree", "-m", "a stranger", tree),
    )
    house.dropped.mkdir()
    git(
        root / "stranger", "bundle", "create", "-q", str(house.dropped / "stranger.bundle"), "trunk"
    )


def must_report_only(audit: Audit, oid: str, instances: set[str]) -> None:
    assert {found for finding in audit.findings for found in finding.objects} == {oid}, (
        audit.findings
    )
    assert set(audit.affected) == instances
    assert {name for finding in audit.findings for name in finding.instances} == instances


def users_of(house: House, oid: str) -> set[str]:
    commits = {f"owner__name-{n}": house.upstream.git("rev-parse", f"HEAD~{n}") for n in range(3)}
    return {
        name
        for name, commit in commits.items()
        if oid in house.upstream.git("rev-list", "--objects", commit)
    }


@pytest.mark.parametrize("harm", [disguise, spoil])
def test_an_object_that_nobody_has_keeps_no_other_from_being_healed(
    furnished: Furnished, tmp_path: Path, harm: Callable[[Path, str], None]
) -> None:
    """Two damaged objects in one pack, a donor for one: that one is served again, the other is
    told, all bytes are kept.
    """
    had, lacked = furnished.object(HAD), furnished.object(LACKED)

    async def body(house: House) -> None:
        bundle_with(house, tmp_path, f"100644 blob {had}\ta file")
        pack = pack_everything(furnished)
        harm(pack, had)
        spoil(pack, lacked)
        before = snapshot(furnished.mirror)
        users, content = users_of(house, lacked), house.upstream.git("show", HAD)
        with house.without_upstream():
            audit = await house.heal()
            assert audit.repairs[0].unhealed == [lacked]
            must_report_only(audit, lacked, users)
            again = await house.audits.run(StartAudit(heal=False, level=AuditLevel.CONTENT))
            must_report_only(again, lacked, users)
        assert git(house.mirror, "cat-file", "-p", had) == content
        git(
            tmp_path,
            "--git-dir",
            str(house.mirror),
            "--work-tree",
            str(tmp_path),
            "checkout",
            "-f",
            "main",
            "--",
            "docs/page2.txt",
        )
        assert (tmp_path / "docs/page2.txt").read_text() == f"{content}\n"
        kept = Path(str(audit.repairs[0].kept_in)) / f"objects/pack/{pack.name}"
        assert hashlib.sha256(kept.read_bytes()).hexdigest() == before[f"objects/pack/{pack.name}"]
        healed = await house.heal()
        assert (healed.counts, healed.findings) == ({CommitState.OK: 3}, [])
        git(house.mirror, "fsck", "--full")

    furnished.live(body)


@pytest.mark.parametrize("harm", [disguise, spoil])
def test_a_pack_in_quarantine_gives_its_deltas_when_somebody_has_what_they_build_on(
    furnished: Furnished, tmp_path: Path, harm: Callable[[Path, str], None]
) -> None:
    """Trees as deltas on a damaged one that nobody has at first; the donor that comes has that one,
    and none of the others.
    """
    base = furnished.object(f"{kept_tip(furnished)}:docs")
    tree = furnished.object("main:docs")

    async def body(house: House) -> None:
        bundle_with(house, tmp_path, f"040000 tree {base}\tdocs")
        pack = pack_everything(furnished, "--window=50", "--no-reuse-delta")
        deltas = built_on(pack, base)
        assert tree in deltas
        harm(pack, base)
        away = shutil.move(house.dropped, tmp_path / "away")
        with house.without_upstream():
            audit = await house.heal()
            assert set(audit.repairs[0].unhealed) == {base, *deltas}
            assert (await house.heal()).repairs[0].unhealed_count == 1 + len(deltas)
            shutil.move(away, house.dropped)
            healed = await house.heal()
        assert (healed.counts, healed.findings) == ({CommitState.OK: 3}, [])
        taken = healed.repairs[0].objects
        assert taken == {
            "bundle stranger.bundle": 1,
            f"the intact part of {pack.name} in quarantine": len(deltas),
        }
        git(house.mirror, "fsck", "--full")

    furnished.live(body)


def test_a_quarantine_that_cannot_be_read_fails_no_heal(furnished: Furnished) -> None:
    """A person has put the pack elsewhere and left a link behind that leads nowhere."""
    lacked = furnished.object(LACKED)

    async def body(house: House) -> None:
        pack = pack_everything(furnished)
        spoil(pack, lacked)
        with house.without_upstream():
            audit = await house.heal()
            taken = Path(str(audit.repairs[0].kept_in)) / f"objects/pack/{pack.name}"
            taken.unlink()
            taken.symlink_to("/nonexistent")
            (repair,) = (await house.heal()).repairs
        assert (repair.error, repair.unhealed) == (None, [lacked])
        assert any(donor.endswith("in quarantine") for donor in repair.refusals)
        assert (await house.heal()).counts == {CommitState.OK: 3}

    furnished.live(body)


def kept_tip(it: Furnished) -> str:
    return next(ref for ref in it.refs if ref.startswith("refs/mirrord/kept/"))


def built_on(pack: Path, base: str) -> list[str]:
    """The deltas of a pack that begin with one object, those on deltas too."""
    listed = [
        line.split() for line in git(pack.parent, "verify-pack", "-v", str(pack)).splitlines()
    ]
    bases = {words[0]: words[6] for words in listed if len(words) == 7}
    chains = {oid: [oid] for oid in bases}
    for chain in chains.values():
        while chain[-1] in bases:
            chain.append(bases[chain[-1]])
    return [oid for oid, chain in chains.items() if chain[-1] == base]


def test_a_donor_with_a_damaged_copy_and_a_good_one_gives_the_good_one(
    furnished: Furnished,
) -> None:
    """A fork whose pack is damaged and which has the object loose as well: git copies from packs
    first, and unchecked.
    """
    lost = furnished.object(LACKED)
    pack_everything(furnished)

    async def body(house: House) -> None:
        try:
            fork = Path(shutil.copytree(house.mirror, house.state_dir / "mirrors/fork__name"))
            await house.mirrors.add(FORK.repo)
            write(fork / "objects" / lost[:2] / lost[2:], zlib.compress(loose_bytes(fork, lost)))
            spoil(next(fork.glob("objects/pack/*.pack")), lost)
            furnished.lose(LACKED)
            with house.without_upstream():
                healed = await house.audits.run(
                    StartAudit(mirrors=["owner/name"], heal=True, level=AuditLevel.CONTENT)
                )
            assert (healed.counts, healed.repairs[0].objects) == (
                {CommitState.OK: 3},
                {f"mirror {FORK}": 1},
            )
        finally:
            await house.catalog.delete_mirror(FORK.key)
            shutil.rmtree(house.state_dir / "mirrors/fork__name", ignore_errors=True)

    furnished.live(body)


def loose_bytes(repository: Path, oid: str) -> bytes:
    content = f"{git(repository, 'cat-file', 'blob', oid)}\n".encode()
    return b"blob %d\0%s" % (len(content), content)


# -- what is found is what is refused --------------------------------------------------------------


async def refused(house: House, scratch: Path) -> set[str]:
    """The instances whose commit can be neither packed nor written as a tree."""
    packer, bad = Packer(house.mirrors.git, house.workers), set()
    for n in range(3):
        commit = CommitId(house.upstream.git("rev-parse", f"HEAD~{n}"))
        into = scratch / f"{len(list(scratch.iterdir()))}"
        into.mkdir()
        try:
            await packer.pack_range(house.mirror, commit, None, into)
            files = into / "files"
            await house.workers.run(materialise, house.mirror, commit, files, timeout=LONG)
        except MirrordError:
            bad.add(f"owner__name-{n}")
    return bad


def copy_pack(it: Furnished) -> None:
    """The same objects in two packs: the damaged copy hides the good one."""
    pack = pack_everything(it)
    (pack.parent / "multi-pack-index").unlink()
    for file in pack.parent.glob(f"{pack.stem}.*"):
        shutil.copy(file, file.with_name(f"a-copy{file.suffix}"))


def fill(it: Furnished, count: int) -> None:
    """More objects than a message of git names."""
    blobs = "".join(f"blob\ndata {len(str(n))}\n{n}\n" for n in range(count))
    git(it.mirror, "fast-import", "--quiet", stdin=blobs.encode())


DAMAGES: dict[str, Callable[[Furnished], object]] = {
    "emptied pack": lambda it: (fill(it, 500), write(pack_everything(it), b"")),
    "emptied copy": lambda it: (copy_pack(it), write(it.mirror / "objects/pack/a-copy.pack", b"")),
    "spoiled copy": lambda it: (
        copy_pack(it),
        spoil(it.mirror / "objects/pack/a-copy.pack", it.object(HAD)),
    ),
    "spoiled pack beside a copy": lambda it: (copy_pack(it), spoil(it.pack(), it.object(HAD))),
    "spoiled commit in a copy": lambda it: (
        copy_pack(it),
        spoil(it.mirror / "objects/pack/a-copy.pack", it.object("main~1")),
    ),
    "spoiled blob": lambda it: spoil(pack_everything(it), it.object(LACKED)),
    "disguised blob": lambda it: disguise(pack_everything(it), it.object(LACKED)),
    "lost pack": lambda it: pack_everything(it).unlink(),
    "lost index": lambda it: pack_everything(it).with_suffix(".idx").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_audit_and_checkouts_agree_and_a_heal_is_complete(
    furnished: Furnished, tmp_path: Path, damage: str
) -> None:
    """Before, after a heal that lacks a commit which only the mirror had, and after another one,
    which changes nothing.
    """
    kept = next(ref for ref in furnished.refs if ref.startswith("refs/mirrord/kept/"))
    lost = furnished.upstream.path / ".git/objects" / kept[-40:-38] / kept[-38:]
    lost.rename(tmp_path / "lost")

    async def body(house: House) -> None:
        DAMAGES[damage](furnished)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        found = await house.audits.run(StartAudit(heal=False, level=AuditLevel.CONTENT))
        assert set(found.affected) == await refused(house, scratch), found.findings
        healed = await house.heal()
        if damage == "emptied pack":
            assert healed.repairs[0].unhealed_count, "upstream has all, so this proves nothing"
        assert set(healed.affected) == await refused(house, scratch), healed.findings
        after = snapshot(house.mirror)
        again = await house.heal()
        assert (again.affected, again.findings) == (healed.affected, healed.findings)
        assert snapshot(house.mirror) == after

    try:
        furnished.live(body)
    finally:
        (tmp_path / "lost").rename(lost)
