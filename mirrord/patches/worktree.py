"""The files of a checkout: read as git would record them, patched and restored, as their owner.

Reads regular files and link targets through descriptors, without following a link or entering a
mount. Never blocks on a pipe, runs anything, or reads the user's `.git`, its configuration or
excludes. The bytes read are bounded. Sync; runs in workers.
"""

import errno
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..errors import full_disk_named
from ..git.objects.repository import Objects, open_objects, read_commit
from ..git.objects.text import Conversion, find_conversion
from ..git.objects.trees import BaseTree, TreeEntry, walk
from ..git.patterns import Attributes
from ..host.files import mounted_on, open_directory, opened, shown_path
from ..host.processes import ActingAs, Owner
from ..model import TREE_DEPTH_LIMIT, ApplyStrategy, FoundStrategy
from ..trees.manifest import blob_id
from ..trees.reader import TreeReader, parents
from ..trees.writer import TreeWriter
from .fit import DIRECTORY, UNTRACKED, BaseFiles, File
from .parse import EXECUTABLE, REGULAR, SUBMODULE, SYMLINK
from .strategies import apply_patch, is_within_limits, must_fit

BYTES_LIMIT = 512 * 1024**2
SMALLER_HINT = "remove it, or let a .gitignore name it"

_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
_READ_TRIES = 3
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PatchJob:
    """The checkout of a diff, apply or restore.

    `root` has the files; `tree` is that of the base commit, or of a prepared layer over it;
    `mirror` has its objects. `scratch` is a private directory.
    """

    root: Path
    mirror: Path
    commit: str
    tree: str
    owner: Owner
    scratch: Path


class RawFile(NamedTuple):
    """git's mode, the bytes on disk or the target of a link, and their conversion."""

    mode: int
    data: bytes
    conversion: Conversion | None = None


