"""The `.git` of a pooled checkout: kept where the manifest proves it, written where it differs from the sealed store.

Owns what a `.git` must hold and how it gets there: small files are written anew, packs are copied, sharing blocks where the file
system can. Never a hard link: root in a container that sees the checkout alone could write the store through one.
Nothing that its user wrote is ever read: a file is the one that was recorded, or it is replaced. Sync; runs in workers. A crash
leaves a `.git` that its record does not match, which the next call mends.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import MirrordError
from ...host.credentials import ActingAs
from ...host.files import open_directory, opened
from ...host.trash import TrashDirectory, remove
from ..files.manifest import DIRECTORY, NO_OBJECT, Entry, Manifest, blob_id
from ..files.reader import Descent, file_id, open_top
from ..files.scan import Changes, is_control
from ..files.writer import TreeWriter

_GIT = b".git"
_INDEX = b".git/index"
_PACKS = b".git/objects/pack/"
_FILE = 0o100000
_PACK_PERMISSIONS = 0o444


@dataclass(frozen=True)
class Store:
    """What a `.git` must hold, by path from the root of the tree: small files by content, packs by where they lie."""

    directories: list[bytes] = field(default_factory=list)
    contents: dict[bytes, bytes] = field(default_factory=dict)
    packs: dict[bytes, Path] = field(default_factory=dict)

    @property
    def paths(self) -> set[bytes]:
        return {*self.directories, *self.contents, *self.packs, _INDEX}

    @property
    def pack_names(self) -> tuple[str, ...]:
        return tuple(path.name for path in self.packs.values() if path.suffix == ".pack")

    @property
    def refs(self) -> tuple[str, ...]:
        """The names in packed-refs: a sealed store has no other refs."""
        lines = self.contents.get(b".git/packed-refs", b"").splitlines()
        named = (line.partition(b" ")[2] for line in lines if not line.startswith((b"#", b"^")))
        return tuple(name.decode(errors="surrogateescape") for name in named)


def read_store(source: Path) -> Store:
    """A sealed `.git`; its index, if it has one, is another checkout's."""
    store = Store()
    for above, _, names in os.walk(source):
        directory = os.fsencode(Path(".git") / Path(above).relative_to(source))
        store.directories.append(directory)
        for name in sorted(names):
            path, file = directory + b"/" + os.fsencode(name), Path(above, name)
            if path.startswith(_PACKS):
                store.packs[path] = file
            elif path != _INDEX:
                store.contents[path] = file.read_bytes()
    return store


def has_index(manifest: Manifest, found: Changes) -> bool:
    """Whether the index that lies there is the one that was written."""
    return _INDEX in _kept(manifest, found)


def read_index(tree: Path, manifest: Manifest) -> bytes:
    """As many bytes as the index had that was written, of whatever is there now; nothing where it cannot be read."""
    entry = manifest.control.get(_INDEX)
    if entry is None:
        return b""
    try:
        with (
            opened(open_top(tree)) as root,
            ActingAs(manifest.owner) as owner,
            Descent(root, owner) as descent,
            opened(owner.open_regular(*descent.locate(_INDEX))) as fd,
        ):
            return os.read(fd, entry.size)
    except OSError:
        return b""


def bring(
    tree: Path,
    manifest: Manifest,
    found: Changes,
    store: Store,
    index: bytes | None,
    graves: TrashDirectory,
) -> Manifest:
    """Make `.git` equal to the store, touching only what a scan `found` or what another store had; `index` None keeps it."""
    contents = store.contents if index is None else store.contents | {_INDEX: index}
    owner, now_ns = ActingAs(manifest.owner), time.time_ns()
    with (
        opened(open_top(tree)) as root,
        TreeWriter(root, owner, mtime_ns=now_ns, graves=graves) as writer,
    ):
        kept = _keep(manifest, found, store, writer)
        fresh = {path: _directory(path, writer) for path in store.directories if path not in kept}
        fresh |= {
            path: _write(path, data, writer)
            for path, data in contents.items()
            if not _holds(kept.get(path), data)
        }
        lacking = {
            path: pack
            for path, pack in store.packs.items()
            if path not in kept or not _is_copy(kept[path], pack)
        }
        fresh |= {path: _copy_pack(path, pack, writer) for path, pack in lacking.items()}
        control, files = kept | fresh, manifest.files.copy()
        with owner:
            for path in writer.touched:
                where: MutableMapping[bytes, Entry] = control if is_control(path) else files
                if path in where:
                    where[path] = where[path].with_stat(writer.get_stat(path))
    if not writer.touched:
        return manifest
    return replace(
        manifest,
        files=files,
        control=control,
        index=manifest.index if index is None else index[-20:].hex(),
    )


def discard(directory: Path) -> None:
    """Remove a directory with all that is in it, whatever its modes and flags; nothing there is fine."""
    with suppress(FileNotFoundError), opened(open_directory(directory.parent)) as above:
        remove(above, os.fsencode(directory.name))


