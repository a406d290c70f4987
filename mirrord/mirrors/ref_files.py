"""HEAD and the refs of a repository of ours, read from their files: without a process.

Only what is plain is answered; anything else is for git to judge. Reads only.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ..host.files import opened

_NAME = r"refs/[^\x00-\x20\x7f~^:?*\[\\]+"
_HEAD = re.compile(rf"ref: ({_NAME})\n")
_VALUE = re.compile(r"(?!0{40})([0-9a-f]{40})\n")
_PACKED = re.compile(rf"([0-9a-f]{{40}}) ({_NAME})\n(?:\^[0-9a-f]{{40}}\n)?")
_PACKED_HEADER = re.compile(r"(?:# pack-refs with:[^\n]*\n)?")
# with the class above, what git check-ref-format refuses
_NEVER_IN_NAMES = ("..", "@{", "//", "/.", ".\n", "/\n", ".lock\n", ".lock/")


def read_head(git_dir: Path) -> str | None:
    """The ref that HEAD names, which may not exist; None where git has to be asked."""
    try:
        found = _HEAD.fullmatch(_read(git_dir / "HEAD"))
    except (OSError, ValueError):
        return None
    return found[1] if found else None


def read_refs(git_dir: Path) -> dict[str, str] | None:
    """Every ref, by its full name, sorted; None where git has to be asked."""
    try:
        # loose ones first: packing moves refs the other way
        loose = dict(_loose_refs(git_dir / "refs", "refs"))
        try:
            text = _read(git_dir / "packed-refs")
        except FileNotFoundError:
            text = ""
    except (OSError, ValueError):
        return None
    header = _PACKED_HEADER.match(text)
    packed = {ref: oid for oid, ref in _PACKED.findall(text)}
    # 42: an id, a blank or `^`, a newline
    known = sum(map(len, packed)) + 42 * (len(packed) + text.count("\n^"))
    names = text + "".join(f"{ref}\n" for ref in loose)
    is_plain = header and header.end() + known == len(text)
    if not is_plain or any(each in names for each in _NEVER_IN_NAMES):
        return None
    return dict(sorted((packed | loose).items()))


def _loose_refs(directory: Path | str, above: str) -> Iterator[tuple[str, str]]:
    with os.scandir(directory) as listing:
        entries = list(listing)
    for entry in entries:
        ref = f"{above}/{entry.name}"
        if entry.name.startswith(".") or entry.name.endswith(".lock"):
            continue  # as git does
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _loose_refs(entry.path, ref)
            elif value := _VALUE.fullmatch(_read(entry.path)):
                yield ref, value[1]
            else:
                raise ValueError(ref)
        except FileNotFoundError:  # packed or deleted meanwhile
            continue


def _read(path: Path | str) -> str:
    """The content of a plain file. Raises ValueError for anything else: a pipe would block."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with opened(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(path)
        content = b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
    return content.decode("utf-8", "surrogateescape")
