"""Layers of images: an archive is judged before it is unpacked, and a layer of overlays after it.

umoci(1) unpacks (`images.py`); this module decides what it may unpack, and turns the result into a
layer of overlayfs: files of the daemon's user, without set-id bits, extended attributes and
devices, and with a whiteout for each path that the archive removes. Everything runs in workers.
"""

import gzip
import hashlib
import os
import stat
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

from ...errors import InvalidImageError, full_disk_named
from ...host.files import (
    entries_in,
    list_attributes,
    make_whiteout,
    open_child,
    open_directory,
    open_plain,
    opened,
)
from ...model import ENVIRONMENT_FILES_LIMIT, ENVIRONMENT_PATH_LIMIT_BYTES, TREE_DEPTH_LIMIT, shown

# as Go's reader of archives; Python's would read a header of any size into memory
_HEADER_LIMIT_BYTES = 1 << 20
_HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
# OCI's image specification, layer.md
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_SET_ID = stat.S_ISUID | stat.S_ISGID


class Listing(NamedTuple):
    """What an archive has: `removed` paths of layers below it, directories that hide those
    (`opaque`), and directories with a `.git`.
    """

    files: int
    size_bytes: int
    removed: list[str]
    opaque: list[str]
    repositories: list[str]


class User(NamedTuple):
    """Who a container's processes are, by the image's passwd file."""

    name: str
    uid: int
    gid: int
    home: str


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _HEADERS and header.size > _HEADER_LIMIT_BYTES:
            raise _refused(f"a header of {header.size} bytes")
        return header


class _Hashed:
    """A stream that hashes what is read, and refuses to go beyond a limit."""

    def __init__(self, stream: IO[bytes], limit_bytes: int) -> None:
        self._stream, self._left, self.digest = stream, limit_bytes, hashlib.sha256()

    def read(self, size: int) -> bytes:
        piece = self._stream.read(size)
        self._left -= len(piece)
        if self._left < 0:
            raise _refused("more bytes unpacked than `[environments] image_bytes` allows")
        self.digest.update(piece)
        return piece


_PIECE = 1 << 18


def list_layer(blob: Path, diff_id: str, limit_bytes: int) -> Listing:
    """Judge a layer's archive, plain or gzip, without unpacking it; verify that its content has the
    digest `diff_id`. Raises InvalidImageError.
    """
    with open_plain(blob) as file:
        is_gzip = file.peek(2)[:2] == b"\x1f\x8b"
        stream: Any = gzip.GzipFile(fileobj=file) if is_gzip else file
        # tar has a header of 512 bytes for each file, and pads its content to 512
        hashed = _Hashed(stream, limit_bytes + ENVIRONMENT_FILES_LIMIT * 1024)
        try:
            readable = cast("IO[bytes]", hashed)  # only `read` is called
            # `r|` seeks nowhere, so each byte passes the digest once
            with tarfile.open(fileobj=readable, mode="r|", tarinfo=_Header) as archive:
                listing = _listed(archive, limit_bytes)
            # the digest is also of what follows the end of the archive
            while hashed.read(_PIECE):
                pass
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeError) as error:
            raise _refused(f"no archive that can be read: {error}") from error
    if f"sha256:{hashed.digest.hexdigest()}" != diff_id:
        raise _refused(f"a content that is not that of its digest {shown(diff_id)}")
    return listing


def _listed(archive: tarfile.TarFile, limit_bytes: int) -> Listing:
    files = size_bytes = 0
    removed, opaque, repositories = [], [], set()
    links = set[str]()
    kept: list[tarfile.TarInfo] = archive.members  # type: ignore[attr-defined]
    for member in archive:
        kept.clear()  # else it keeps them all, a million of them
        path = _checked(member.name)
        files += 1
        size_bytes += member.size  # of a sparse file what it would unpack to
        if files > ENVIRONMENT_FILES_LIMIT:
            raise _refused(f"more than {ENVIRONMENT_FILES_LIMIT} files")
        # programs differ in what they make of these
        if link := next((directory for directory in _above(path) if directory in links), None):
            raise _refused(f"the path {shown(path)}, below the link {shown(link)}")
        if member.issym():
            links.add(path)
        if not path and not member.isdir():
            raise _refused("a root of its own")
        if size_bytes > limit_bytes:
            raise _refused("more bytes unpacked than `[environments] image_bytes` allows")
        above, name = os.path.split(path)
        if name == _OPAQUE:
            opaque.append(above)
        elif name.startswith(_WHITEOUT):
            gone = name.removeprefix(_WHITEOUT)
            if gone in ("", "."):
                raise _refused(f"the whiteout {shown(path)} of no name")
            removed.append(_checked(os.path.join(above, gone)))
        elif name == ".git":
            repositories.add(f"/{above}")
        if member.islnk():
            target = _checked(member.linkname)
            if any(directory in links for directory in _above(target)):
                raise _refused(f"the hard link {shown(path)}, to what is below a link")
        # those in /dev are left out later: a sandbox has a /dev of its own
        elif (member.ischr() or member.isblk()) and not f"{path}/".startswith("dev/"):
            raise _refused(f"the device node {shown(path)}")
    return Listing(files, size_bytes, removed, opaque, sorted(repositories))