@contextmanager
def open_worktree(job: PatchJob) -> "Iterator[Worktree]":
    """Open a checkout; raises CheckoutBusyError where its tree was replaced.

    Inside, PermissionError for a path becomes OwnerDeniedError.
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
        open_objects(job.mirror) as objects,
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
            hint="make it accessible to the owner, remove it, or let a .gitignore name it",
            path=error.filename.decode(errors="backslashreplace"),
        ) from error


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
        found = self._fetch(path, kind)
        if found is None or found.mode == SYMLINK:
            return found
        conversion = find_conversion(self._all_attributes, path)
        return found._replace(conversion=conversion) if conversion else found

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
            return self.objects.read_blob(before.oid) if before and is_blob else b""

        try:
            return raw.conversion.clean(raw.data, read_before) if raw.conversion else raw.data
        except ValueError as error:
            raise unrecordable(path, str(error)) from error

    def read_rules(self, path: bytes) -> bytes | None:
        """Read a `.gitignore` or `.gitattributes`; as in git it is no link and not converted."""
        if self._is_absent(path):
            return None
        with self.owner:
            found = self._fetch(path, None)
        return found.data if found and found.mode != SYMLINK else None

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
            content = self.read_rules(_within(directory, _ATTRIBUTES))
            self._attribute_files[directory] = content
        return self._attribute_files[directory]

    def _all_attributes_in(self, directory: bytes) -> bytes | None:
        content = self.attributes_in(directory)
        entry = self.base.find(_within(directory, _ATTRIBUTES))
        if content is None and entry and stat.S_ISREG(entry.mode):
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
                    found = os.fstat(fd)
                    self.modes[path] = found.st_mode
                    mode = EXECUTABLE if found.st_mode & 0o100 else REGULAR
                    return RawFile(mode, self._read_all(fd, found.st_size))
                finally:
                    os.close(fd)
            except PermissionError as error:
                if not was_known:  # else the next try lets the owner into the directory
                    raise PermissionError(error.errno, error.strerror, path) from error
            except OSError as error:
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
            raise errors.DiffTooLargeError(
                "cannot copy what changed in the checkout:"
                f" the changed files hold more than {BYTES_LIMIT >> 20} MiB",
                hint=SMALLER_HINT,
            )


def unrecordable(path: bytes, fact: str) -> errors.TreeRefusedError:
    return errors.TreeRefusedError(
        f"cannot record what changed in the checkout: {shown_path(path)}: {fact}",
        hint="fix or remove the file, or its attributes",
    )


def _within(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


# -- patches into a checkout, and files of other commits -------------------------------------------
#
# All new files are computed before the first is written. A crash while writing leaves some files of
# the patch; `diff` shows and `reset` removes them. The checkout's index stays as it is: git finds
# the new files by their stat data.

_ATTRIBUTES = b".gitattributes"
_NOT_IN_A_TREE = (b"", b".", b"..", b".git")


def apply(
    job: PatchJob, patch: bytes | Path, reverse: bool, strategy: ApplyStrategy
) -> tuple[list[bytes], FoundStrategy]:
    """Apply a patch to the current files, all or nothing.

    Returns the paths that it wrote or removed, and the strategy that fitted.
    """
    patch = patch.read_bytes() if isinstance(patch, Path) else patch
    with open_worktree(job) as worktree, full_disk_named("the files of the patch"):
        done = apply_patch(
            CheckoutFiles(worktree),
            patch,
            scratch=job.scratch,
            reverse=reverse,
            strategy=strategy,
            base=BaseFiles(worktree.objects, job.tree),
        )
        removed = [each.path for each in done.changes if each.mode is None]
        new = {at.path: File(at.mode, at.data) for at in done.changes if at.mode is not None}
        rules = {path: file.data for path, file in new.items() if _is_rules(path, file.mode)}
        _write(worktree, removed, new.items(), rules)
        return [each.path for each in done.changes], done.strategy


def restore(job: PatchJob, commit: str, paths: list[bytes]) -> list[bytes]:
    """Write the files of `commit` at `paths`, files or directories; returns the written paths."""
    wanted = [_validated(path) for path in paths]
    with open_worktree(job) as worktree, full_disk_named("the files of the commit"):
        objects = worktree.objects
        tree = BaseTree(objects, read_commit(objects, commit).tree)
        entries: dict[bytes, TreeEntry] = {}
        for path in wanted:
            found = tree.find(path) if path.count(b"/") < TREE_DEPTH_LIMIT else None
            if found is None:
                raise errors.PathNotFoundError(
                    f"cannot restore {shown_path(path)}: commit {commit} does not have it",
                    hint="nothing was changed",
                )
            inside = walk(objects, found.oid, path + b"/") if found.is_tree else [found]
            entries |= {entry.path: entry for entry in inside if not entry.is_tree}

        def read(at: TreeEntry) -> File:
            return File(at.mode, b"" if at.is_submodule else objects.read_blob(at.oid))

        links = {path: read(at) for path, at in entries.items() if at.is_symlink}
        others = {path: File(at.mode, b"") for path, at in entries.items()}
        must_fit(others | links, errors.InvalidRequestError)
        rules = {path: read(at).data for path, at in entries.items() if _is_rules(path, at.mode)}
        _write(worktree, [], ((path, read(at)) for path, at in entries.items()), rules)
        return sorted(entries)


class CheckoutFiles:
    """The files of a checkout as a `Tree`, except those in a `.git` or a submodule."""

    def __init__(self, worktree: Worktree) -> None:
        self._worktree = worktree
        self.read = cache(self._read)

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        with self._worktree.owner:
            for below, kind in self._worktree.reader.iter_below(path):
                if kind != stat.S_IFDIR:
                    yield below

    def _is_within(self, path: bytes) -> bool:
        if not is_within_limits(path):
            return False
        is_odd = any(part.lower() in _NOT_IN_A_TREE for part in path.split(b"/"))
        entries = map(self._worktree.base.find, () if is_odd else parents(path))
        return not is_odd and not any(entry.is_submodule for entry in entries if entry)

    def _read(self, path: bytes) -> File | None:
        if not self._is_within(path):
            return None
        worktree = self._worktree
        before = worktree.base.find(path)
        with worktree.owner:
            seen = worktree.reader.find_stat(path)
            if seen is None:
                return None
            if stat.S_ISDIR(seen.st_mode):
                if before and before.is_submodule:
                    return File(SUBMODULE, before.oid.encode())
                return File(DIRECTORY, b"")
            raw = worktree.read(path, stat.S_IFMT(seen.st_mode))
        if raw is None:
            return File(UNTRACKED, b"")
        if raw.conversion and before and stat.S_ISREG(before.mode):
            blob = worktree.objects.read_blob(before.oid)  # an unchanged file keeps its blob
            if raw.conversion.smudge(blob, before.oid) == raw.data:
                return File(raw.mode, blob)
        return File(raw.mode, worktree.clean(path, raw, before))


def _write(
    worktree: Worktree,
    removed: Collection[bytes],
    new: Iterable[tuple[bytes, File]],
    rules: dict[bytes, bytes],
) -> None:
    """Remove the `removed` paths, then write the `new` ones, as the owner.

    Converts by the attributes of the resulting tree; `rules` are the attribute files in `new`.
    """

    def attributes_in(directory: bytes) -> bytes | None:
        path = _within(directory, _ATTRIBUTES)
        if path in rules or path in removed:
            return rules.get(path)
        return worktree.attributes_in(directory)

    attributes = Attributes(attributes_in)
    with TreeWriter(worktree.root, worktree.owner, mtime_ns=time.time_ns()) as writer:
        for path in removed:
            with _denial_of(path):
                writer.remove(path)
                writer.remove_empty_above(path)
        for path, (mode, data) in new:
            is_file = mode in (REGULAR, EXECUTABLE)
            if is_file and (conversion := find_conversion(attributes, path)):
                data = conversion.smudge(data, blob_id(data).hex())
            with _denial_of(path):
                writer.make_directories(path.rpartition(b"/")[0])
                if mode == SUBMODULE:
                    writer.make_directory(path)
                elif mode == SYMLINK:
                    writer.write_symlink(path, data)
                else:
                    writer.write_file(path, data, executable=mode == EXECUTABLE)


@contextmanager
def _denial_of(path: bytes) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, path) from error


def _is_rules(path: bytes, mode: int) -> bool:
    return path.rpartition(b"/")[2] == _ATTRIBUTES and stat.S_ISREG(mode)


def _validated(path: bytes) -> bytes:
    """Return a path without trailing slashes; PathOutsideCheckoutError where it is none."""
    trimmed = path.rstrip(b"/")
    if b"\0" in path or any(part.lower() in _NOT_IN_A_TREE for part in trimmed.split(b"/")):
        raise errors.PathOutsideCheckoutError(
            f"cannot restore {shown_path(path)}: it is not a path in the checkout",
            hint="name paths from the top of the repository",
        )
    return trimmed
