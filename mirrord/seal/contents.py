"""The content of a directory or an archive: every file once, with its git blob id.

Follows no link, opens no device or pipe, enters no other file system. Nested archives are read too:
tar (plain, gzip, bzip2, xz, Zstandard) and zip, the formats of wheels and sdists. The size of
unpacked data is bounded. What cannot be read is reported.
"""

import bz2
import gzip
import hashlib
import lzma
import os
import re
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, Protocol, cast

from ..errors import UsageError
from ..host.files import FOR_READING
from ..host.zstd import ZSTD_MAGIC, ZstdError, open_zstd
from ..model import shown
from ..protocol import RootLeak
from .repository import PACKS, TRIVIAL_BYTES, walk

# read at a time: a member of an archive may be larger than memory
BLOCK_BYTES = 1 << 20
# tells the kind of a file, and is all of most source files
_HEAD_BYTES = 1 << 16
_FREE_BYTES, _RATIO = 1 << 30, 100  # an archive may unpack to 1 GiB and 100 times its size
_HEADER_LIMIT_BYTES = 16 << 20  # of a tar's member: tarfile reads long names into memory
# what the readers raise for damaged or hostile bytes; zipfile has RuntimeError for an encrypted
# member and NotImplementedError for an unknown compression
DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, ValueError, zlib.error, struct.error,
    lzma.LZMAError, ZstdError, RuntimeError, NotImplementedError, OverflowError, MemoryError,
)  # fmt: skip