def _checked(name: str) -> str:
    """Return a path of an archive relative to its root. Raises InvalidImageError."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    path = "/".join(parts)
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _refused(f"the path {shown(name)}, which leads out of it")
    if len(parts) > TREE_DEPTH_LIMIT or len(os.fsencode(path)) > ENVIRONMENT_PATH_LIMIT_BYTES:
        raise _refused(f"a path of {len(parts)} components")
    return path


def _refused(fact: str) -> InvalidImageError:
    return InvalidImageError(f"cannot unpack the image: a layer has {fact}")


# -- unpacked -------------------------------------------------------------------------------------


def finish_layer(root: Path, listing: Listing, below: Sequence[Path]) -> dict[str, int]:
    """Turn what was unpacked into a layer; return what was left out, by reason.

    `below` are the layers below it, needed if a directory of it is opaque.
    """
    dropped: Counter[str] = Counter()
    with full_disk_named("a layer of an image"), opened(open_directory(root)) as top:
        os.fchmod(top, 0o755)
        # before the whiteouts, which are devices too
        _strip(top, dropped)
        hidden = [path for directory in listing.opaque for path in _hidden(root, directory, below)]
        for path in [*listing.removed, *hidden]:
            _remove(top, path)
    os.sync()  # after a power failure no file of a layer is empty
    return dict(dropped)


def make_cover(root: Path, paths: Sequence[str], below: Sequence[Path]) -> None:
    """Make a layer that hides what the layers `below` it, the top first, show at paths.

    Its directories are like those that it covers.
    """
    root.mkdir(mode=0o755)
    directories = dict[str, None]()
    with full_disk_named("a layer of an image"), opened(open_directory(root)) as top:
        for path in (given.strip("/") for given in paths):
            if _shown(path, below) is not None:
                _remove(top, path)
                directories |= dict.fromkeys(_above(path))
    # last, because each new name changes the mtime
    for path in directories:
        if (like := _shown(path, below)) is not None:
            os.chmod(root / path, stat.S_IMODE(like.st_mode))
            os.utime(root / path, ns=(like.st_atime_ns, like.st_mtime_ns))


def find_links(paths: Sequence[str], layers: Sequence[Path]) -> list[str]:
    """Return the paths that are symbolic links in a stack of layers, the top first."""
    shown = {path: _shown(path, layers) for path in paths}
    return [path for path, st in shown.items() if st and stat.S_ISLNK(st.st_mode)]


def _above(path: str) -> Iterator[str]:
    while path := os.path.dirname(path):
        yield path


def _shown(path: str, layers: Sequence[Path]) -> os.stat_result | None:
    """Return what a stack of layers shows at a path, without following links."""
    prefix, seen = "", list(layers)
    for name in path.split("/"):
        prefix, upper, seen = os.path.join(prefix, name), seen, []
        shown = None
        for layer in upper:
            try:
                st = os.lstat(layer / prefix)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if stat.S_ISCHR(st.st_mode):  # a whiteout; there are no other devices
                break
            shown = shown or st
            if not stat.S_ISDIR(st.st_mode):
                break
            seen.append(layer)
        if shown is None:
            return None
        if not stat.S_ISDIR(shown.st_mode):
            return shown if prefix == path else None
    return shown


def _strip(directory: int, dropped: Counter[str]) -> None:
    # with userxattr overlayfs obeys `user.overlay.*` of a layer
    for attribute in list_attributes(directory):
        os.removexattr(directory, attribute)
    for name, kind in entries_in(directory):
        if kind == stat.S_IFDIR:
            with opened(open_child(directory, name)) as child:
                st = os.fstat(child)
                if st.st_mode & _SET_ID:
                    os.fchmod(child, stat.S_IMODE(st.st_mode) & ~_SET_ID)
                _strip(child, dropped)
        elif kind == stat.S_IFREG:
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if st.st_mode & _SET_ID:
                dropped["set-id bits"] += 1
                os.chmod(name, stat.S_IMODE(st.st_mode) & ~_SET_ID, dir_fd=directory)
            # os.listxattr takes no dir_fd
            path = f"/proc/self/fd/{directory}/{os.fsdecode(name)}"
            for attribute in list_attributes(path, follow_symlinks=False):
                os.removexattr(path, attribute, follow_symlinks=False)
        elif kind != stat.S_IFLNK:
            dropped["devices, pipes and sockets"] += 1
            os.unlink(name, dir_fd=directory)


def _remove(top: int, path: str) -> None:
    """Hide a path of lower layers, unless this layer has it too."""
    *above, name = map(os.fsencode, path.split("/"))
    parent = os.dup(top)
    try:
        for part in above:
            with suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=parent)
            inner = open_child(parent, part)
            os.close(parent)
            parent = inner
        with suppress(FileExistsError):
            make_whiteout(parent, name)
    except NotADirectoryError:  # a file or link of this layer hides it already
        pass
    finally:
        os.close(parent)


def _hidden(root: Path, directory: str, below: Sequence[Path]) -> Iterator[str]:
    """Yield what lower layers have below a directory, and this layer has not.

    overlayfs has a mark for such directories, which only root may set; whiteouts do the same.
    """
    names = {name for layer in below for name in _names(layer, directory)}
    for name in sorted(names):
        path = f"{directory}/{name}".lstrip("/")
        try:
            mode = os.lstat(root / path).st_mode
        except OSError:
            yield path
        else:
            if stat.S_ISDIR(mode):
                yield from _hidden(root, path, below)


def _names(root: Path, path: str) -> list[str]:
    """Return the names in a directory of a layer; none if there is no such directory."""
    with suppress(FileNotFoundError, NotADirectoryError), _opened(root, path) as directory:
        return os.listdir(directory)
    return []


def _opened(root: Path, path: str) -> Any:
    """Open a directory of a layer without following links."""
    directory = open_directory(root)
    for name in filter(None, path.split("/")):
        try:
            inner = open_child(directory, os.fsencode(name))
        except OSError as error:
            raise FileNotFoundError(path) from error
        finally:
            os.close(directory)
        directory = inner
    return opened(directory)


# -- users ----------------------------------------------------------------------------------------


def find_user(layers: Sequence[Path], given: str) -> User:
    """Return the user of an image's configuration: a name or uid, with a group if one is given."""
    name, _, group = given.partition(":")
    name = name or "0"
    users = [line.split(":") for line in _lines(layers, "passwd")]
    users = [row for row in users if len(row) == 7 and (row[2] + row[3]).isdecimal()]
    entry = next((row for row in users if name in (row[0], row[2])), None)
    if entry is None and not name.isdecimal():
        raise InvalidImageError(f"cannot use the image: it has no user {shown(name)}")
    uid = int(entry[2]) if entry else int(name)
    # as docker: group 0 and home / for a uid that passwd does not have
    gid = int(entry[3]) if entry else 0
    if group:
        groups = [line.split(":") for line in _lines(layers, "group")]
        numbers = [row[2] for row in groups if len(row) > 2 and group in (row[0], row[2])]
        gid = int(next(iter(numbers), group if group.isdecimal() else gid))
    home = entry[5] if entry and entry[5].startswith("/") else "/root" if uid == 0 else "/"
    return User(entry[0] if entry else "root" if uid == 0 else str(uid), uid, gid, home)


def _lines(layers: Sequence[Path], name: str) -> list[str]:
    """Return the lines of a file in /etc of the uppermost layer that has it."""
    for layer in layers:
        with suppress(OSError), _opened(layer, "etc") as directory:
            # O_NONBLOCK: a layer may have a pipe there, and opening it would wait for a writer
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(name, flags, dir_fd=directory)
            with os.fdopen(file, "rb") as content:
                if stat.S_ISREG(os.fstat(file).st_mode):
                    return content.read(_HEADER_LIMIT_BYTES).decode(errors="replace").splitlines()
    return []
