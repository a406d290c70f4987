"""Files and directories on their way into a sandbox and out of it, as tar archives.

What comes out was made by somebody else: it is bounded, and written only below the target.
"""

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ...errors import PathOutsideCheckoutError, ResourceError, UsageError

_MOST_BYTES = 16 * 1024**3


class Capped:
    """A file that takes no more than 16 GiB."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, _MOST_BYTES

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            hint = "take parts of it"
            raise ResourceError(f"cannot download more than {_MOST_BYTES} bytes at once", hint=hint)
        return self._file.write(data)


def pack(local: Path, path: str, packed: BinaryIO) -> str:
    """Write what `local` is into an archive; answers the directory in which it becomes `path`."""
    inside = PurePosixPath(path)
    is_directory = local.is_dir()
    try:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(os.path.realpath(local), "." if is_directory else inside.name)
    except OSError as error:
        hint = "name a file or directory that you may read"
        raise UsageError(f"cannot read {local}: {error.strerror}", hint=hint) from error
    packed.seek(0)
    return str(inside if is_directory else inside.parent)


def unpack(packed: BinaryIO, path: str, local: Path) -> None:
    """Write an archive as `local`, which must not exist: of a directory, or of one file.

    Links come last, so that nothing is written through one.
    """
    packed.seek(0)
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=packed, mode="r:") as archive:
            for member in archive:
                inside = PurePosixPath(member.name)
                if ".." in inside.parts:
                    raise tarfile.TarError(f"{member.name} leads out of it")
                target = local if inside.is_absolute() else local / inside
                if member.isdir():
                    target.mkdir()
                elif member.issym():
                    links.append((target, member.linkname))
                elif content := archive.extractfile(member):
                    with content, target.open("xb") as file:
                        shutil.copyfileobj(content, file)
                    target.chmod(0o755 if member.mode & 0o100 else 0o644)
        for target, aim in links:
            target.symlink_to(aim)
    except tarfile.TarError as error:
        fact = f"cannot download {path}: {error}"
        raise PathOutsideCheckoutError(fact, hint="take other paths of it") from error
    except OSError as error:
        fact = f"cannot download {path} to {local}: {error.strerror}"
        raise UsageError(fact, hint="name a new file in a directory of yours") from error