def discard_all(directories: list[Path]) -> dict[Path, str]:
    """`discard` each; one that resists does not keep the others."""
    problems: dict[Path, str] = {}
    for directory in directories:
        try:
            discard(directory)
        except (MirrordError, OSError) as error:
            problems[directory] = str(error)
    return problems


def _kept(manifest: Manifest, found: Changes) -> dict[bytes, Entry]:
    """The recorded control files that a scan found unchanged; none, where `.git` itself is not, or is a worktree's file."""
    differing = {*found.modified, *found.missing}
    kept = {path: entry for path, entry in manifest.control.items() if path not in differing}
    return kept if _GIT in kept and kept[_GIT].is_directory else {}


def _keep(
    manifest: Manifest, found: Changes, store: Store, writer: TreeWriter
) -> dict[bytes, Entry]:
    """Remove what the store has not; the record of what stays."""
    kept, wanted = _kept(manifest, found), store.paths
    if not kept:
        writer.remove(_GIT)
        return {}
    for path in found.extra:
        if is_control(path):
            writer.remove(path)
    for path in sorted(kept.keys() - wanted, reverse=True):
        writer.remove(path)
    return {path: entry for path, entry in kept.items() if path in wanted}


def _directory(path: bytes, writer: TreeWriter) -> Entry:
    writer.make_directory(path)
    return Entry(DIRECTORY, NO_OBJECT, NO_OBJECT, 0, 0, 0, 0, 0, 0, 0)


def _write(path: bytes, data: bytes, writer: TreeWriter) -> Entry:
    return git_file(blob_id(data), writer.write_file(path, data))


def _copy_pack(path: bytes, pack: Path, writer: TreeWriter) -> Entry:
    """Copy a pack, or an index of one, as a file that nobody writes."""
    with pack.open("rb") as source:
        found = writer.copy_file(path, source.fileno(), permissions=_PACK_PERMISSIONS)
        return git_file(file_id(source.fileno()), found)


def git_file(content: bytes, found: os.stat_result) -> Entry:
    """The record of a control file that was just written."""
    return Entry(_FILE, NO_OBJECT, content, 0, 0, 0, 0, 0, 0, 0).with_stat(found)


def _holds(entry: Entry | None, data: bytes) -> bool:
    return entry is not None and entry.content == blob_id(data)


def _is_copy(entry: Entry, pack: Path) -> bool:
    """Whether a recorded file is the pack of this name: a name of the store never gets other bytes."""
    return stat.S_ISREG(entry.st_mode) and entry.size == pack.stat().st_size


_PREFIX = "mirrord-"
_REASON = "held by a checkout of mirrord"


def link_worktree(
    directory: Path, mirror: Path, manifest: Manifest, index: bytes, graves: TrashDirectory
) -> Manifest:
    """Make `directory/tree` a worktree of `mirror` with a detached HEAD, whatever its `.git` was."""
    admin = _admin(mirror, directory.name)
    shutil.rmtree(admin, ignore_errors=True)
    admin.mkdir(parents=True)
    (admin / "locked").write_text(
        f"{_REASON}\n"
    )  # first: `git worktree prune` leaves it alone from now on
    (admin / "commondir").write_text("../..\n")
    (admin / "gitdir").write_text(f"{directory}/tree/.git\n")
    (admin / "HEAD").write_text(f"{manifest.commit}\n")
    (admin / "index").write_bytes(index)
    owner, now_ns = ActingAs(manifest.owner), time.time_ns()
    with (
        opened(open_top(directory / "tree")) as root,
        TreeWriter(root, owner, mtime_ns=now_ns, graves=graves) as writer,
    ):
        writer.remove(b".git")
        name = f"gitdir: {admin}\n".encode()
        control = {b".git": git_file(blob_id(name), writer.write_file(b".git", name))}
        files = manifest.files | {b"": manifest.files[b""].with_stat(writer.get_stat(b""))}
    return replace(manifest, files=files, control=control, index=index[-20:].hex())


def remove_worktree(mirror: Path, checkout: str) -> None:
    """Forget the worktree of a checkout; idempotent. Raises OSError where the disk does not let it go."""
    with suppress(FileNotFoundError):
        shutil.rmtree(_admin(mirror, checkout))


def prune_worktrees(mirrors: Path) -> int:
    """Forget the worktrees in all mirrors whose checkout is gone; answers how many."""
    dead = [admin for admin in mirrors.glob(f"*/worktrees/{_PREFIX}*") if not _is_alive(admin)]
    for admin in dead:
        shutil.rmtree(admin, ignore_errors=True)
    return len(dead)


def _admin(mirror: Path, checkout: str) -> Path:
    return mirror / "worktrees" / f"{_PREFIX}{checkout}"


def _is_alive(admin: Path) -> bool:
    try:
        return Path((admin / "gitdir").read_text().strip()).parent.parent.exists()
    except OSError:
        return False
