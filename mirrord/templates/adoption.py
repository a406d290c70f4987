"""The tree of a built environment, adopted: copied with plain modes and times, its files shared."""

import errno
import hashlib
import os
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import LimitReachedError, full_disk_named
from ..host.files import (
    CREATE,
    entries_in,
    open_child,
    open_directory,
    open_plain,
    open_regular,
    opened,
    write_all,
)
from ..host.trash import remove_tree
from ..model import (
    ENVIRONMENT_BYTES_LIMIT,
    ENVIRONMENT_FILES_LIMIT,
    ENVIRONMENT_PATH_LIMIT_BYTES,
    TREE_DEPTH_LIMIT,
)
from ..places import ENVIRONMENT, TESTBED
from ..presence import walk
from ..trees.relocation import Relocation

_MTIME_NS = 315_532_800 * 10**9  # 1980-01-01, the earliest time in a ZIP archive
# hashed and copied at a time
_PIECE = 1 << 20
_LINKS_OUT = ("/usr/", f"{ENVIRONMENT}/")  # these paths are the same in every sandbox


class Adopted(NamedTuple):
    """What was adopted of a build.

    `manifest` is the sha256 of lines `MODE SHA256 PATH`, sorted by path, each with a NUL; a link is
    hashed by its target. `shared_bytes` other environments had already. `dropped` counts what was
    left out or changed, by reason.
    """

    manifest: str
    files: int
    size_bytes: int
    shared_bytes: int
    dropped: dict[str, int]


def adopt(source: Path, tree: Path, target: Path, shared: Path) -> Adopted:
    """Copy the prefix `source` to `target`/files, as links to the files in `shared`. In a worker.

    Paths of the host in its scripts and path files, of itself and of `tree`, become those that a
    sandbox shows: a build without namespaces knows no others.

    All processes of the build have ended. None of the build's inodes is kept, so a descriptor that
    is still open somewhere cannot change an environment. Files get mode 644 or 755 and one time,
    so that equal files of any two builds are one on disk. Raises LimitReachedError.
    """
    with full_disk_named("an environment"):
        shared.mkdir(mode=0o700, exist_ok=True)
        places = {str(source): ENVIRONMENT, str(tree): TESTBED}
        copy = _TreeCopy(shared, Relocation(places))
        try:
            with opened(open_directory(source)) as directory:
                copy.directory(directory, target / "files", b"")
        except BaseException:
            remove_tree(target / "files")
            raise
        os.sync()  # after a power failure no file of an environment is empty
    manifest = hashlib.sha256(b"".join(line + b"\0" for _, line in sorted(copy.lines)))
    return Adopted(
        manifest.hexdigest(), copy.files, copy.size_bytes, copy.shared_bytes, dict(copy.dropped)
    )


def sweep_shared(shared: Path) -> int:
    """Remove the shared files that no environment has; return their bytes. In a worker."""
    freed = 0
    for above, _, names in walk(shared):
        for name in names:
            path = os.path.join(above, name)
            with suppress(FileNotFoundError):
                st = os.lstat(path)
                if st.st_nlink == 1:
                    os.unlink(path)
                    # 512 bytes, whatever the file system's block is (inode(7))
                    freed += st.st_blocks * 512
    return freed


