"""Every damage is found at each level that has to find it, names whom it hits, and is healed.

git is the oracle: what a damaged object hits is what `rev-list` of the undamaged mirror reaches it
from, and after the heal fsck, refs, HEAD and configuration are as before. MIRRORD_SEED chooses a
third of them; all are done with MIRRORD_DAMAGES=all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from gitrepos import git
from heal_parts import Furnished, House, a_third, refs_of, write

from mirrord.git.packs import PackIndex
from mirrord.mirrors.repository import CONFIGURATION, HISTORY
from mirrord.model import AuditLevel, CommitId, FindingKind
from mirrord.protocol import Audit, StartAudit

pytestmark = pytest.mark.slow

ALL = {"owner__name-0", "owner__name-1", "owner__name-2"}
QUICK, CLOSURE, CONTENT = AuditLevel
LEVELS = list(AuditLevel)


class Damage(NamedTuple):
    """`first` is the lowest level that must find it. `make` may answer the objects it takes away."""

    make: Callable[[Furnished], set[str] | None]
    kind: FindingKind
    first: AuditLevel = QUICK


# -- objects, packs, and what git derives from them ------------------------------------------------


def as_directory(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "left").write_bytes(b"left")


def as_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"what is this\n")


def objects_of(index: Path) -> set[str]:
    return {oid.hex() for oid in PackIndex(index)}


def replace_pack(it: Furnished, place: Callable[[Path], object], suffix: str = ".pack") -> set[str]:
    pack = it.pack()
    lost = objects_of(pack.with_suffix(".idx"))
    place(pack.with_suffix(suffix))
    return lost


def link_pack(it: Furnished) -> None:
    """As another file system would have it: readable, and not ours."""
    pack = it.pack()
    pack.rename(it.root / "elsewhere.pack")
    pack.symlink_to(it.root / "elsewhere.pack")


def replace_loose(it: Furnished, place: Callable[[Path], object]) -> set[str]:
    oid = it.object("main:docs/page1.txt")
    it.explode()
    place(it.loose(oid))
    return {oid}


def replace_fan_out(it: Furnished) -> set[str]:
    oid = it.object("main:docs/page1.txt")
    it.explode()
    directory = it.loose(oid).parent
    lost = {directory.name + name for name in os.listdir(directory)}
    as_file(directory)
    return lost


def link_objects(it: Furnished) -> None:
    elsewhere = it.root / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    (it.mirror / "objects").rename(elsewhere)
    (it.mirror / "objects").symlink_to(elsewhere)


def lose_all(it: Furnished, take: Callable[[Path], object]) -> set[str]:
    take(it.mirror / "objects")
    return {"all"}


def two_packs(it: Furnished) -> tuple[Path, Path]:
    """A small pack beside the big one, under a multi-pack index."""
    blob = git(it.mirror, "hash-object", "-w", "--stdin", stdin=b"another\n")
    git(it.mirror, "pack-objects", "-q", "objects/pack/pack", stdin=f"{blob}\n".encode())
    git(it.mirror, "prune-packed")
    git(it.mirror, "multi-pack-index", "write")
    big = it.pack()
    small = next(pack for pack in big.parent.glob("pack-*.pack") if pack != big)
    return big, small


def exchange(a: Path, b: Path) -> None:
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def swap_packs(it: Furnished) -> None:
    """Pack, index and all under the other's name: each pair is whole, the multi-pack index lies."""
    big, small = two_packs(it)
    for suffix in (".pack", ".idx", ".rev"):
        if big.with_suffix(suffix).exists() and small.with_suffix(suffix).exists():
            exchange(big.with_suffix(suffix), small.with_suffix(suffix))
        elif big.with_suffix(suffix).exists():
            big.with_suffix(suffix).unlink()


def swap_indexes(it: Furnished) -> set[str]:
    big, small = two_packs(it)
    lost = objects_of(big.with_suffix(".idx"))
    exchange(big.with_suffix(".idx"), small.with_suffix(".idx"))
    return lost


