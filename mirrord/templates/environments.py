"""Environments on disk: adopted from builds, found by key, kept while in use, removed.

An environment is the directory `templates/.environments/<digest>` with `files` (the prefix, which
checkouts show at a fixed path), `environment.json` (what it is and how it was built) and `log`; the
digest is that of its recipe. A failed build has no `files`. Each appears by one rename, and `files`
never changes; a crash leaves `.building-…`, which the next start removes. Files of equal content
and mode are hard links of one in `.files`. The daemon's user owns all of it.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConflictError, LimitReachedError, NotFoundError, full_disk_named
from ..host.files import (
    CREATE,
    entries_in,
    open_child,
    open_directory,
    open_plain,
    open_regular,
    opened,
    read_plain,
    write_all,
)
from ..host.trash import TRASH_PREFIX, Trash, new_trash, remove_tree
from ..jsontext import loads
from ..model import ENVIRONMENT_KEY, TREE_DEPTH_LIMIT, TREE_PATH_LIMIT_BYTES, EnvironmentName, shown
from ..places import ENVIRONMENT, TESTBED
from ..telemetry import log
from ..trees.relocation import Relocation

DIRECTORY = ".environments"
"""Below `templates`, which the mounter shows to each owner as its own."""
RECORD = "environment.json"
_BUILDING = ".building-"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MTIME_NS = 315_532_800 * 10**9  # 1980-01-01, the earliest time in a ZIP archive
# hashed and copied at a time
_PIECE = 1 << 20
FILES_LIMIT = 1_000_000
"""Of an environment: ten times as many as conda's largest; each costs an inode of the host."""
BYTES_LIMIT = 20 * 1024**3
"""As much as an image by default; environments with CUDA have 5 to 10 GiB."""
_LINKS_OUT = ("/usr/", f"{ENVIRONMENT}/")  # these paths are the same in every sandbox
_NAME = re.compile(rf"({ENVIRONMENT_KEY.pattern})(?:@([0-9a-f]{{4,64}}))?")


class EnvironmentRecord(NamedTuple):
    """The content of `environment.json`: `facts` are its members, `at` is when it was built."""

    key: str
    digest: str
    is_ready: bool
    at: float
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """KEY@DIGEST, with a shortened digest; requests may use it."""
        return str(EnvironmentName(self.key, self.digest))


