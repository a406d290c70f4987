"""Whether a path exists, and as what; names that match. Unreadable is not absent.

`os.path.exists` and its like take every error for absence, and so does `Path.exists` since Python
3.14; `Path.glob`, `Path.rglob` and `os.walk` skip each directory that they cannot list. These raise
OSError where the answer is unknown: EACCES, EIO, ENAMETOOLONG.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path
from typing import AnyStr

AnyPath = str | bytes | os.PathLike[str]

# a component that does not exist, is not a directory, or is a circle of symbolic links
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


def _mode_of(path: AnyPath, *, follow: bool = True) -> int:
    """Return the mode; 0, which no file has, where nothing exists."""
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except ValueError:  # a null byte, which no name can have
        return 0
    except OSError as error:
        _must_be_absent(error)
        return 0


def _must_be_absent(error: OSError) -> None:
    if error.errno not in _ABSENT:
        raise error


def exists(path: AnyPath) -> bool:
    return bool(_mode_of(path))


def lexists(path: AnyPath) -> bool:
    """Return whether the name exists; it may be a symbolic link that leads nowhere."""
    return bool(_mode_of(path, follow=False))


def is_file(path: AnyPath) -> bool:
    return stat.S_ISREG(_mode_of(path))


def is_dir(path: AnyPath) -> bool:
    return stat.S_ISDIR(_mode_of(path))


def is_socket(path: AnyPath) -> bool:
    return stat.S_ISSOCK(_mode_of(path))


def is_symlink(path: AnyPath) -> bool:
    return stat.S_ISLNK(_mode_of(path, follow=False))


def matching(directory: Path, pattern: str) -> list[Path]:
    """List the paths that match, as `Path.glob` does; in no order, and no `**` at the end."""
    name, _, rest = pattern.partition("/")
    if name == "**":
        paths = [Path(above) for above, _, _ in walk(directory)]
    elif not any(character in name for character in "*?["):
        paths = [path] if lexists(path := directory / name) else []
    else:
        fits = re.compile(translate(name)).match
        try:
            paths = [directory / entry for entry in os.listdir(directory) if fits(entry)]
        except OSError as error:
            _must_be_absent(error)
            return []
    return [below for path in paths for below in matching(path, rest)] if rest else paths


def walk(
    top: AnyStr | os.PathLike[AnyStr],
) -> Iterator[tuple[AnyStr, list[AnyStr], list[AnyStr]]]:
    """Walk a tree as `os.walk`, without following symbolic links."""
    return os.walk(top, onerror=_must_be_absent)


def iter_below(top: Path) -> Iterator[Path]:
    """Iterate over all paths below a directory, without following symbolic links."""
    return (Path(above, name) for above, *names in walk(top) for name in (*names[0], *names[1]))