def with_checksum(path: Path, data: bytes) -> None:
    write(path, data[:-20] + hashlib.sha1(data[:-20]).digest())


def exchange_offsets(it: Furnished, *revs: str) -> set[str]:
    """Two objects of the biggest pack have each other's place, under a right checksum."""
    index = it.pack().with_suffix(".idx")
    data = bytearray(index.read_bytes())
    known = PackIndex(index)
    oids = [it.object(rev) for rev in revs]
    start = 8 + 1024 + known.count * 24
    places = [start + 4 * list(known).index(bytes.fromhex(oid)) for oid in oids]
    a, b = (data[at : at + 4] for at in places)
    data[places[0] : places[0] + 4], data[places[1] : places[1] + 4] = b, a
    with_checksum(index, bytes(data))
    git(it.mirror, "index-pack", "--rev-index", "--verify", str(it.pack()), check=False)
    it.pack().with_suffix(".rev").unlink(missing_ok=True)
    return set(oids)


def lie_in_commit_graph(it: Furnished) -> None:
    """The newest commit gets another parent, under a right checksum."""
    shutil.rmtree(it.mirror / "objects/info/commit-graphs", ignore_errors=True)
    git(it.mirror, "commit-graph", "write", "--reachable")
    graph = it.mirror / "objects/info/commit-graph"
    data = bytearray(graph.read_bytes())
    rows = [struct.unpack_from(">4sQ", data, 8 + 12 * n) for n in range(data[6])]
    places = dict(rows)
    count = struct.unpack_from(">I", data, places[b"OIDF"] + 255 * 4)[0]
    names = [
        data[places[b"OIDL"] + 20 * n : places[b"OIDL"] + 20 * n + 20].hex() for n in range(count)
    ]
    at = places[b"CDAT"] + 36 * names.index(it.object("main")) + 20
    data[at : at + 4] = struct.pack(">I", names.index(it.object("main~3")))
    with_checksum(graph, bytes(data))


def lie_in_midx(it: Furnished) -> None:
    two_packs(it)
    path = it.mirror / "objects/pack/multi-pack-index"
    data = bytearray(path.read_bytes())
    rows = [struct.unpack_from(">4sQ", data, 12 + 12 * n) for n in range(data[6])]
    at = dict(rows)[b"OOFF"]
    data[at : at + 8], data[at + 8 : at + 16] = data[at + 8 : at + 16], data[at : at + 8]
    with_checksum(path, bytes(data))


def lie_in_rev(it: Furnished) -> None:
    path = it.pack().with_suffix(".rev")
    data = bytearray(path.read_bytes())
    data[12:16], data[16:20] = data[16:20], data[12:16]
    with_checksum(path, bytes(data))


def hide_by_promisor(it: Furnished) -> set[str]:
    """git excuses missing objects that a promisor pack names."""
    oid = it.object("main:docs/page1.txt")
    listing = git(
        it.mirror, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)"
    ).splitlines()
    old = list((it.mirror / "objects/pack").iterdir())
    keep = "".join(f"{name}\n" for name in listing if name != oid)
    git(it.mirror, "pack-objects", "-q", "objects/pack/pack", stdin=keep.encode())
    for file in old:
        file.unlink(missing_ok=True)
    it.pack().with_suffix(".promisor").write_bytes(b"")
    configure(
        '[extensions]\n\tpartialClone = p\n[remote "p"]\n\turl = /nonexistent\n\tpromisor = true\n'
    )(it)
    text = CONFIGURATION.replace("repositoryformatversion = 0", "repositoryformatversion = 1")
    write(
        it.mirror / "config",
        text.encode() + (it.mirror / "config").read_bytes()[len(CONFIGURATION) :],
    )
    return {oid}


