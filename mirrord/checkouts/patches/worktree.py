"""The files of a checkout as git would record them, read as their owner.

Reads regular files and the texts of links through descriptors, in directories that no link and no
mount leads to; nothing is followed, waited for or run, and what is read is bounded. The user's
`.git`, its configuration and excludes are never read. Sync; runs in workers.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...errors import CheckoutBusyError, DiffTooLargeError, OwnerDeniedError, TreeRefusedError
from ...git.objects.repository import Objects, open_objects
from ...git.objects.text import Conversion, find_conversion
from ...git.objects.trees import BaseTree, TreeEntry
from ...git.patterns import Attributes
from ...host.files import mounted_on, open_directory, opened, shown_path
from ...host.processes import ActingAs
from ..files.reader import TreeReader

BYTES_LIMIT = 512 * 1024**2
LINK, FILE, EXECUTABLE = 0o120000, 0o100644, 0o100755
SMALLER_HINT = "remove it, or let a .gitignore name it"

_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
_LOOKS = 3
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PatchJob:
    """A checkout as patches see it: `root` has the files, `tree` is the base commit's, or with a
    prepared layer what that made of it; `mirror` has its objects. `scratch` is a private directory.
    """

    root: Path
    mirror: Path
    commit: str
    tree: str
    owner: tuple[int, int]
    scratch: Path


class RawFile(NamedTuple):
    """git's mode, the bytes on the disk or the text of a link, and how git converts them."""

    mode: int
    data: bytes
    conversion: Conversion | None = None


@contextmanager
def open_worktree(job: PatchJob) -> "Iterator[Worktree]":
    """Open a checkout; raises CheckoutBusyError where its tree was replaced.

    Inside, the refusal of a path that its owner may not use becomes an OwnerDeniedError.
    """
    try:
        tree = open_directory(job.root)
    except OSError as error:
        raise CheckoutBusyError(
            f"cannot open the checkout's directory: {error.strerror}",
            hint="it was replaced or removed; reset the checkout",
        ) from error
    owner = ActingAs(job.owner)
    with (
        opened(tree) as root,
        open_objects(job.mirror) as objects,
        denials_named(job.owner),
        TreeReader(root, owner) as reader,
    ):
        yield Worktree(root, owner, reader, objects, BaseTree(objects, job.tree))


@contextmanager
def denials_named(owner: tuple[int, int]) -> Iterator[None]:
    """Turn the refusal of a path in a checkout, which is bytes, into an OwnerDeniedError."""
    try:
        yield
    except PermissionError as error:
        if not isinstance(error.filename, bytes):
            raise
        path = shown_path(error.filename)
        raise OwnerDeniedError(
            f"cannot use {path} in the checkout: its owner, uid {owner[0]}, may not",
            hint="make it accessible to the owner, remove it, or let a .gitignore name it",
            path=error.filename.decode(errors="backslashreplace"),
        ) from error


