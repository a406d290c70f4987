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
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from ..errors import full_disk_named
from ..git.graphs import graph_is_whole
from ..git.lfs import FILTER, NO_FILTER, filter_config
from ..git.packs import PackIndex, has_both_ends, pack_is_whole
from ..host.files import read_plain
from ..host.trash import Trash, find_trash
from ..model import CommitId, History, MirrorName
from ..presence import exists, is_dir, is_symlink, iter_below, matching, walk
from ..protocol import SealLeak

# checkStat: git compares the seconds of mtime, size and mode only, so one index is valid for every
# user (idmapped mounts change uid and gid) and in every overlay. trustctime: the files of layers
# are shared by hard links, and each link changes the ctime; libgit2 knows no checkStat.
CONFIG = (
    b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
    b"\tlogallrefupdates = true\n\ttrustctime = false\n\tcheckStat = minimal\n[gc]\n\tauto = 0\n"
)


class Filtering(Enum):
    """The filter `lfs` in the configuration of a checkout whose tree has pointers."""

    NONE = b""
    OFF = filter_config(NO_FILTER)
    OURS = filter_config(FILTER)

    @property
    def config(self) -> bytes:
        return self.value


GRAPH = "objects/info/commit-graph"
BUILDING = ".building-"
CONTROL_FILES = ("HEAD", "config", "packed-refs")
StoreStat = tuple[int, int, int, int]
# the key of a mirror, and the commit and history that identify its store and template
StoreKey = tuple[str, CommitId, History]
# no room for a link (ext4: 65,000), another mount, a file system without hard links (link(2))
_UNLINKABLE = {errno.EMLINK, errno.EXDEV, errno.EPERM}


def store_path(state_dir: Path, name: MirrorName, commit: CommitId, history: History) -> Path:
    """Return the directory of a store; its `.git` is in it."""
    return state_dir / "templates" / str(name) / "gits" / f"{history}-{commit}"


@dataclass(frozen=True, slots=True)
class SealedStore:
    """The record of a store; `path` is the directory that holds `.git`.

    `head` is the commit that HEAD names: the base commit, or the squashed one. `packs` are names in
    `.git/objects/pack`; `pack_sizes` their bytes with their indexes, shared packs included;
    `control` is the checksum of the control files. With submodules or LFS objects, `whole` is the
    composed tree and `modules` the checksum of `modules_sum`.
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
    whole: str = ""
    modules: str = ""

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


def save(store: SealedStore) -> None:
    """Write the record of a finished store."""
    record = asdict(store)
    del record["path"], record["mirror"]
    temporary = store.record.with_suffix(".json.new")
    temporary.write_text(json.dumps(record))
    temporary.rename(store.record)


def load(path: Path, name: MirrorName) -> SealedStore | None:
    """Return the store at `path`; None where it is absent or torn."""
    store = read_record(path, name)
    with suppress(OSError):
        if (
            store
            and is_as_built(store)
            and (not store.modules or modules_sum(store.path) == store.modules)
            and (not exists(store.git / GRAPH) or graph_is_whole(store.git / GRAPH))
            and all(
                has_both_ends(store.git / "objects/pack" / pack, size)
                for pack, size in zip(store.packs, store.pack_sizes, strict=True)
            )
        ):
            return store
    return None


def read_record(path: Path, name: MirrorName) -> SealedStore | None:
    """Return the record of the store at `path`; the store itself may be torn or gone."""
    try:
        record = json.loads(read_plain(path.with_suffix(".json")))
        record |= {"path": path, "mirror": name, "history": History(record["history"])}
        record["packs"] = tuple(map(sys.intern, record["packs"]))  # neighbours name the same ones
        record["pack_sizes"] = tuple(record["pack_sizes"])
        return SealedStore(**record)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_records(directory: Path, name: MirrorName) -> list[tuple[SealedStore, float]]:
    """Return all records in `directory`, each with the time of the store's last use."""
    return [
        (store, record.stat().st_mtime)
        for record in matching(directory, "*.json")
        if (store := read_record(record.with_suffix(""), name))
    ]


def note_uses(used: Mapping[SealedStore, float]) -> None:
    """Record the time of each store's last use for the next daemon."""
    for store, used_at in used.items():
        with suppress(FileNotFoundError):
            os.utime(store.record, (used_at, used_at))


def is_as_built(store: SealedStore) -> bool:
    """Return whether the control files are unchanged and every pack exists; reads no pack."""
    try:
        control = control_sum(read_plain(store.git / name) for name in CONTROL_FILES)
    except OSError:
        return False
    packs = [store.git / "objects/pack" / name for name in store.packs]
    return control == store.control and all(
        exists(pack) and exists(pack.with_suffix(".idx")) for pack in packs
    )


def find_leaks(store: SealedStore, secret: Collection[str]) -> list[SealLeak]:
    """Return the files that a store has or lacks against its record, and `secret` commits in it.

    Packs are identified by size and checksum; an audit reads the bytes between.
    """
    packs = [f"objects/pack/{name}" for name in store.packs]
    indexes = [store.git / name.replace(".pack", ".idx") for name in packs]
    expected = {*CONTROL_FILES, *packs, *(str(index.relative_to(store.git)) for index in indexes)}
    files = (file for file in iter_below(store.git) if is_symlink(file) or not is_dir(file))
    present = {str(file.relative_to(store.git)) for file in files}
    leaks = [SealLeak(kind="file", detail=name) for name in sorted(present - expected - {GRAPH})]
    if store.modules and modules_sum(store.path) == store.modules:
        leaks = [leak for leak in leaks if not leak.detail.startswith(("modules/", "lfs/"))]
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


def stats_of(store: SealedStore) -> dict[str, StoreStat]:
    """Return the stat of each file below `.git`, which tells whether it was written since."""
    stats: dict[str, StoreStat] = {}
    for above, _, names in walk(store.git):
        for name in names:
            seen = os.lstat(path := os.path.join(above, name))
            stats[path] = seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns
    return stats


def find_damage(store: SealedStore, changed: Collection[str]) -> list[str]:
    """Return what of a store is not as it was built; reads the files at the paths `changed`."""
    damage = [leak.detail for leak in find_leaks(store, ())]
    for path in map(Path, () if damage else changed):
        is_pack = path.suffix in (".pack", ".idx")
        if (is_pack and not pack_is_whole(path)) or (
            path == store.git / GRAPH and not graph_is_whole(path)
        ):
            damage.append(f"{path.name}: checksum mismatch")
    return damage


def modules_sum(top: Path) -> str:
    """Return the checksum of names and sizes of all files of submodules, and LFS objects, in a
    store.
    """
    digest = hashlib.sha1(usedforsecurity=False)
    for above, directories, names in walk(top):
        directories.sort()
        if above == str(top / ".git"):
            directories[:] = [name for name in directories if name in ("lfs", "modules")]
            continue
        for name in sorted(names):
            path = os.path.join(above, name)
            st = os.lstat(path)
            size = st.st_size if stat.S_ISREG(st.st_mode) else 0
            digest.update(os.fsencode(f"{os.path.relpath(path, top)}\0{size}\0"))
    return digest.hexdigest()


def control_sum(contents: Iterable[bytes]) -> str:
    digest = hashlib.sha1()
    for content in contents:
        digest.update(b"%d %b" % (len(content), content))
    return digest.hexdigest()


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
    # mkdtemp makes it 0700, and owners of checkouts look through it
    temporary.chmod(0o755)
    if exists(target):
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
    leftovers = [*matching(directory, f"{BUILDING}*"), *find_trash(directory)]
    for path in leftovers:
        trash.remove(path)
    return len(leftovers)