def borrow(it: Furnished) -> set[str]:
    """Lost objects are in a repository elsewhere, which may go at any time."""
    oid = it.object("main:docs/page1.txt")
    lender = it.root / "lender"
    shutil.rmtree(lender, ignore_errors=True)
    shutil.copytree(it.mirror / "objects", lender)
    it.lose(oid)
    write(it.mirror / "objects/info/alternates", f"{lender}\n".encode())
    return {oid}


# -- configuration, HEAD and refs ------------------------------------------------------------------


def configure(text: str) -> Callable[[Furnished], None]:
    return lambda it: write(it.mirror / "config", CONFIGURATION.encode() + text.encode())


def file(name: str, text: str) -> Callable[[Furnished], None]:
    return lambda it: write(it.mirror / name, text.format(it=it, tip=it.object("main")).encode())


def commit(rev: str) -> Callable[[Furnished], None]:
    return lambda it: write(it.mirror / "HEAD", f"{it.object(rev)}\n".encode())


def a_ref(it: Furnished, prefix: str) -> str:
    return next(ref for ref in sorted(it.refs) if ref.startswith(prefix))


def move(prefix: str, rev: str) -> Callable[[Furnished], None]:
    def moved(it: Furnished) -> None:
        git(it.mirror, "update-ref", a_ref(it, prefix), it.object(rev))

    return moved


def nothing(_: object) -> None:
    """Drop a result."""


def delete(prefix: str) -> Callable[[Furnished], None]:
    return lambda it: nothing(git(it.mirror, "update-ref", "-d", a_ref(it, prefix)))


def pipe(name: str) -> Callable[[Furnished], None]:
    def made(it: Furnished) -> None:
        (it.mirror / name).unlink(missing_ok=True)
        os.mkfifo(it.mirror / name)

    return made


def link_ref(it: Furnished) -> None:
    path = it.mirror / "refs/heads/main"
    path.unlink(missing_ok=True)
    path.symlink_to("side")


def another_commit(it: Furnished) -> str:
    """One that nothing else reaches."""
    tree = it.object("main^{tree}")
    return git(it.mirror, "commit-tree", "-p", it.object("main"), "-m", "by hand", tree)


def below(name: str, act: Callable[[Path], object]) -> Callable[[Furnished], None]:
    return lambda it: nothing(act(it.mirror / name))


