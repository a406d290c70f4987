"""The `.git` of a pooled checkout: a copy of a sealed store, or a git worktree of the mirror.

Small files are written, packs are copied, sharing blocks where the file system can. Never a hard
link: root in a container that sees the checkout alone could write the store through one. No file
that its user wrote is ever read: it is the recorded one, or it is replaced. Sync; runs in workers.
A crash leaves a `.git` that its record does not match, which the next call repairs.
"""

import os
import shutil
import stat
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...host.credentials import ActingAs
from ...host.files import opened
from ...host.trash import TrashDirectory
from ..files.manifest import DIRECTORY, NO_OBJECT, Entry, Manifest, blob_id
from ..files.reader import TreeReader, file_id, open_top
from ..files.scan import Changes, is_control
from ..files.writer import TreeWriter

_GIT = b".git"
_INDEX = b".git/index"


class DotGit(NamedTuple):
    """The content of a `.git`, by path from the root of the tree; packs by their source."""

    directories: list[bytes]
    contents: dict[bytes, bytes]
    packs: dict[bytes, Path]

    @property
    def pack_names(self) -> list[str]:
        return [path.name for path in self.packs.values() if path.suffix == ".pack"]

    @property
    def refs(self) -> list[str]:
        """The names in packed-refs: a sealed store has no other refs."""
        lines = self.contents.get(b".git/packed-refs", b"").splitlines()
        named = (line.partition(b" ")[2] for line in lines if not line.startswith((b"#", b"^")))
        return [name.decode(errors="surrogateescape") for name in named]


def read_store(source: Path) -> DotGit:
    """Read a sealed `.git`; an index in it is another checkout's."""
    store = DotGit([], {}, {})
    for above, _, names in os.walk(source):
        directory = os.fsencode(Path(".git") / Path(above).relative_to(source))
        store.directories.append(directory)
        for name in sorted(names):
            path, file = directory + b"/" + os.fsencode(name), Path(above, name)
            if path.startswith(b".git/objects/pack/"):
                store.packs[path] = file
            elif path != _INDEX:
                store.contents[path] = file.read_bytes()
    return store


def _unchanged(manifest: Manifest, found: Changes) -> dict[bytes, Entry]:
    """The recorded control files that a scan found unchanged; none where `.git` itself is not one
    of them, or is the file of a worktree.
    """
    differing = {*found.modified, *found.missing}
    kept = {path: entry for path, entry in manifest.control.items() if path not in differing}
    return kept if _GIT in kept and kept[_GIT].is_directory else {}


def has_index(manifest: Manifest, found: Changes) -> bool:
    """Whether the index is still the written one."""
    return _INDEX in _unchanged(manifest, found)


def read_index(tree: Path, manifest: Manifest) -> bytes:
    """As many bytes of whatever is the index now as the written one had; none where that fails."""
    entry = manifest.control.get(_INDEX)
    if entry is None:
        return b""
    try:
        with (
            opened(open_top(tree)) as root,
            ActingAs(manifest.owner) as owner,
            TreeReader(root, owner) as descent,
            opened(owner.open_regular(*descent.locate(_INDEX))) as fd,
        ):
            return os.read(fd, entry.size)
    except OSError:
        return b""


