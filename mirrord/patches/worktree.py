"""The files of a checkout, read as git would record them, as their owner.

Reads regular files and link targets through descriptors, without following a link or entering a
mount. Never blocks on a pipe, runs anything, or reads the user's `.git`, its configuration or
excludes. The bytes read are bounded. Sync; runs in workers.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..git.modes import EXECUTABLE, REGULAR, SYMLINK
from ..git.objects.repository import Objects, open_objects
from ..git.objects.text import Conversion, find_conversion
from ..git.objects.trees import BaseTree, TreeEntry
from ..git.patterns import Attributes
from ..host.files import mounted_on, open_directory, opened, shown_path
from ..host.processes import ActingAs, Owner
from ..quoting import quote_name
from ..trees.reader import TreeReader

ATTRIBUTES = b".gitattributes"
# of all changed files: a worker has them in memory at once
BYTES_LIMIT = 512 * 1024**2
SMALLER_HINT = "remove it, or add it to .gitignore"


@dataclass(frozen=True, slots=True)
class PatchJob:
    """The checkout of a diff, apply or restore.

    `root` has the files; `tree` is that of the base commit, or of a prepared layer over it;
    `mirror` has its objects. `scratch` is a private directory. A checkout with the agent view
    `is_sealed`: no patch brings another commit of a submodule.
    """

    root: Path
    mirror: Path
    commit: str
    tree: str
    owner: Owner
    scratch: Path
    is_sealed: bool = True

    @property
    def private(self) -> Path:
        """The private directory of the checkout."""
        return self.scratch.parent


class RawFile(NamedTuple):
    """git's mode, the bytes on disk or the target of a link, and their conversion."""

    mode: int
    data: bytes
    conversion: Conversion | None = None


@contextmanager
def open_worktree(job: PatchJob, objects: Objects | None = None) -> "Iterator[Worktree]":
    """Open a checkout; raises CheckoutBusyError where its tree was replaced.

    `objects` is its mirror, if that is open already. Inside, PermissionError for a path becomes
    OwnerDeniedError.
    """
    try:
        tree = open_directory(job.root)
    except OSError as error:
        raise errors.CheckoutBusyError(
            f"cannot open the checkout's directory: {error.strerror}",
            hint="it was replaced or removed; reset the checkout",
        ) from error
    owner = ActingAs(job.owner)
    with (
        opened(tree) as root,
        nullcontext(objects) if objects else open_objects(job.mirror) as objects,
        denials_named(job.owner),
        TreeReader(root, owner) as reader,
    ):
        yield Worktree(root, owner, reader, objects, BaseTree(objects, job.tree))


@contextmanager
def denials_named(owner: Owner) -> Iterator[None]:
    """Turn PermissionError for a path in a checkout, which is bytes, into OwnerDeniedError."""
    try:
        yield
    except PermissionError as error:
        if not isinstance(error.filename, bytes):
            raise
        path = shown_path(error.filename)
        raise errors.OwnerDeniedError(
            f"cannot use {path} in the checkout: its owner, uid {owner[0]}, may not",
            hint="make it accessible to the owner, remove it, or add it to .gitignore",
            path=quote_name(error.filename),
        ) from error


# of a path that has become something else; EINVAL: no link any more; ENXIO: a socket
_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
_READ_TRIES = 3
_CHUNK_BYTES = 1 << 20


