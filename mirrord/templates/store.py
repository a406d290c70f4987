"""A sealed store on disk: the `.git` of checkouts and its record.

Owns `gits/<history>-<commit>/` and its record `<history>-<commit>.json`, which is written last: a
directory without it counts as absent. The record's mtime is the store's last use. Nothing is
flushed: a file torn by a power failure is found by its size.
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

from ..errors import full_disk_named
from ..git.command import Git, object_info
from ..git.packs import PackIndex, graph_is_whole, has_both_ends
from ..host.files import read_plain
from ..host.trash import Trash, find_trash
from ..model import CommitId, History, MirrorName
from ..protocol import SealLeak

# checkStat: git compares the seconds of mtime, size and mode only, so one index is valid for every
# user (idmapped mounts change uid and gid) and in every overlay. trustctime: the files of layers
# are shared by hard links, and each link changes the ctime; libgit2 knows no checkStat.
CONFIG = (
    b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
    b"\tlogallrefupdates = true\n\ttrustctime = false\n\tcheckStat = minimal\n[gc]\n\tauto = 0\n"
)
GRAPH = "objects/info/commit-graph"
BUILDING = ".building-"
CONTROL_FILES = ("HEAD", "config", "packed-refs")
StoreKey = tuple[str, CommitId, History]
"""The key of a mirror, and the commit and history that identify its store and template."""
_UNLINKABLE = {errno.EMLINK, errno.EXDEV, errno.EPERM}


@dataclass(frozen=True, slots=True)
class SealedStore:
    """The record of a store; `path` is the directory that holds `.git`.

    `head` is the commit that HEAD names: the base commit, or the squashed one. `packs` are names in
    `.git/objects/pack`; `pack_sizes` their bytes with their indexes, shared packs included;
    `control` is the checksum of the control files.
    """

    path: Path
    mirror: MirrorName
    commit: CommitId
    history: History
    head: CommitId
    tree: str
    packs: tuple[str, ...]
    pack_sizes: tuple[int, ...]
    tag_count: int
    control: str

    @property
    def key(self) -> StoreKey:
        return self.mirror.key, self.commit, self.history

    @property
    def size_bytes(self) -> int:
        return sum(self.pack_sizes)

    @property
    def git(self) -> Path:
        return self.path / ".git"

    @property
    def record(self) -> Path:
        return self.path.with_suffix(".json")


# -- records ---------------------------------------------------------------------------------------


def save(store: SealedStore) -> None:
    """Write the record of a finished store."""
    facts = asdict(store)
    del facts["path"], facts["mirror"]
    temporary = store.record.with_suffix(".json.new")
    temporary.write_text(json.dumps(facts))
    temporary.rename(store.record)


def load(path: Path, name: MirrorName) -> SealedStore | None:
    """Return the store at `path`; None where it is absent or torn."""
    found = read_record(path, name)
    with suppress(OSError):
        if (
            found
            and is_as_built(found)
            and (not (found.git / GRAPH).exists() or graph_is_whole(found.git / GRAPH))
            and all(
                has_both_ends(found.git / "objects/pack" / pack, size)
                for pack, size in zip(found.packs, found.pack_sizes, strict=True)
            )
        ):
            return found
    return None


def read_record(path: Path, name: MirrorName) -> SealedStore | None:
    """Return the record of the store at `path`; the store itself may be torn or gone."""
    try:
        facts = json.loads(read_plain(path.with_suffix(".json")))
        facts |= {"path": path, "mirror": name, "history": History(facts["history"])}
        facts["packs"] = tuple(map(sys.intern, facts["packs"]))  # neighbours name the same ones
        facts["pack_sizes"] = tuple(facts["pack_sizes"])
        return SealedStore(**facts)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_records(directory: Path, name: MirrorName) -> list[tuple[SealedStore, float]]:
    """Return all records in `directory`, each with the time of the store's last use."""
    return [
        (store, record.stat().st_mtime)
        for record in directory.glob("*.json")
        if (store := read_record(record.with_suffix(""), name))
    ]


def note_uses(used: Mapping[SealedStore, float]) -> None:
    """Record the time of each store's last use for the next daemon."""
    for store, at in used.items():
        with suppress(FileNotFoundError):
            os.utime(store.record, (at, at))


def is_as_built(store: SealedStore) -> bool:
    """Return whether the control files are unchanged and every pack exists; reads no pack."""
    try:
        found = control_sum(read_plain(store.git / name) for name in CONTROL_FILES)
    except OSError:
        return False
    packs = [store.git / "objects/pack" / name for name in store.packs]
    return found == store.control and all(
        pack.exists() and pack.with_suffix(".idx").exists() for pack in packs
    )


def find_leaks(store: SealedStore, secret: Collection[str]) -> list[SealLeak]:
    """Return the files that a store has or lacks against its record, and `secret` commits in it.

    Packs are identified by size and checksum; an audit reads the bytes between.
    """
    packs = [f"objects/pack/{name}" for name in store.packs]
    indexes = [store.git / name.replace(".pack", ".idx") for name in packs]
    known = {*CONTROL_FILES, *packs, *(str(index.relative_to(store.git)) for index in indexes)}
    files = (file for file in store.git.rglob("*") if file.is_symlink() or not file.is_dir())
    found = {str(file.relative_to(store.git)) for file in files}
    leaks = [SealLeak(kind="file", detail=name) for name in sorted(found - known - {GRAPH})]
    if not is_as_built(store):
        leaks.append(SealLeak(kind="control", detail="HEAD, config, packed-refs or a pack changed"))
    for name, size, index in zip(packs, store.pack_sizes, indexes, strict=True):
        if not has_both_ends(store.git / name, size):
            leaks.append(SealLeak(kind="incomplete", detail=f"{name} is not as it was built"))
        elif secret:
            pack = PackIndex(index, mapped=True)
            inside = (commit for commit in secret if bytes.fromhex(commit) in pack)
            leaks += [SealLeak(kind="object", detail=f"{name} has commit {oid}") for oid in inside]
    return leaks