class EnvironmentStore:
    """The environments of a state directory; `held` counts their uses by digest.

    Belongs to one event loop.
    """

    def __init__(self, state_dir: Path, trash: Trash) -> None:
        self.root = state_dir / "templates" / DIRECTORY
        self.shared, self.layers = self.root / ".files", self.root / ".layers"
        self._trash = trash
        self._records: dict[str, EnvironmentRecord] = {}
        self.held: Counter[str] = Counter()

    def open(self) -> None:
        """Read what is on disk; remove what is incomplete, and keep what cannot be read."""
        self.sweep_layers(unfinished=True)
        with suppress(FileNotFoundError):
            for path in sorted(self.root.iterdir()):
                if path.name.startswith((_BUILDING, TRASH_PREFIX)):
                    self._trash.remove(path)
                elif path not in (self.shared, self.layers):
                    self._open(path)

    def _open(self, path: Path) -> None:
        try:
            record = _read(path)
        except OSError as error:  # a checkout may show it
            log.warning("environment.unreadable", path=str(path), error=str(error))
            return
        if record:
            self._records[record.digest] = record
        else:
            self._trash.discard(path)

    def find(self, name: str) -> EnvironmentRecord | None:
        """Return the ready environment of a name: KEY, of which the newest, or KEY@DIGEST, with a
        prefix of the digest.
        """
        ready = [record for record in self.iter_records(name) if record.is_ready]
        return max(ready, key=lambda record: record.at, default=None)

    def get(self, name: str) -> EnvironmentRecord:
        """Return the ready environment of a name. Raises NotFoundError."""
        if (record := self.find(name)) is None:
            raise not_found(name)
        return record

    def list(self) -> list[EnvironmentRecord]:
        """Return all environments, failed builds included, by key."""
        return sorted(self._records.values(), key=lambda record: (record.key, record.at))

    def iter_records(self, name: str) -> Iterator[EnvironmentRecord]:
        """Iterate over the environments that a name may mean, failed builds included."""
        if match := _NAME.fullmatch(name):
            key, prefix = match.groups("")
            for record in self._records.values():
                if record.key == key and record.digest.startswith(prefix):
                    yield record

    def record(self, digest: str) -> EnvironmentRecord | None:
        return self._records.get(digest)

    def directory(self, digest: str) -> Path:
        """Return the prefix of an environment."""
        return self.root / digest / "files"

    def lowers(self, digest: str, cover: str | None = None) -> tuple[Path, ...]:
        """Return the layers of an environment, the top first: its prefix, or an image's.

        `cover` is a layer of whiteouts over them (`environments/leaks.py`).
        """
        record = self._records.get(digest)
        stack = record.facts.get("stack", []) if record else []
        covers = (self.root / digest / cover,) if cover else ()
        return (*covers, self.directory(digest), *(self.layers / name for name in stack))

    def find_image(self, digest: str) -> str | None:
        """Return what commands in an image start with, as JSON; None for other environments."""
        record = self._records.get(digest)
        return json.dumps(record.facts["image"]) if record and "image" in record.facts else None

    # -- layers of images --------------------------------------------------------------------------

    def read_layer(self, name: str) -> dict[str, Any] | None:
        """Return what is known of a layer; None if it is not here."""
        with suppress(FileNotFoundError, ValueError):
            content = loads(read_plain(self.layers / f"{name}.json"))
            return dict(content) if (self.layers / name).is_dir() else None
        return None

    def add_layer(self, made: Path, name: str, content: dict[str, Any]) -> None:
        """Publish a layer, which appears with the second rename."""
        with full_disk_named("a layer of an image"):
            new = self.layers / f".building-{name}.json"
            new.write_text(json.dumps(content))
            new.rename(self.layers / f"{name}.json")
        made.rename(self.layers / name)

    def sweep_layers(self, *, unfinished: bool = False) -> None:
        """Remove the layers that no image has; those `unfinished` instead, where nothing makes
        them.
        """
        used = {name for record in self._records.values() for name in record.facts.get("stack", [])}
        with suppress(FileNotFoundError):
            for path in sorted(self.layers.iterdir()):
                is_building = path.name.startswith((_BUILDING, TRASH_PREFIX))
                if is_building if unfinished else not is_building and path.stem not in used:
                    gone = new_trash(self.layers)
                    path.rename(gone)
                    self._trash.add(gone) if not unfinished else self._trash.remove(gone)

    # -- in use ------------------------------------------------------------------------------------

    def hold(self, digest: str, n: int = 1) -> None:
        """Count a use of an environment, with `n` -1 one less. Do not await between `find` and
        this.
        """
        self.held[digest] += n
        with suppress(FileNotFoundError):
            # the mtime is what `used_at` reads, also in the next daemon
            os.utime(self.root / digest)

    def drop(self, digest: str) -> None:
        """Undo one `hold`."""
        self.hold(digest, -1)

    def used_at(self, digest: str) -> float:
        """Return when a use of it last began or ended, or else when it was built."""
        with suppress(FileNotFoundError):
            return (self.root / digest).stat().st_mtime
        return 0.0

    # -- changes -----------------------------------------------------------------------------------

    def new_path(self) -> Path:
        """Return a path to build an environment at."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        return self.root / f"{_BUILDING}{secrets.token_hex(8)}"

    def add(self, built: Path, digest: str) -> EnvironmentRecord:
        """Publish what was built, replacing a failed build."""
        if record := _read(built):
            self._discard(digest)
            built.rename(self.root / digest)
            self._records[digest] = record
            return record
        raise FileNotFoundError(built / RECORD)

    def remove(self, digest: str) -> None:
        """Remove an environment. Raises ConflictError."""
        if self.held[digest]:
            record = self._records[digest]
            raise ConflictError(
                f"cannot remove environment {record.name}: a checkout or a prepared layer uses it",
                hint="release its checkouts; see `mirrord layer list`",
            )
        self._records.pop(digest, None)
        self._discard(digest)

    def _discard(self, digest: str) -> None:
        gone = new_trash(self.root)
        with suppress(FileNotFoundError):
            (self.root / digest).rename(gone)
            self._trash.add(gone)


def not_found(name: str) -> NotFoundError:
    return NotFoundError(
        f"cannot find environment {shown(name)}: none of that name is built",
        hint="see `mirrord environment list`; `mirrord environment build` builds one",
        kind="environment",
    )


def _read(path: Path) -> EnvironmentRecord | None:
    """Return the record in a directory; None if it is incomplete. Raises OSError."""
    try:
        content = loads(read_plain(path / RECORD))
        is_ready = content["state"] == "ready"
        record = EnvironmentRecord(
            content["key"], content["digest"], is_ready, content["at"], content
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    is_named = path.name.startswith(_BUILDING) or path.name == record.digest
    if not (is_named and _DIGEST.fullmatch(record.digest)):
        return None
    return record if not is_ready or (path / "files").is_dir() else None


# -- adopted from a build -------------------------------------------------------------------------


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
    for above, _, names in os.walk(shared):
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
        _must_not_exceed(len(above), TREE_PATH_LIMIT_BYTES, "bytes in a path")
        os.mkdir(target, 0o755)
        entries = sorted(entries_in(source))
        self._entries += len(entries)
        _must_not_exceed(self._entries, FILES_LIMIT, "files")
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
        _must_not_exceed(size_mib, BYTES_LIMIT >> 20, "MiB, of which a hole of a file counts")
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
