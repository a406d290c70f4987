"""One sealed store, as it is recorded beside its directory.

Owns `gits/<history>-<commit>.json`, which is written when the store is whole, and the configuration that each store has. The time
of that file says when the store was asked for last. What a power cut tore is not there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import DiskFullError
from ...git.packs import graph_is_whole, has_both_ends
from ...host.trash import Trash, find_trash
from ...model import CommitId, History, MirrorName

BUILDING = ".building-"

# checkStat: git compares the seconds of mtime, size and mode only, so one index is valid for every user
# (idmapped mounts change uid and gid) and in every overlay. trustctime: the files of layers are shared
# by hard links, and each link changes the ctime; libgit2 knows no checkStat.
CONFIG = (
    b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = true\n"
    b"\ttrustctime = false\n\tcheckStat = minimal\n[gc]\n\tauto = 0\n"
)
GRAPH = "objects/info/commit-graph"
_CONTROL = ("HEAD", "config", "packed-refs")


@dataclass(frozen=True, slots=True)
class SealedStore:
    """`path` is the directory that holds `.git`. `head` is the commit HEAD names: the base commit, or the squashed one.

    `packs` are file names in `.git/objects/pack`; `pack_sizes` are their bytes with their indexes, shared packs too.
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

    @property
    def size_bytes(self) -> int:
        return sum(self.pack_sizes)

    @property
    def git(self) -> Path:
        return self.path / ".git"

    @property
    def record(self) -> Path:
        return self.path.with_suffix(".json")


def save(gitdir: SealedStore, control: Sequence[bytes]) -> None:
    """Write the record of a store that is whole. `control` is what was written to HEAD, config and packed-refs."""
    facts = asdict(gitdir)
    del facts["path"], facts["mirror"]
    facts["control"] = _control_sum(control)
    temporary = gitdir.record.with_suffix(".json.new")
    temporary.write_text(json.dumps(facts))
    temporary.rename(gitdir.record)


def load(path: Path, name: MirrorName) -> SealedStore | None:
    """The store at `path`; None where there is none, or not all of it."""
    try:
        found = read_record(path, name)
        return found if found and _is_whole(found) else None
    except OSError:
        return None


def read_record(path: Path, name: MirrorName) -> SealedStore | None:
    """What is recorded of the store at `path`, which may be torn or gone."""
    try:
        facts = json.loads(path.with_suffix(".json").read_text())
        del facts["control"]
        facts |= {"path": path, "mirror": name, "history": History(facts["history"])}
        facts["packs"] = tuple(map(sys.intern, facts["packs"]))  # neighbours name the same ones
        facts["pack_sizes"] = tuple(facts["pack_sizes"])
        return SealedStore(**facts)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_as_built(gitdir: SealedStore) -> bool:
    """Whether every control file has the bytes it was written with, and every pack is there. What packs hold is not looked at."""
    try:
        control = json.loads(gitdir.record.read_text())["control"]
        packs = [gitdir.git / "objects/pack" / name for name in gitdir.packs]
        found = _control_sum((gitdir.git / name).read_bytes() for name in _CONTROL)
        return control == found and all(
            pack.exists() and pack.with_suffix(".idx").exists() for pack in packs
        )
    except (OSError, ValueError, KeyError):
        return False


def _control_sum(contents: Iterable[bytes]) -> str:
    digest = hashlib.sha1()
    for content in contents:
        digest.update(b"%d %b" % (len(content), content))
    return digest.hexdigest()


def read_records(directory: Path, name: MirrorName) -> dict[Path, tuple[SealedStore, float]]:
    """All that is recorded in `directory`, each with the time of its last use."""
    found: dict[Path, tuple[SealedStore, float]] = {}
    for record in directory.glob("*.json"):
        gitdir = read_record(record.with_suffix(""), name)
        if gitdir:
            found[gitdir.path] = gitdir, record.stat().st_mtime
    return found


def note_uses(used: Mapping[SealedStore, float]) -> None:
    """Keep the time of each one's last use for the next daemon; fine where the store is gone."""
    for gitdir, at in used.items():
        with suppress(FileNotFoundError):
            os.utime(gitdir.record, (at, at))


def _is_whole(found: SealedStore) -> bool:
    """Whether every file is as long as it was written: nothing was flushed, and a power cut can empty or shorten any of them."""
    if (found.git / "HEAD").read_text() != f"{found.head}\n" or (
        found.git / "config"
    ).read_bytes() != CONFIG:
        return False
    if (found.git / "packed-refs").read_bytes().count(b"\n") != found.tag_count + 1:
        return False
    if (found.git / GRAPH).exists() and not graph_is_whole(found.git / GRAPH):
        return False
    packs = zip(found.packs, found.pack_sizes, strict=True)
    return all(has_both_ends(found.git / "objects/pack" / name, size) for name, size in packs)


SHARED = ".shared-"
_ALONE = 1


def write_shared(directory: Path, file: Path, content: bytes) -> None:
    """Write a file of a store; as a link, where a store in `directory` has the same."""
    kept = _path(directory, content)
    try:
        os.link(kept, file)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.EMLINK, errno.EXDEV, errno.EPERM}:
            raise
    else:
        if file.read_bytes() == content:
            return
        file.unlink()
        kept.unlink(missing_ok=True)
    file.write_bytes(content)
    with suppress(OSError):  # then it is not shared
        os.link(file, kept)


def let_go(directory: Path, file: Path) -> None:
    """Forget what only this file of a store, which is removed next, has."""
    with suppress(FileNotFoundError):
        found, kept = file.stat(), _path(directory, file.read_bytes())
        if found.st_nlink == _ALONE + 1 and kept.stat().st_ino == found.st_ino:
            kept.unlink()


def remove_unused(directory: Path, trash: Trash) -> int:
    """Remove what no store has."""
    unused = [file for file in directory.glob(f"{SHARED}*") if file.stat().st_nlink == _ALONE]
    for file in unused:
        trash.remove(file)
    return len(unused)


def _path(directory: Path, content: bytes) -> Path:
    return directory / f"{SHARED}{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"


@contextmanager
def building(directory: Path, trash: Trash) -> Iterator[Path]:
    """A temporary directory beside the result; gone afterwards unless it was renamed."""
    temporary = Path(tempfile.mkdtemp(prefix=BUILDING, dir=directory))
    try:
        yield temporary
    except OSError as error:
        raise_disk_full(error, directory)
        raise
    finally:
        trash.remove(temporary)


def publish(temporary: Path, target: Path) -> None:
    """Put a finished directory in its place, over whatever lies there."""
    temporary.chmod(0o755)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link; a copy where the file has all the links the file system allows."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in {errno.EMLINK, errno.EXDEV, errno.EPERM}:
            raise
        shutil.copyfile(source, target)


def raise_disk_full(error: OSError, directory: Path) -> None:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        raise DiskFullError(
            f"cannot write below {directory.name}: {error.strerror}",
            hint="free space below the state directory",
        ) from error


def remove_leftovers(directory: Path, trash: Trash) -> int:
    """Remove what a killed build left; nobody builds before this ran."""
    leftovers = [*directory.glob(f"{BUILDING}*"), *find_trash(directory)]
    for path in leftovers:
        trash.remove(path)
    return len(leftovers)


def remove_all(directories: Iterable[Path], trash: Trash) -> None:
    """Remove layers or stores, each by a rename first: what a crash leaves is a leftover and no half of one."""
    for path in directories:
        trash.discard(path)