class Worktree:
    """An open checkout over the tree of its base commit.

    `attributes` are those of the files as they are. A conversion also uses removed attribute files
    of the base, as git does, which has them in its index. `changed`, once known, has every path
    that may differ; a new directory stands for all in it. `modes` has the `st_mode` of each file
    that was read.
    """

    def __init__(
        self, root: int, owner: ActingAs, reader: TreeReader, objects: Objects, base: BaseTree
    ) -> None:
        self.root, self.owner, self.reader = root, owner, reader
        self.objects, self.base = objects, base
        self.attributes = Attributes(self.attributes_in)
        self._all_attributes = Attributes(self._all_attributes_in)
        self._attribute_files: dict[bytes, bytes | None] = {}
        self._bytes_left = BYTES_LIMIT
        self.changed: Set[bytes] | None = None
        self.modes: dict[bytes, int] = {}

    def read(self, path: bytes, kind: int | None = None) -> RawFile | None:
        """Read the file at a path, of `kind` if that is known; None where git tracks nothing.

        Call as the owner. Raises PermissionError where the owner may not read it.
        """
        content = self._fetch(path, kind)
        if content is None or content.mode == SYMLINK:
            return content
        conversion = find_conversion(self._all_attributes, path)
        return content._replace(conversion=conversion) if conversion else content

    def attribute_files(self, paths: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        """Return the attribute files that apply to these paths, each with its directory."""
        for path in paths:
            self.attributes.find(path)
        files = self._attribute_files.items()
        return [(directory, content) for directory, content in files if content]

    def clean(self, path: bytes, raw: RawFile, before: TreeEntry | None) -> bytes:
        """Return the blob that git records of a file; `before` is its entry in the base."""

        def read_before() -> bytes:
            is_blob = before is not None and not (before.is_tree or before.is_submodule)
            return self.objects.read_base_blob(before.oid) if before and is_blob else b""

        try:
            return raw.conversion.clean(raw.data, read_before) if raw.conversion else raw.data
        except ValueError as error:
            raise unrecordable(path, str(error)) from error

    def read_rules(self, path: bytes) -> bytes | None:
        """Read a `.gitignore` or `.gitattributes`; as in git it is no link and not converted."""
        if self._is_absent(path):
            return None
        with self.owner:
            content = self._fetch(path, None)
        return content.data if content and content.mode != SYMLINK else None

    def _is_absent(self, path: bytes) -> bool:
        """Return whether neither the base nor a change has this file in a directory of the base."""
        if self.changed is None or path in self.changed:
            return False
        above, _, name = path.rpartition(b"/")
        names = self.base.names_in(above)
        return bool(names) and name not in names

    def attributes_in(self, directory: bytes) -> bytes | None:
        """Return the current attribute file of a directory."""
        if directory not in self._attribute_files:
            content = self.read_rules(within(directory, ATTRIBUTES))
            self._attribute_files[directory] = content
        return self._attribute_files[directory]

    def _all_attributes_in(self, directory: bytes) -> bytes | None:
        content = self.attributes_in(directory)
        entry = self.base.find(within(directory, ATTRIBUTES))
        if content is None and entry and stat.S_ISREG(entry.mode):
            # the objects are the daemon's, and its owner may not read them
            with self.owner.aside():
                return self.objects.read_blob(entry.oid)
        return content

    def _fetch(self, path: bytes, kind: int | None) -> RawFile | None:
        """Read mode and bytes; tries again where the path is replaced meanwhile."""
        for _ in range(_READ_TRIES):
            was_known = kind is not None
            try:
                if kind is None:
                    seen = self.reader.find_stat(path)
                    kind = stat.S_IFMT(seen.st_mode) if seen else 0
                if kind not in (stat.S_IFREG, stat.S_IFLNK):  # git tracks nothing else
                    return None
                directory, name = self.reader.locate(path)
                if kind == stat.S_IFLNK:
                    text = os.readlink(name, dir_fd=directory)
                    self._charge(len(text))
                    return RawFile(SYMLINK, text)
                fd = self.owner.open_regular(directory, name)
                try:
                    st = os.fstat(fd)
                    self.modes[path] = st.st_mode
                    mode = EXECUTABLE if st.st_mode & 0o100 else REGULAR
                    return RawFile(mode, self._read_all(fd, st.st_size))
                finally:
                    os.close(fd)
            except PermissionError as error:
                if not was_known:  # else the next try lets the owner into the directory
                    raise PermissionError(error.errno, error.strerror, path) from error
            except OSError as error:
                # openat2(2) with RESOLVE_NO_XDEV enters no mount
                if error.errno == errno.EXDEV:
                    raise mounted_on(path) from error
                if error.errno not in _REPLACED:  # by something else since the stat
                    raise
            kind = None
        raise errors.CheckoutBusyError(
            f"cannot read {shown_path(path)}: it changes while it is read",
            hint="stop the processes in the checkout",
        )

    def _read_all(self, fd: int, size: int) -> bytes:
        """Read a file that had `size` bytes; one read is enough unless it grew."""
        self._charge(size)
        data = os.read(fd, size + 1)
        if len(data) == size:
            return data
        pieces = [data]
        self._charge(len(data) - size)
        while piece := os.read(fd, _CHUNK_BYTES):
            self._charge(len(piece))
            pieces.append(piece)
        return b"".join(pieces)

    def _charge(self, size: int) -> None:
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise errors.TooLargeError(
                "cannot copy what changed in the checkout:"
                f" the changed files hold more than {BYTES_LIMIT >> 20} MiB",
                hint=SMALLER_HINT,
            )


def unrecordable(path: bytes, fact: str) -> errors.ConflictError:
    return errors.ConflictError(
        f"cannot record what changed in the checkout: {shown_path(path)}: {fact}",
        hint="fix or remove the file, or its attributes",
    )


def within(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name