def write_store(
    tree: Path,
    manifest: Manifest,
    found: Changes,
    store: DotGit,
    index: bytes | None,
    trash: TrashDirectory,
) -> Manifest:
    """Make `.git` equal to the store; an `index` of None stays.

    Touches only what a scan `found`, and what another store had.
    """
    contents = store.contents if index is None else store.contents | {_INDEX: index}
    wanted = {*store.directories, *store.contents, *store.packs, _INDEX}
    unchanged = _unchanged(manifest, found)
    control = {path: entry for path, entry in unchanged.items() if path in wanted}
    with _opened(tree, manifest, trash) as writer:
        if unchanged:
            gone = [path for path in found.extra if is_control(path)]
            for path in (*gone, *sorted(unchanged.keys() - wanted, reverse=True)):
                writer.remove(path)
        else:
            writer.remove(_GIT)
        for path in store.directories:
            if path not in control:
                writer.make_directory(path)
                control[path] = Entry(DIRECTORY, NO_OBJECT, NO_OBJECT, 0, 0, 0, 0, 0, 0, 0)
        for path, data in contents.items():
            content = blob_id(data)
            if path not in control or control[path].content != content:
                control[path] = _record(content, writer.write_file(path, data))
        for path, pack in store.packs.items():
            entry = control.get(path)
            # a recorded pack of the same name has the same bytes: a store never reuses a name
            if not (entry and stat.S_ISREG(entry.st_mode) and entry.size == pack.stat().st_size):
                with pack.open("rb") as source:
                    copied = writer.copy_file(path, source.fileno(), permissions=0o444)
                    control[path] = _record(file_id(source.fileno()), copied)
        files = manifest.files.copy()
        with writer.owner:
            for path in writer.touched:
                where: MutableMapping[bytes, Entry] = control if is_control(path) else files
                if path in where:
                    where[path] = where[path].with_stat(writer.get_stat(path))
    if not writer.touched:
        return manifest
    checksum = manifest.index if index is None else index[-20:].hex()
    return replace(manifest, files=files, control=control, index=checksum)


@contextmanager
def _opened(tree: Path, manifest: Manifest, trash: TrashDirectory) -> Iterator[TreeWriter]:
    owner, now_ns = ActingAs(manifest.owner), time.time_ns()
    with (
        opened(open_top(tree)) as root,
        TreeWriter(root, owner, mtime_ns=now_ns, trash=trash) as writer,
    ):
        yield writer


def _record(content: bytes, found: os.stat_result) -> Entry:
    return Entry(0o100000, NO_OBJECT, content, 0, 0, 0, 0, 0, 0, 0).with_stat(found)


# -- worktrees of the mirror, for trusted callers who may see all of it ----------------------------


def link_worktree(
    directory: Path, mirror: Path, manifest: Manifest, index: bytes, trash: TrashDirectory
) -> Manifest:
    """Make `directory/tree` a worktree of `mirror` with a detached HEAD, whatever its `.git` was.

    Written by hand: libgit2's `add_worktree` always makes a branch in the mirror, and a killed
    `git worktree add` leaves a lock.
    """
    admin = _admin(mirror, directory.name)
    shutil.rmtree(admin, ignore_errors=True)
    admin.mkdir(parents=True)
    # first: `git worktree prune` leaves it alone from now on
    (admin / "locked").write_text("held by a checkout of mirrord\n")
    (admin / "commondir").write_text("../..\n")
    (admin / "gitdir").write_text(f"{directory}/tree/.git\n")
    (admin / "HEAD").write_text(f"{manifest.commit}\n")
    (admin / "index").write_bytes(index)
    with _opened(directory / "tree", manifest, trash) as writer:
        writer.remove(_GIT)
        name = f"gitdir: {admin}\n".encode()
        control = {_GIT: _record(blob_id(name), writer.write_file(_GIT, name))}
        files = manifest.files | {b"": manifest.files[b""].with_stat(writer.get_stat(b""))}
    return replace(manifest, files=files, control=control, index=index[-20:].hex())


def remove_worktree(mirror: Path, checkout: str) -> None:
    """Remove the mirror's record of a checkout's worktree; idempotent. Raises OSError."""
    with suppress(FileNotFoundError):
        shutil.rmtree(_admin(mirror, checkout))


def prune_worktrees(mirrors: Path) -> int:
    """Remove the records of worktrees whose checkout is gone; answers how many."""
    count = 0
    for admin in list(mirrors.glob("*/worktrees/mirrord-*")):
        try:
            is_alive = Path((admin / "gitdir").read_text().strip()).parent.parent.exists()
        except OSError:
            is_alive = False
        if not is_alive:
            shutil.rmtree(admin, ignore_errors=True)
            count += 1
    return count


def _admin(mirror: Path, checkout: str) -> Path:
    return mirror / "worktrees" / f"mirrord-{checkout}"