K = FindingKind
DAMAGES: dict[str, Damage] = {
    # nothing is where something has to be, or something else is
    "HEAD is a directory": Damage(below("HEAD", as_directory), K.LAYOUT),
    "HEAD is a named pipe": Damage(pipe("HEAD"), K.LAYOUT),
    "config is a directory": Damage(below("config", as_directory), K.LAYOUT),
    "packed-refs is a directory": Damage(below("packed-refs", as_directory), K.LAYOUT),
    "refs is a file": Damage(below("refs", as_file), K.LAYOUT),
    "refs is gone": Damage(below("refs", shutil.rmtree), K.LAYOUT),
    "refs/heads is a file": Damage(below("refs/heads", as_file), K.REF),
    "a branch is a named pipe": Damage(pipe("refs/heads/main"), K.REF),
    "a pack is a directory": Damage(lambda it: replace_pack(it, as_directory), K.PACK),
    "a pack is a symbolic link": Damage(link_pack, K.PACK),
    "an index is a directory": Damage(lambda it: replace_pack(it, as_directory, ".idx"), K.PACK),
    "a loose object is a directory": Damage(lambda it: replace_loose(it, as_directory), K.OBJECT),
    "a fan-out is a file": Damage(replace_fan_out, K.LAYOUT),
    "objects is a file": Damage(lambda it: lose_all(it, as_file), K.LAYOUT),
    "objects is gone": Damage(lambda it: lose_all(it, shutil.rmtree), K.LAYOUT),
    "objects is a symbolic link": Damage(link_objects, K.LAYOUT),
    "objects/pack is a file": Damage(lambda it: lose_all(it, lambda path: as_file(path / "pack")), K.LAYOUT),
    "objects was renamed": Damage(lambda it: lose_all(it, lambda path: path.rename(path.with_name("objects.old"))), K.LAYOUT),
    # configuration, and files that change what git reads
    "promisor planted, a blob lost": Damage(hide_by_promisor, K.CONFIG),
    "alternates planted, a blob lost": Damage(borrow, K.PLANTED),
    "hook in config": Damage(configure("[core]\n\thooksPath = /tmp/hooks\n"), K.CONFIG),
    "include in config": Damage(configure("[include]\n\tpath = /tmp/more\n"), K.CONFIG),
    "worktree in config": Damage(configure("[core]\n\tworktree = /tmp\n"), K.CONFIG),
    "fsck severities in config": Damage(configure("[fsck]\n\tmissingTree = ignore\n\tskipList = /tmp/x\n"), K.CONFIG),
    "alternateRefs in config": Damage(configure("[core]\n\talternateRefsCommand = false\n"), K.CONFIG),
    "another URL in config": Damage(configure('[url "/tmp/"]\n\tinsteadOf = https://\n'), K.CONFIG),
    "sha256 in config": Damage(configure("[extensions]\n\tobjectFormat = sha256\n"), K.CONFIG),
    "a setting twice": Damage(configure("[core]\n\tbare = true\n"), K.CONFIG),
    "grafts planted": Damage(file("info/grafts", "{tip}\n"), K.PLANTED),
    "shallow planted": Damage(file("shallow", "{tip}\n"), K.PLANTED),
    "commondir planted": Damage(file("commondir", "../elsewhere\n"), K.PLANTED),
    "a hook planted": Damage(file("hooks/post-update", "#!/bin/sh\n"), K.PLANTED),
    "a promisor pack": Damage(lambda it: nothing(it.pack().with_suffix(".promisor").write_bytes(b"")), K.PLANTED),
    # HEAD and refs
    "HEAD detached": Damage(commit("main~1"), K.HEAD),
    "HEAD on another branch": Damage(file("HEAD", "ref: refs/tags/v1\n"), K.HEAD),
    "HEAD on no branch": Damage(file("HEAD", "ref: refs/heads/none\n"), K.HEAD),
    "a branch moved": Damage(move("refs/heads/main", "main~2"), K.REF_MOVED),
    "a branch moved to an unknown commit": Damage(
        lambda it: nothing(git(it.mirror, "update-ref", "refs/heads/main", another_commit(it))), K.REF_MOVED
    ),
    "a tag moved": Damage(move("refs/tags/v1", "main~2"), K.REF_MOVED),
    "a person's pin moved": Damage(move("refs/mirrord/pins/person/", "main"), K.REF),
    "a dataset's pin moved": Damage(move("refs/mirrord/pins/dataset/", "main~3"), K.REF),
    "a kept ref moved": Damage(move("refs/mirrord/kept/", "main"), K.REF),
    "a kept ref removed": Damage(delete("refs/mirrord/kept/"), K.REF_LOST),
    "one owner's pin removed": Damage(delete("refs/mirrord/pins/person/8/"), K.PIN_LOST),
    "a pin of nobody": Damage(
        lambda it: nothing(git(it.mirror, "update-ref", f"refs/mirrord/pins/person/9/{it.object('main')}", "main")),
        K.PIN_UNKNOWN,
    ),
    "a private ref of no meaning": Damage(
        lambda it: nothing(git(it.mirror, "update-ref", "refs/mirrord/x/y", "main")), K.PLANTED
    ),
    "a branch is a symbolic link": Damage(link_ref, K.REF),
    "a branch is symbolic": Damage(file("refs/heads/main", "ref: refs/tags/v1\n"), K.REF),
    "branches name each other": Damage(file("refs/heads/main", "ref: refs/heads/main\n"), K.REF),
    "a branch dangles": Damage(file("refs/heads/main", "1" * 40 + "\n"), K.REF),
    "ref history moved back": Damage(move(HISTORY, f"{HISTORY}~1"), K.REF_MOVED),
    "ref history names a commit": Damage(move(HISTORY, "main"), K.REF_MOVED),
    # what is derived, and what is exchanged
    "commit-graph lies": Damage(lie_in_commit_graph, K.DERIVED, CONTENT),
    "multi-pack index lies": Damage(lie_in_midx, K.DERIVED, CONTENT),
    "reverse index lies": Damage(lie_in_rev, K.DERIVED, CLOSURE),
    "packs exchanged with their indexes": Damage(swap_packs, K.PACK),
    "indexes exchanged": Damage(swap_indexes, K.PACK),
    "offsets of blobs exchanged": Damage(lambda it: exchange_offsets(it, "main:docs/page1.txt", "main:README"), K.PACK, CONTENT),
    "offsets of trees exchanged": Damage(lambda it: exchange_offsets(it, "main:docs", "main:src"), K.PACK, CONTENT),
    "offsets of commits exchanged": Damage(lambda it: exchange_offsets(it, "main~1", "main~2"), K.PACK, CONTENT),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def pinned_twice(alive: Furnished) -> None:
    """The newest recorded commit is a person's too."""

    async def body(house: House) -> None:
        tip = CommitId(git(house.mirror, "rev-parse", "main"))
        assert await house.mirrors.pin(house.name, [tip], owner="person/8", reason="again") == {}

    alive.live(body)
    alive.keep()


def instances_with(it: Furnished, lost: set[str]) -> set[str]:
    """Whom the loss of objects hits, as the undamaged mirror tells."""
    if "all" in lost:
        return ALL
    reached = {
        n: git(it.pristine, "rev-list", "--objects", "--no-object-names", f"main~{n}").split()
        for n in range(3)
    }
    return {f"owner__name-{n}" for n, oids in reached.items() if lost & set(oids)}


@pytest.mark.parametrize("damage", a_third(DAMAGES))
def test_damage_is_found_and_healed(furnished: Furnished, damage: str) -> None:
    make, kind, first = DAMAGES[damage]
    lost = make(furnished) or set()
    hit = instances_with(furnished, lost)

    async def body(house: House) -> None:
        for level in LEVELS[LEVELS.index(first) :]:
            must_be_found(await look(house, level), kind, hit, level)
        healed = await house.heal()
        assert [finding.detail for finding in healed.findings] == []
        assert (healed.open_count, healed.affected) == (0, [])

    furnished.live(body)
    git(furnished.mirror, "fsck", "--full")
    assert (furnished.mirror / "config").read_text() == CONFIGURATION
    assert (furnished.mirror / "HEAD").read_text() == "ref: refs/heads/main\n"
    must_have_refs(furnished, damage, begins_anew="all" in lost or bool(lost and kind is K.PACK))


async def look(house: House, level: AuditLevel) -> Audit:
    return await house.audits.run(StartAudit(heal=False, level=level))


def must_be_found(found: Audit, kind: FindingKind, hit: set[str], level: AuditLevel) -> None:
    assert found.left == [], [finding.detail for finding in found.findings]
    assert kind in {finding.kind for finding in found.findings}, found.findings
    assert found.open_count > 0
    assert not hit or level is not CONTENT or set(found.affected) == hit
    assert hit or not found.affected


def must_have_refs(it: Furnished, damage: str, *, begins_anew: bool) -> None:
    """As before, but for a history whose records nobody has, and for kept refs of what was moved by
    hand.
    """
    now = refs_of(it.mirror)
    wanted = {ref: oid for ref, oid in it.refs.items() if ref != HISTORY or not begins_anew}
    assert {ref: now.get(ref) for ref in wanted} == wanted
    more = {ref for ref in now if ref not in it.refs}
    expected = {"a pin of nobody": 1, "a branch moved to an unknown commit": 1}
    assert len(more) == expected.get(damage, 0), more
