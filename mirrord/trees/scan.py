"""Compares a checkout's tree and control files on disk with the private manifest.

One lstat of every known path finds suspects. A closer look lists or reads what stat cannot prove;
it opens no link, pipe or device, and enters only known directories. All is done as the owner of the
tree: a path that the owner may not read has changed. Raises CheckoutBusyError where something is
mounted in the tree.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ..errors import ProofFailedError
from ..git.modes import DIRECTORY, SYMLINK
from ..git.objects.scratch import tree_bytes
from ..host.ctimes import may_forge_ctimes
from ..host.files import mounted_on, open_beneath, open_child, open_top, opened, shown_path
from ..host.processes import ActingAs, Owner
from .manifest import Entries, Entry, Manifest, clock_ns, stat_tuple
from .reader import Look, TreeReader, content_id


@dataclass
class ScanResult:
    """What differs, as paths from the root of the tree; control files begin with `.git`.

    Of an extra directory only its own path is listed, of a missing one all that was in it. `proven`
    are directories whose stat changed, but not their content. `unsettled` means that a file had to
    be read because its ctime was too recent; `youngest_ns` is the latest ctime of the paths that a
    closer look found unchanged.
    """

    modified: list[bytes] = field(default_factory=list)
    missing: list[bytes] = field(default_factory=list)
    extra: list[bytes] = field(default_factory=list)
    proven: dict[bytes, os.stat_result] = field(default_factory=dict)
    unsettled: bool = False
    youngest_ns: int = 0
    looked_at: int = 0
    hashed: int = 0
    began_ns: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.modified or self.missing or self.extra)

    def in_tree(self) -> list[bytes]:
        """Return all that differs outside `.git`."""
        return [
            path for path in (*self.modified, *self.missing, *self.extra) if not is_control(path)
        ]

    def count_restored(self) -> int:
        """Return how many paths of the tree, without its root, a reset writes again."""
        restored = (*self.modified, *self.missing)
        return sum(bool(path) and not is_control(path) for path in restored)

    def count_removed(self) -> int:
        """Return how many paths outside `.git` a reset removes."""
        return sum(not is_control(path) for path in self.extra)


_CONTROL = b".git"


def is_control(path: bytes) -> bool:
    return path == _CONTROL or path.startswith(_CONTROL + b"/")


def scan(root: Path, manifest: Manifest, *, rehash: bool | None = None) -> ScanResult:
    """Compare everything below `root` with the manifest.

    `rehash` reads every file, whatever its stat; by default for a checkout of root, where root can
    set a ctime.
    """
    return _compare(root, manifest, None, every=rehash)


def examine(root: Path, manifest: Manifest, paths: Collection[bytes]) -> ScanResult:
    """Look closer at `paths`, whatever their stat: reads back what was just written."""
    return _compare(root, manifest, paths, every=True)


def _compare(
    root: Path, manifest: Manifest, paths: Collection[bytes] | None, *, every: bool | None
) -> ScanResult:
    scanned = ScanResult(began_ns=clock_ns())
    entries, owner = manifest.files | manifest.control, manifest.owner
    # without the top itself
    scanned.looked_at = len(entries) - 1 if paths is None else len(paths)
    if every is None:
        every = owner[0] == 0 and may_forge_ctimes()
    read_from_ns = 0 if every else manifest.racy_from_ns
    with opened(open_top(root)) as fd, ActingAs(owner) as acting:
        if paths is None:
            paths = (
                entries.keys() if every else _suspects(fd, acting, manifest, read_from_ns, scanned)
            )
        if paths:
            with TreeReader(fd, acting) as reader:
                _Examination(reader, entries, scanned, read_from_ns).judge(paths)
    return scanned


def _suspects(
    root: int, owner: ActingAs, manifest: Manifest, racy_from_ns: int, scanned: ScanResult
) -> list[bytes]:
    """Return the paths whose stat changed, or is too recent to prove anything.

    Those in a directory that is gone are suspects too; the closer look finds them missing.
    """
    suspects = []
    lstat = os.lstat
    control = [(path, entry[3:]) for path, entry in manifest.control.items()]
    current, directory = b"", root
    with TreeReader(root, owner) as reader:
        for path, was in chain(manifest.files.iter_stats(), control):
            above, _, name = path.rpartition(b"/")
            try:
                if above != current:
                    directory, current = reader.locate(path)[0], above
                now = stat_tuple(lstat(name or b".", dir_fd=directory))
            except OSError:
                current = b"/"  # no path has it: the open directory may be closed now
                suspects.append(path)
                continue
            if now != was:
                suspects.append(path)
            elif was[4] >= racy_from_ns:
                suspects.append(path)
                scanned.unsettled = True
                scanned.youngest_ns = max(scanned.youngest_ns, was[4])
    return suspects


@dataclass
class _Examination:
    """A closer look at paths, parents first.

    Reads files with a ctime from `read_from_ns` on. `lost` are paths found missing.
    """

    reader: TreeReader
    entries: Entries
    found: ScanResult
    read_from_ns: int
    children: dict[bytes, list[bytes]] = field(default_factory=dict)
    lost: set[bytes] = field(default_factory=set)

    def judge(self, paths: Collection[bytes]) -> None:
        entries = self.entries.select(paths)
        self.children = self.entries.children(entries)
        for path, entry in sorted(entries.items()):
            if path in self.lost:
                continue
            try:
                seen = self.reader.find_stat(path)
                directory, name = self.reader.locate(path)
            except OSError:
                seen = None
            if seen is None:
                self._miss(path)
            elif path in self.children:
                owner = (seen.st_uid, seen.st_gid)
                is_expected = stat.S_ISDIR(seen.st_mode) and owner == (entry.uid, entry.gid)
                inside = self.reader.look_into(path) if is_expected else None
                self._judge_directory(path, entry, seen, inside)
            # An ordinary user can forge mtime, size and the index, but not ctime; a name that was
            # added or removed changes its directory's.
            elif stat_tuple(seen) != entry[3:]:
                try:  # at a mount point, lstat is that of the mounted file
                    os.close(open_beneath(directory, name, os.O_PATH | os.O_NOFOLLOW))
                except OSError as error:
                    if error.errno == errno.EXDEV:
                        raise mounted_on(path) from error
                self.found.modified.append(path)
            elif entry.ctime_ns >= self.read_from_ns:
                self.found.hashed += 1
                with suppress(OSError):
                    if content_id(directory, name, seen) == entry.content:
                        continue
                self.found.modified.append(path)

    def _judge_directory(
        self, path: bytes, entry: Entry, seen: os.stat_result, inside: Look | None
    ) -> None:
        """Judge a directory by its own stat and its names, not by the stat of its content."""
        if inside is None:
            self.found.modified.append(path)
            for child in self.children[path]:
                self._miss(child)
            return
        prefix = path + b"/" if path else b""
        expected = {child.removeprefix(prefix) for child in self.children[path]}
        names = inside.names
        is_sound = stat.S_IMODE(seen.st_mode ^ entry.st_mode) == 0 and inside.is_plain
        if not is_sound:
            self.found.modified.append(path)
        for name in sorted(names - expected):
            self.found.extra.append(prefix + name)
        for name in sorted(expected - names):
            self._miss(prefix + name)
        if names == expected and is_sound and stat_tuple(seen) != entry[3:]:
            self.found.proven[path] = seen
            self.found.youngest_ns = max(self.found.youngest_ns, seen.st_ctime_ns)

    def _miss(self, path: bytes) -> None:
        if path not in self.lost:
            self.lost.add(path)
            self.found.missing.append(path)
        if self.entries[path].is_directory:
            for child in self._children_of(path):
                self._miss(child)

    def _children_of(self, path: bytes) -> list[bytes]:
        if path not in self.children:
            self.children |= self.entries.children({path: self.entries[path]})
        return self.children[path]


# -- proof by content: files on disk, hashed as git hashes them -----------------------------------
#
# Never trusts a stat, an index or a manifest's own hash alone.

_HINT = "try again to have it rebuilt; if this repeats, check the disk"


def hash_tree(dest: Path, manifest: Manifest) -> str:
    """Read every file back and return git's id of their tree.

    Raises ProofFailedError with the path that differs. A converted file is compared with the bytes
    of its conversion, and counts as its blob.
    """
    files = manifest.files.decoded()
    prove_files(dest, manifest.owner, files, files)
    return tree_id(manifest)


def prove_files(
    dest: Path, owner: Owner, files: Mapping[bytes, Entry], paths: Iterable[bytes]
) -> None:
    """Compare files on disk with their entries: kind, mode, bytes. Raises ProofFailedError."""
    with (
        opened(open_top(dest)) as root,
        ActingAs(owner) as acting,
        TreeReader(root, acting) as reader,
    ):
        for path in paths:
            try:
                if _is_as_recorded(reader, path, files[path]):
                    continue
            except OSError:
                pass
            raise ProofFailedError(
                f"cannot prove {shown_path(path)}: the disk has something else than git", hint=_HINT
            )


def _is_as_recorded(reader: TreeReader, path: bytes, entry: Entry) -> bool:
    st = reader.find_stat(path)
    if st is None or stat.S_IMODE(st.st_mode ^ entry.st_mode):
        return False
    if entry.is_directory:
        if entry.mode == DIRECTORY or not stat.S_ISDIR(st.st_mode):
            return stat.S_ISDIR(st.st_mode)
        with opened(open_child(*reader.locate(path))) as fd:
            return not os.listdir(fd)  # a submodule
    is_link = stat.S_ISLNK(st.st_mode)
    return (
        is_link == (entry.mode == SYMLINK) and content_id(*reader.locate(path), st) == entry.content
    )


def tree_id(manifest: Manifest) -> str:
    """Return git's id of the tree of the entries, computed from the leaves up."""
    files = manifest.files.decoded()
    below: dict[bytes, list[tuple[int, bytes, bytes]]] = {
        path: [] for path, entry in files.items() if entry.mode == DIRECTORY
    }
    for path in sorted(filter(None, files), key=lambda path: path.count(b"/"), reverse=True):
        entry = files[path]
        above, _, name = path.rpartition(b"/")
        oid = _hash(below[path]) if entry.mode == DIRECTORY else entry.oid
        below[above].append((entry.mode, name, oid))
    return _hash(below[b""]).hex()


def prove_directories(manifest: Manifest, changed: Collection[bytes]) -> None:
    """Hash the entries of directories; ProofFailedError where git has another tree."""
    files = manifest.files
    for directory, paths in files.children(files.select(changed)).items():
        entries = ((path.rpartition(b"/")[2], files[path]) for path in paths)
        if _hash((entry.mode, name, entry.oid) for name, entry in entries) != files[directory].oid:
            raise ProofFailedError(
                f"cannot prove {shown_path(directory)}: its entries are not those of git",
                hint=_HINT,
            )


def _hash(entries: Iterable[tuple[int, bytes, bytes]]) -> bytes:
    data = tree_bytes(entries)
    return hashlib.sha1(b"tree %d\0" % len(data) + data).digest()