class _TreeCopy:
    def __init__(self, shared: Path, relocation: Relocation) -> None:
        self._relocation = relocation
        self.lines: list[tuple[bytes, bytes]] = []
        self.files = self.size_bytes = self.shared_bytes = 0
        self.dropped: Counter[str] = Counter()
        self._entries = 0
        self._shared = shared

    def directory(self, source: int, target: Path, above: bytes) -> None:
        """Copy the content of an open directory."""
        _must_not_exceed(above.count(b"/"), TREE_DEPTH_LIMIT, "nested directories")
        _must_not_exceed(len(above), ENVIRONMENT_PATH_LIMIT_BYTES, "bytes in a path")
        os.mkdir(target, 0o755)
        entries = sorted(entries_in(source))
        self._entries += len(entries)
        _must_not_exceed(self._entries, ENVIRONMENT_FILES_LIMIT, "files")
        for name, kind in entries:
            path, to = above + name, target / os.fsdecode(name)
            if kind == stat.S_IFDIR:
                with opened(open_child(source, name)) as child:
                    self.directory(child, to, path + b"/")
            elif kind == stat.S_IFREG:
                with opened(self._relocation.file(path, open_regular(source, name))) as file:
                    self._file(file, to, path)
            elif kind == stat.S_IFLNK:
                aim = self._relocation.text(os.readlink(name, dir_fd=source))
                self._link(aim, to, path)
            else:
                self.dropped["devices, pipes and sockets"] += 1
        os.utime(target, ns=(_MTIME_NS, _MTIME_NS))

    def _file(self, source: int, target: Path, path: bytes) -> None:
        st = os.fstat(source)
        if st.st_mode & (stat.S_ISUID | stat.S_ISGID):
            self.dropped["set-id bits"] += 1
        size_mib = (self.size_bytes + st.st_size) >> 20
        _must_not_exceed(
            size_mib, ENVIRONMENT_BYTES_LIMIT >> 20, "MiB, of which a hole of a file counts"
        )
        mode = 0o755 if st.st_mode & stat.S_IXUSR else 0o644
        digest = _hash(source)
        self.lines.append((path, b"%06o %s %s" % (stat.S_IFREG | mode, digest.encode(), path)))
        self.files += 1
        self.size_bytes += st.st_size
        shared = self._shared / digest[:2] / f"{digest}-{mode:o}"
        if st.st_size == 0:  # ext4 has 65,000 links for a file, and there may be more
            _write(source, target, mode)
        elif _link_shared(shared, target, digest):
            self.shared_bytes += st.st_size
        else:
            _write(source, target, mode)
            shared.parent.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileExistsError):
                os.link(target, shared)

    def _link(self, aim: bytes, target: Path, path: bytes) -> None:
        """Copy a link that stays inside the prefix or leads to the host's programs."""
        text = os.fsdecode(aim)
        place = os.path.normpath(
            os.path.join(ENVIRONMENT, os.path.dirname(os.fsdecode(path)), text)
        )
        if not f"{place}/".startswith(_LINKS_OUT):
            self.dropped["links that lead out"] += 1
            return
        os.symlink(text, target)
        os.utime(target, ns=(_MTIME_NS, _MTIME_NS), follow_symlinks=False)
        digest = hashlib.sha256(aim).hexdigest().encode()
        mode = os.lstat(target).st_mode
        self.lines.append((path, b"%06o %s %s" % (mode, digest, path)))


def _must_not_exceed(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise LimitReachedError(
            f"cannot keep what was built: it has more than {limit} {what}",
            hint="remove files in the last of the recipe's commands",
        )


def _hash(source: int) -> str:
    digest = hashlib.sha256()
    while piece := os.read(source, _PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _link_shared(shared: Path, target: Path, digest: str) -> bool:
    """Link a shared file after checking its content. Return False if there is none to link."""
    try:
        with open_plain(shared) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                shared.unlink()
                return False
        os.link(shared, target)
    except FileNotFoundError:
        return False
    except OSError as error:
        # no room for a link: the next copy becomes the shared file
        if error.errno != errno.EMLINK:
            raise
        shared.unlink()
        return False
    return True


def _write(source: int, target: Path, mode: int) -> None:
    os.lseek(source, 0, os.SEEK_SET)
    with opened(os.open(target, CREATE, mode)) as sink:
        while piece := os.read(source, _PIECE):
            write_all(sink, piece)
        os.fchmod(sink, mode)  # whatever the umask
        os.utime(sink, ns=(_MTIME_NS, _MTIME_NS))
