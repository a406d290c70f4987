"""Take what a build made over as an immutable environment: copied, hashed, shared by content.

Runs in a worker, when all processes of the build have ended. Nothing of the build's own inodes is
kept, so no descriptor that it left open anywhere can change an environment. Files get mode 644 or
755 and one time, so that equal ones are one on disk, whichever build they are of.
"""

import errno
import hashlib
import os
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..host.files import (
    CREATE,
    entries_in,
    full_disk_named,
    open_child,
    open_directory,
    open_regular,
    opened,
    write_all,
)
from ..places import ENVIRONMENT

_MTIME_NS = 315_532_800 * 10**9  # 1980-01-01, the earliest that a ZIP archive can say
_PIECE = 1 << 20
_LINKS_OUT = ("/usr/", f"{ENVIRONMENT}/")  # what every sandbox has at the same place


class Adopted(NamedTuple):
    """`manifest` is a digest of all that was kept: the sha256 of the lines `MODE SHA256 PATH`, each
    with a NUL, sorted by path; the hash of a link is that of its target. `shared_bytes` other
    environments had already; `dropped` counts what was left out or changed, by the reason.
    """

    manifest: str
    files: int
    size_bytes: int
    shared_bytes: int
    dropped: dict[str, int]


def adopt(source: Path, target: Path, shared: Path) -> Adopted:
    """Copy the prefix `source` to `target`/files, which is made of links to files in `shared`."""
    with full_disk_named("an environment"):
        shared.mkdir(mode=0o700, exist_ok=True)
        copy = _Copy(shared)
        with opened(open_directory(source)) as directory:
            copy.directory(directory, target / "files", b"")
        os.sync()  # a power cut does not leave an environment with empty files
    manifest = hashlib.sha256(b"".join(line + b"\0" for _, line in sorted(copy.lines)))
    return Adopted(
        manifest.hexdigest(), copy.files, copy.size_bytes, copy.shared_bytes, dict(copy.dropped)
    )


def sweep_shared(shared: Path) -> int:
    """Remove the shared files that no environment has; answers their bytes. In a worker."""
    freed = 0
    for above, _, names in os.walk(shared):
        for name in names:
            path = os.path.join(above, name)
            with suppress(FileNotFoundError):
                found = os.lstat(path)
                if found.st_nlink == 1:
                    os.unlink(path)
                    freed += found.st_blocks * 512
    return freed


class _Copy:
    def __init__(self, shared: Path) -> None:
        self.lines: list[tuple[bytes, bytes]] = []
        self.files = self.size_bytes = self.shared_bytes = 0
        self.dropped: Counter[str] = Counter()
        self._shared = shared

    def directory(self, source: int, target: Path, above: bytes) -> None:
        """Copy what is in an open directory."""
        os.mkdir(target, 0o755)
        for name, kind in sorted(entries_in(source)):
            path, to = above + name, target / os.fsdecode(name)
            if kind == stat.S_IFDIR:
                with opened(open_child(source, name)) as child:
                    self.directory(child, to, path + b"/")
            elif kind == stat.S_IFREG:
                with opened(open_regular(source, name)) as file:
                    self._file(file, to, path)
            elif kind == stat.S_IFLNK:
                self._link(os.readlink(name, dir_fd=source), to, path)
            else:
                self.dropped["devices, pipes and sockets"] += 1
        os.utime(target, ns=(_MTIME_NS, _MTIME_NS))

    def _file(self, source: int, target: Path, path: bytes) -> None:
        found = os.fstat(source)
        if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
            self.dropped["set-id bits"] += 1
        mode = 0o755 if found.st_mode & stat.S_IXUSR else 0o644
        digest = _hash(source)
        self.lines.append((path, b"%06o %s %s" % (stat.S_IFREG | mode, digest.encode(), path)))
        self.files += 1
        self.size_bytes += found.st_size
        known = self._shared / digest[:2] / f"{digest}-{mode:o}"
        if found.st_size == 0:  # more of them than ext4 has links for, 65,000, and no bytes
            _write(source, target, mode)
        elif _linked(known, target, digest):
            self.shared_bytes += found.st_size
        else:
            _write(source, target, mode)
            known.parent.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileExistsError):  # full of links: the next ones are of this
                os.link(target, known)

    def _link(self, aim: bytes, target: Path, path: bytes) -> None:
        """A link stays inside the prefix, or leads where every sandbox has the host's programs."""
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


def _hash(source: int) -> str:
    digest = hashlib.sha256()
    while piece := os.read(source, _PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _linked(known: Path, target: Path, digest: str) -> bool:
    """Link a shared file, proven by content once more; False where it is missing, damaged, full."""
    try:
        with open(known, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                known.unlink()
                return False
        os.link(known, target)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EMLINK:
            raise
        known.unlink()
        return False
    return True


def _write(source: int, target: Path, mode: int) -> None:
    os.lseek(source, 0, os.SEEK_SET)
    with opened(os.open(target, CREATE, mode)) as sink:
        while piece := os.read(source, _PIECE):
            write_all(sink, piece)
        os.fchmod(sink, mode)  # whatever the umask
        os.utime(sink, ns=(_MTIME_NS, _MTIME_NS))
