"""Files into and out of a sandbox, as tar archives.

An archive from a sandbox may be anything: the agent can replace the tar that writes it, or forge
what that prints. So it is read header by header, bounded in bytes, files, depth and kinds, and
nothing of it stays unless all of it is taken.
"""

import errno
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ..errors import LimitReachedError, UsageError
from ..presence import is_dir, is_symlink, lexists

# as much as a sandbox has in memory of its own
DOWNLOAD_BYTES = 4 * 1024**3
# of all kinds; the trees of known data sets have less than a tenth
DOWNLOAD_FILES = 1_000_000
# what is refused is removed by shutil.rmtree, which holds a descriptor for each level, of often
# 1,024
DOWNLOAD_DEPTH = 256
_BLOCK = tarfile.BLOCKSIZE
# members that contradict each other: one name twice, a file as a directory, no directory
_CONTRADICTIONS = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ENAMETOOLONG)
_LEFT_OUT = (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)


def pack(local: Path, path: str, packed: BinaryIO) -> str:
    """Pack `local` into an archive; returns the directory where it is unpacked to `path`."""
    inside = PurePosixPath(path)
    try:
        is_directory = is_dir(local)
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(os.path.realpath(local), "." if is_directory else inside.name)
    except OSError as error:
        hint = "name a readable file or directory"
        raise UsageError(f"cannot read {local}: {error.strerror}", hint=hint) from error
    packed.seek(0)
    return str(inside if is_directory else inside.parent)


class Capped:
    """A file that takes at most DOWNLOAD_BYTES."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path, self._left = file, path, DOWNLOAD_BYTES

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise _refused(self._path, f"it has more than {DOWNLOAD_BYTES} bytes")
        return self._file.write(data)


def unpack(packed: BinaryIO, path: str, local: Path) -> None:
    """Unpack an archive of a directory or file to `local`, which must not exist.

    Links are made last, so that nothing is written through one. Raises LimitReachedError,
    UsageError.
    """
    packed.seek(0)
    try:
        reason = "it exists" if lexists(local) else None if is_dir(local.parent) else "no directory"
    except OSError as error:
        raise _not_writable(path, local, error.strerror) from error
    if reason:
        raise _not_writable(path, local, reason)
    links: list[tuple[Path, str]] = []
    try:
        for member in _members(packed, path):
            inside = _inside(member, path)
            target = local / inside
            if member.isdir():
                target.mkdir()
            elif member.issym():
                links.append((target, member.linkname))
            elif member.type not in _LEFT_OUT:
                _write(packed, member, path, target)
        for target, link in links:
            target.symlink_to(link)
    except OSError as error:
        _remove(local)
        if error.errno in _CONTRADICTIONS:
            raise _refused(path, f"its archive is damaged: {error.strerror}") from error
        raise _not_writable(path, local, error.strerror) from error
    except BaseException:
        _remove(local)
        raise


def _members(packed: BinaryIO, path: str) -> Iterator[tarfile.TarInfo]:
    """Read headers; the file is at a member's content, and is left anywhere in it.

    tarfile itself reads long names, and whole headers of other formats, into memory.
    """
    names: dict[bytes, str] = {}  # of the next member, if they are long
    count = 0
    position = 0
    while True:
        packed.seek(position)
        # a block of zeros ends an archive (tar(5))
        if (block := packed.read(_BLOCK)) == bytes(_BLOCK):
            return
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise _refused(path, f"its archive is damaged: {error}") from error
        count += 1
        if count > DOWNLOAD_FILES:
            raise _refused(path, f"it has more than {DOWNLOAD_FILES} files")
        if member.size < 0:
            raise _refused(path, "its archive is damaged: a negative size")
        position = packed.tell() + -(-member.size // _BLOCK) * _BLOCK
        # GNU tar writes a name of more than 100 bytes as a member of its own, before the member
        if member.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            names[member.type] = _long_name(packed, member, path)
            continue
        member.name = names.pop(tarfile.GNUTYPE_LONGNAME, member.name)
        member.linkname = names.pop(tarfile.GNUTYPE_LONGLINK, member.linkname)
        yield member


_NAME_BYTES = 4096  # PATH_MAX


def _long_name(packed: BinaryIO, member: tarfile.TarInfo, path: str) -> str:
    if member.size > _NAME_BYTES:
        raise _refused(path, f"a name has more than {_NAME_BYTES} bytes")
    return os.fsdecode(packed.read(member.size).partition(b"\0")[0])


def _inside(member: tarfile.TarInfo, path: str) -> PurePosixPath:
    """Return where a member belongs; a single file has its whole path as its name."""
    kinds = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, *_LEFT_OUT)
    if member.type not in kinds:
        raise _refused(path, f"its archive has a member of type {os.fsdecode(member.type)!r}")
    inside = PurePosixPath(member.name)
    if ".." in inside.parts or "\0" in member.name + member.linkname:
        raise _refused(path, "its archive has a name that leads out of it")
    if len(inside.parts) > DOWNLOAD_DEPTH:
        raise _refused(path, f"it is more than {DOWNLOAD_DEPTH} directories deep")
    return PurePosixPath() if inside.is_absolute() else inside


_CHUNK = 1 << 20


def _write(packed: BinaryIO, member: tarfile.TarInfo, path: str, target: Path) -> None:
    left = member.size
    with target.open("xb") as file:
        while left:
            piece = packed.read(min(left, _CHUNK))
            if not piece:
                raise _refused(path, "its archive is cut off")
            file.write(piece)
            left -= len(piece)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)


def _remove(local: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(local) if is_dir(local) and not is_symlink(local) else local.unlink()


def _not_writable(path: str, local: Path, reason: str | None) -> UsageError:
    hint = "name a new path in a writable directory"
    return UsageError(f"cannot download {path} to {local}: {reason}", hint=hint)


def _refused(path: str, fact: str) -> LimitReachedError:
    return LimitReachedError(f"cannot download {path}: {fact}", hint="download parts of it")