class Worktree:
    """An open checkout over the tree of its base commit.

    `attributes` are those of the files as they are; a conversion also follows those of the base
    that were removed, as git does, which has them in its index. `changed`, once it is known, has
    every path that may differ; a directory that the base does not have stands for all in it.
    `modes` has the `st_mode` of each file that was read.
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

    def look(self, path: bytes, kind: int | None = None) -> RawFile | None:
        """The file at a path, of a `kind` where that was seen; None where git tracks nothing.

        The caller acts as the owner, and has looked the path up in the base. PermissionError where
        the owner may not read it.
        """
        found = self._fetch(path, kind)
        if found is None or found.mode == LINK:
            return found
        conversion = find_conversion(self._all_attributes, path)
        return found._replace(conversion=conversion) if conversion else found

    def find_attribute_files(self, paths: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        """The attribute files that speak of these paths, each with its directory."""
        for path in paths:
            self.attributes.find(path)
        files = self._attribute_files.items()
        return [(directory, content) for directory, content in files if content]

    def clean(self, path: bytes, raw: RawFile, before: TreeEntry | None) -> bytes:
        """The blob that git records of a file, `before` in the base: conversions are undone."""

        def read_before() -> bytes:
            is_blob = before is not None and not (before.is_tree or before.is_submodule)
            return self.objects.read_blob(before.oid) if before and is_blob else b""

        try:
            return raw.conversion.clean(raw.data, read_before) if raw.conversion else raw.data
        except ValueError as error:
            raise unrecordable(path, str(error)) from error

    def read_rules(self, path: bytes) -> bytes | None:
        """A file of rules, as the owner: git follows no link to one, and converts none."""
        if self._is_absent(path):
            return None
        with self.owner:
            found = self._fetch(path, None)
        return found.data if found and found.mode != LINK else None

    def _is_absent(self, path: bytes) -> bool:
        """Whether neither the base nor a change has a file of rules in a directory of the base."""
        if self.changed is None or path in self.changed:
            return False
        above, _, name = path.rpartition(b"/")
        names = self.base.names_in(above)
        return bool(names) and name not in names

    def attributes_in(self, directory: bytes) -> bytes | None:
        """The attribute file of a directory, as it is now."""
        if directory not in self._attribute_files:
            content = self.read_rules(_within(directory, b".gitattributes"))
            self._attribute_files[directory] = content
        return self._attribute_files[directory]

    def _all_attributes_in(self, directory: bytes) -> bytes | None:
        content = self.attributes_in(directory)
        entry = self.base.find(_within(directory, b".gitattributes"))
        if content is None and entry and stat.S_ISREG(entry.mode):
            with self.owner.aside():
                return self.objects.read_blob(entry.oid)
        return content

    def _fetch(self, path: bytes, kind: int | None) -> RawFile | None:
        """Mode and bytes; looked at again where something is replaced meanwhile."""
        for _ in range(_LOOKS):
            was_told = kind is not None
            try:
                if kind is None:
                    seen = self.reader.find_stat(path)
                    kind = stat.S_IFMT(seen.st_mode) if seen else 0
                if kind not in (stat.S_IFREG, stat.S_IFLNK):  # git tracks nothing else
                    return None
                directory, name = self.reader.locate(path)
                if kind == stat.S_IFLNK:
                    text = os.readlink(name, dir_fd=directory)
                    self._count(len(text))
                    return RawFile(LINK, text)
                fd, found = self.owner.open_seen(directory, name)
                try:
                    self.modes[path] = found.st_mode
                    mode = EXECUTABLE if found.st_mode & 0o100 else FILE
                    return RawFile(mode, self._read_all(fd, found.st_size))
                finally:
                    os.close(fd)
            except PermissionError as error:
                if not was_told:  # else a stat lets the owner into the directory above
                    raise PermissionError(error.errno, error.strerror, path) from error
            except OSError as error:
                if error.errno == errno.EXDEV:
                    raise mounted_on(path) from error
                if error.errno not in _REPLACED:  # by something else, since it was looked at
                    raise
            kind = None
        raise CheckoutBusyError(
            f"cannot read {shown_path(path)}: it changes while it is read",
            hint="stop what runs in the checkout",
        )

    def _read_all(self, fd: int, size: int) -> bytes:
        """Everything in a file that had `size` bytes: one read is enough for most."""
        self._count(size)
        data = os.read(fd, size + 1)
        if len(data) == size:
            return data
        pieces = [data]
        self._count(len(data) - size)
        while piece := os.read(fd, _CHUNK_BYTES):
            self._count(len(piece))
            pieces.append(piece)
        return b"".join(pieces)

    def _count(self, size: int) -> None:
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise DiffTooLargeError(
                "cannot copy what changed in the checkout:"
                f" the changed files hold more than {BYTES_LIMIT >> 20} MiB",
                hint=SMALLER_HINT,
            )


def unrecordable(path: bytes, fact: str) -> TreeRefusedError:
    return TreeRefusedError(
        f"cannot record what changed in the checkout: {shown_path(path)}: {fact}",
        hint="mend or remove the file, or its attributes",
    )


def _within(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name