class TooMuchError(ValueError):
    """An archive unpacks to more than its size allows."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Inside(NamedTuple):
    """A file in an archive, which is a file of the tree."""

    archive: str
    member: str
    oid: bytes


@dataclass(slots=True)
class ScannedTree:
    """A directory, an archive or one layer of an image, by relative paths.

    `files` are everything but directories, with a blob id unless the content is irrelevant; `links`
    are hard links; `texts` are files of installers and git that may lead elsewhere.
    """

    files: dict[str, bytes | None] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)
    inside: list[Inside] = field(default_factory=list)
    packs: set[str] = field(default_factory=set)
    texts: dict[str, bytes] = field(default_factory=dict)


# what could not be read, by name; a hostile archive has no end of it
_NOTES_LIMIT = 200


@dataclass(slots=True)
class Contents:
    """The trees of an archive by its members, and "" for the archive or directory itself.

    `documents` are an archive's own JSON files, which may describe an image.
    """

    trees: dict[str, ScannedTree] = field(default_factory=lambda: {"": ScannedTree()})
    documents: dict[str, bytes] = field(default_factory=dict)
    leaks: list[RootLeak] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    file_count: int = 0
    byte_count: int = 0

    def unreadable(self, path: str, fact: str) -> None:
        self.leaks.append(RootLeak(kind="unreadable", path=path, detail=fact))

    def note(self, path: str, fact: str) -> None:
        if len(self.notes) < _NOTES_LIMIT:
            self.notes.append(f"{shown(path, 400)}: {fact}")


class Stream:
    """A source that is read once, forwards. Calls `take` with each block."""

    mode, closed = "rb", False

    def __init__(self, source: Readable, take: Callable[[bytes], object]) -> None:
        self._source, self._take = source, take
        self._ahead, self._at, self._ended = b"", 0, False

    def peek(self, size: int = _HEAD_BYTES) -> bytes:
        """Return the next bytes without consuming them: all of a small file, in one read."""
        self._ahead = self._read(max(size, len(self._ahead)))
        return self._ahead

    def _read(self, size: int) -> bytes:
        pieces, missing = [self._ahead], size - len(self._ahead)
        while missing > 0 and not self._ended:
            piece = self._source.read(min(missing, BLOCK_BYTES))
            self._ended = not piece
            self._take(piece)
            pieces.append(piece)
            missing -= len(piece)
        self._ahead = b""
        return b"".join(pieces)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _HEADER_LIMIT_BYTES:
            raise TooMuchError(f"it requires {size} bytes at once")
        data = self._read(max(size, len(self._ahead)))
        data, self._ahead = data[:size], data[size:]
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or to < self._at:
            raise OSError("it seeks backwards")
        while self._at < to and self.read(min(BLOCK_BYTES, to - self._at)):
            pass
        return self._at

    def drain(self) -> bool:
        """Read to the end; return whether any byte was not zero."""
        has_data = False
        while block := self.read(BLOCK_BYTES):
            has_data = has_data or bool(block.strip(b"\0"))
        return has_data


def _budget(size: int) -> Callable[[bytes], None]:
    left = _FREE_BYTES + _RATIO * size

    def take(block: bytes) -> None:
        nonlocal left
        left -= len(block)
        if left < 0:
            raise TooMuchError(f"its {size} bytes unpack to more than {_RATIO} times as many")

    return take


def open_tar(source: Readable, size: int) -> Stream | None:
    """Return the uncompressed stream of a tar of `size` bytes; None if it is not a tar."""
    stream, take = source if isinstance(source, Stream) else Stream(source, len), _budget(size)
    head, file = stream.peek(), cast("IO[bytes]", stream)
    if head.startswith(b"\x1f\x8b"):
        stream = Stream(gzip.GzipFile(fileobj=file), take)
    elif head.startswith(b"BZh"):
        stream = Stream(bz2.BZ2File(file), take)
    elif head.startswith(b"\xfd7zXZ\0"):
        # whoever opened the archive closes it
        stream = Stream(lzma.LZMAFile(file), take)  # noqa: SIM115
    elif head.startswith(ZSTD_MAGIC):
        stream = Stream(open_zstd(file), take)
    # POSIX and GNU tar have this magic at 257 (tar(5)); the form of V7 has none
    return stream if stream.peek(tarfile.BLOCKSIZE)[257:262] == b"ustar" else None


def normal(name: str) -> str | None:
    """Normalise a path of an archive; None if it leads out of it."""
    parts = [part for part in name.split("/") if part not in {"", "."}]
    return None if ".." in parts else "/".join(parts)


class Member(NamedTuple):
    """A member with its normal path. `source` is readable until the next member."""

    path: str
    info: tarfile.TarInfo
    source: Readable | None


def iter_tar(stream: Stream) -> Iterator[Member | str]:
    """Iterate the members in order; a string says what cannot be read."""
    with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:") as archive:
        while info := archive.next():
            archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all
            path = normal(info.name)
            if path is None:
                yield f"{shown(info.name)} leads out of it"
            elif info.issparse():  # tarfile (3.11) loops forever on some maps
                yield f"{shown(info.name)} is sparse"
            else:
                yield Member(path, info, archive.extractfile(info) if info.isreg() else None)
    if stream.drain():
        yield "bytes after its end"


# -- reading ---------------------------------------------------------------------------------------


def read_directory(top: Path) -> Contents:
    """Read everything below a directory. Links are listed and not followed."""
    reader = _ContentsReader(is_archive=False)
    contents, tree = reader.contents, reader.top
    with reader.bounded(""):
        for entry in walk(top, one_device=True):
            if entry.kind == "unreadable":
                contents.unreadable(entry.where, "it cannot be read")
            elif entry.kind == "mount":
                contents.note(entry.where, "not entered: another file system")
            elif entry.kind == "file":
                reader.read_file(entry.path, entry.where)
            else:
                tree.files[entry.where] = None
                if entry.kind == "link":
                    reader.read_link(tree, entry.where, os.readlink(entry.path))
    return contents


def read_archive(path: Path) -> Contents:
    """Read a tar archive. A tar inside becomes a tree of its own, because it may be a layer.

    Raises UsageError for other files.
    """
    reader = _ContentsReader(is_archive=True)
    with path.open("rb", buffering=0) as file, reader.bounded(""):
        stream = open_tar(file, path.stat().st_size)
        if stream is None:
            raise UsageError(
                f"cannot scan {shown(str(path))}: it is neither a directory nor a tar archive",
                hint="write an image with `docker save` or `podman save`",
            )
        reader.read_tar(reader.top, stream)
    return reader.contents


# an image in a tar in a zip is found; what is deeper is told, not unpacked
_DEPTH_LIMIT = 4
# of a directory and all of its archives; then the scan ends with that fact
_FILES_LIMIT = 5_000_000


# of files that lead elsewhere (.pth, direct_url.json), which have a few lines
_TEXT_BYTES = 1 << 20


# docker's manifest.json; of an OCI layout index.json, and the manifests among its blobs
_DOCUMENT = re.compile(r"manifest\.json|index\.json|blobs/\w+/[0-9a-f]{32,}")
# a `.git` that is a file; setuptools' path files; PEP 610; finders of editable wheels (PEP 660)
_TEXT = re.compile(r"(.*/)?(\.git|[^/]+\.(pth|egg-link)|direct_url\.json|_[^/]*editable[^/]*\.py)")
_OLD_PIP_CACHE = re.compile(r"(.*/)?pip/http/.*")  # a header, then a wheel


class _ContentsReader:
    def __init__(self, *, is_archive: bool) -> None:
        self.contents = Contents()
        self.top = self.contents.trees[""]
        self._is_archive = is_archive

    @contextmanager
    def bounded(self, path: str, *, may_be_damaged: bool = False) -> Iterator[None]:
        """Report an error that ends the reading; as a note where damage is acceptable."""
        try:
            yield
        except DAMAGED as error:
            report = self.contents.note if may_be_damaged else self.contents.unreadable
            report(path, f"not read to its end: {error}")

    def read_file(self, path: Path, where: str) -> None:
        try:
            with os.fdopen(os.open(path, FOR_READING), "rb", buffering=0) as file:
                self.read(self.top, where, os.fstat(file.fileno()).st_size, file)
        except OSError as error:
            self.contents.unreadable(where, f"it cannot be read: {error.strerror}")

    def read(
        self,
        tree: ScannedTree,
        path: str,
        size: int,
        source: Readable,
        archive: str = "",
        depth: int = 0,
    ) -> None:
        """Read a file of a tree, or a member of `archive`, of which only the content counts."""
        contents = self.contents
        contents.file_count += 1
        contents.byte_count += size
        if contents.file_count > _FILES_LIMIT:
            raise TooMuchError(f"there are more than {_FILES_LIMIT:,} files")
        kept = self._kept(tree, path, archive) if size <= _TEXT_BYTES else None
        if size < TRIVIAL_BYTES and kept is None:
            if not archive:
                tree.files[path] = None
            return
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        stream = Stream(source, digest.update)
        if kept is not None and (kept is tree.texts or stream.peek()[:1] in {b"{", b"["}):
            kept[path] = stream.read(size)
        elif stream.peek().startswith(PACKS):
            tree.packs.add(f"{archive}!{path}" if archive else path)
        else:
            self._look_inside(tree, path, size, stream, archive, depth)
        stream.drain()
        if stream.tell() != size:
            contents.unreadable(path, "its size differs from the declared one")
        elif archive:
            tree.inside.append(Inside(archive, path, digest.digest()))
        else:
            tree.files[path] = digest.digest()

    def _kept(self, tree: ScannedTree, path: str, archive: str) -> dict[str, bytes] | None:
        """Return where the content of a small file is kept, or None."""
        if self._is_own(tree, archive) and _DOCUMENT.fullmatch(path):
            return self.contents.documents
        return tree.texts if not archive and _TEXT.fullmatch(path) else None

    def _is_own(self, tree: ScannedTree, archive: str) -> bool:
        """Return whether a file is a member of the outer archive: a layer or a document."""
        return self._is_archive and tree is self.top and not archive

    def _look_inside(
        self, tree: ScannedTree, path: str, size: int, stream: Stream, archive: str, depth: int
    ) -> None:
        is_layer = self._is_own(tree, archive)
        name = f"{archive}!{path}" if archive else path
        with self.bounded(name, may_be_damaged=not is_layer):
            is_zip = stream.peek().startswith(b"PK\3\4") or _OLD_PIP_CACHE.fullmatch(path)
            opened = stream if is_zip else open_tar(stream, size)
            if opened is None:
                return
            if depth == _DEPTH_LIMIT:
                raise TooMuchError("it is an archive in archives")
            if is_zip:
                self._read_zip(tree, stream, name, depth + 1)
            elif is_layer:
                tree = self.contents.trees[path] = ScannedTree()
                self.read_tar(tree, opened, depth=depth + 1)
            else:
                self.read_tar(tree, opened, name, depth + 1)

    def read_tar(
        self, tree: ScannedTree, stream: Stream, archive: str = "", depth: int = 0
    ) -> None:
        for member in iter_tar(stream):
            if isinstance(member, str):
                report = self.contents.note if archive else self.contents.unreadable
                report(archive, member)
                continue
            path, info, source = member
            if source is not None:
                self.read(tree, path, info.size, source, archive, depth)
            elif archive or info.isdir():
                tree.directories.add(path)
            elif info.islnk():
                tree.links[path] = normal(info.linkname) or ""
            else:
                tree.files[path] = None
                if info.issym():
                    self.read_link(tree, path, info.linkname)

    def read_link(self, tree: ScannedTree, path: str, to: str) -> None:
        """Record a `.git` that is a link, and a layer that docker saved as a link to another."""
        above, _, name = path.rpartition("/")
        if name == ".git":
            tree.texts[path] = b"gitdir: " + os.fsencode(to)
        elif name == "layer.tar" and self._is_archive and tree is self.top:
            tree.links[path] = os.path.normpath(f"{above}/{to}")

    def _read_zip(self, tree: ScannedTree, stream: Stream, archive: str, depth: int) -> None:
        # zipfile begins at the end of a file, and a member of an archive cannot be sought
        with tempfile.TemporaryFile() as copy:
            while block := stream.read(BLOCK_BYTES):
                copy.write(block)
            _must_be_small(copy)
            take = _budget(copy.tell())
            with zipfile.ZipFile(copy) as opened:
                for info in opened.infolist():
                    if info.is_dir():
                        continue
                    with opened.open(info) as member:
                        source = Stream(member, take)
                        self.read(tree, info.filename, info.file_size, source, archive, depth)


# a zip ends with 22 bytes, a comment of at most 65,535 and perhaps a locator of 20 (APPNOTE 4.3)
_ZIP_END_BYTES, _ZIP_LIST_LIMIT_BYTES = (1 << 16) + 42, 64 << 20


def _must_be_small(file: IO[bytes]) -> None:
    """Refuse a zip whose list of members would take zipfile too much memory."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _ZIP_END_BYTES))
    end = file.read()
    eocd = end.rfind(b"PK\5\6")
    # the size of the list; with a Zip64 locator before this record, the true one is elsewhere
    listed = int.from_bytes(end[eocd + 12 : eocd + 16], "little")
    if eocd < 0 or listed > _ZIP_LIST_LIMIT_BYTES or end[max(0, eocd - 20) :].startswith(b"PK\6\7"):
        raise TooMuchError("its list of members is missing, or larger than 64 MiB")
    file.seek(0, os.SEEK_END)