def control_sum(contents: Iterable[bytes]) -> str:
    digest = hashlib.sha1()
    for content in contents:
        digest.update(b"%d %b" % (len(content), content))
    return digest.hexdigest()


# -- directories of the cache ----------------------------------------------------------------------


@contextmanager
def building(directory: Path, trash: Trash) -> Iterator[Path]:
    """Yield a temporary directory beside the result; removed afterwards unless published."""
    temporary = Path(tempfile.mkdtemp(prefix=BUILDING, dir=directory))
    try:
        with full_disk_named(f"below {directory.name}"):
            yield temporary
    finally:
        trash.remove(temporary)


def publish(temporary: Path, target: Path) -> None:
    """Rename a finished directory to `target`, replacing what has that name."""
    temporary.chmod(0o755)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link; a copy where the file system allows no more links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _UNLINKABLE:
            raise
        shutil.copyfile(source, target)


def remove_leftovers(directory: Path, trash: Trash) -> int:
    """Remove what a killed build left; returns how many. Call before the first build."""
    leftovers = [*directory.glob(f"{BUILDING}*"), *find_trash(directory)]
    for path in leftovers:
        trash.remove(path)
    return len(leftovers)


# -- the tags that a store may show: those of its base commit and its ancestors --------------------
#
# A tag is shown if a closure pack has its commit, so it never adds a commit. A tag object is not
# part of a commit's closure and may be younger: an annotated tag becomes a ref to its commit, which
# `git describe --tags` and version tools read. Damaged tags are left out.

_PEELED_MAX = 100_000
_INDEXES_MAX = 10_000
_RACY_NS = 1_000_000_000

_Stamp = tuple[tuple[str, int, int], ...]


class Tag(NamedTuple):
    """A ref and the commit that its tag leads to."""

    ref: bytes
    commit: str


class Tags:
    """The tags of mirrors, remembered until a file that holds them changes."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._peeled: dict[str, str | None] = {}  # the commit of a tag object never changes
        self._listed: dict[Path, tuple[_Stamp, tuple[Tag, ...]]] = {}
        self._within: dict[Path, tuple[tuple[Tag, ...], frozenset[Tag]]] = {}

    async def list(self, mirror: Path) -> tuple[Tag, ...]:
        """Return all tags of `mirror` that point at a commit, sorted by name."""
        stamp = await anyio.to_thread.run_sync(_stamp, mirror)
        if stamp and (known := self._listed.get(mirror)) and known[0] == stamp:
            return known[1]
        listed = await self._git.run(
            "for-each-ref", "--format=%(objectname) %(refname)", "refs/tags",
            git_dir=mirror,
            doing="list tags",
        )  # fmt: skip
        rows = (line.partition(b" ") for line in listed.stdout.splitlines())
        direct = {ref: oid.decode() for oid, _, ref in rows}
        if unknown := sorted(set(direct.values()) - self._peeled.keys()):
            if len(self._peeled) > _PEELED_MAX:
                self._peeled.clear()
            names = [f"{oid}^{{}}" for oid in unknown]
            peeled = await object_info(self._git, mirror, names, doing="read tags", bisect=True)
            self._peeled |= {
                oid: found.oid if found.kind == "commit" else None
                for oid, found in zip(unknown, peeled, strict=True)
                if found.kind != "damaged"  # may be healed
            }
        tags = ((ref, self._peeled.get(oid)) for ref, oid in direct.items())
        result = tuple(sorted(Tag(ref, commit) for ref, commit in tags if commit))
        if stamp:
            self._listed[mirror] = stamp, result
        return result

    async def within(self, tags: tuple[Tag, ...], indexes: Sequence[Path]) -> set[Tag]:
        """Return those of `tags`, from `list`, whose commit is in a pack of `indexes`."""
        found = set[Tag]()
        for index in indexes:
            known = self._within.get(index)
            if known is None or known[0] is not tags:
                known = tags, await anyio.to_thread.run_sync(_tags_in, tags, index)
                if len(self._within) >= _INDEXES_MAX:
                    self._within.clear()
                self._within[index] = known
            found |= known[1]
        return found


def packed_refs(tags: Collection[Tag]) -> bytes:
    """Return the packed-refs file of a sealed checkout."""
    lines = [tag.commit.encode() + b" " + tag.ref + b"\n" for tag in sorted(tags)]
    return b"# pack-refs with: peeled fully-peeled sorted \n" + b"".join(lines)


def _stamp(mirror: Path) -> _Stamp | None:
    """Return the stats that change with any tag: of packed-refs, and of directories of loose tags.

    None where one is so recent that the next change may get the same mtime ("racy" in git).
    """
    places = [mirror / "packed-refs", *(Path(root) for root, _, _ in os.walk(mirror / "refs/tags"))]
    stats = [(place, place.stat()) for place in places if place.exists()]
    if any(time.time_ns() - found.st_mtime_ns < _RACY_NS for _, found in stats):
        return None
    return tuple((str(place), found.st_ino, found.st_mtime_ns) for place, found in stats)


def _tags_in(tags: Sequence[Tag], index: Path) -> frozenset[Tag]:
    pack = PackIndex(index, mapped=True)
    return frozenset(tag for tag in tags if bytes.fromhex(tag.commit) in pack)
