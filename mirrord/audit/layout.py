"""The layout of a mirror's directory: what is missing or no file, and files that mislead git."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ..git.special import iter_special
from ..presence import lexists
from .defects import BadFile, FileKind

LOOSE_NAME = re.compile(r"[0-9a-f]{38}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")  # a directory of loose objects

_JUDGED_AS_REFS = ("refs/", "HEAD", "packed-refs", "config")  # by `refs.py`

_PLANTED = {
    "objects/info/alternates": "it lends objects from elsewhere",
    "objects/info/http-alternates": "it lends objects from elsewhere",
    "info/grafts": "it gives commits other parents",
    "info/attributes": "it changes how git reads files",
    "shallow": "it takes the parents of commits away",
    "commondir": "it takes refs and objects from elsewhere",
    "config.worktree": "git reads it as configuration",
}


def find_strange(git_dir: Path) -> Iterator[BadFile]:
    """Find objects that are no files, missing directories, and files that mislead git."""
    for name, reason in _PLANTED.items():
        if lexists(git_dir / name):
            yield BadFile(name, FileKind.PLANTED, f"{reason}, and mirrord makes none")
    for name in iter_special(git_dir):
        if not name.startswith(_JUDGED_AS_REFS) and not _kind_at(name):
            yield BadFile(name, FileKind.LAYOUT, "it is a special file, not a file")
    for entry in sorted_entries(git_dir / "hooks"):
        if not entry.name.endswith(".sample"):
            reason = "git runs it, and mirrord makes none"
            yield BadFile(f"hooks/{entry.name}", FileKind.PLANTED, reason)
    if wrong := no_directory(git_dir / "objects"):
        yield BadFile("objects", FileKind.LAYOUT, wrong)
        return
    for directory in sorted_entries(git_dir / "objects"):
        if directory.name not in {"pack", "info"} and not _FAN_OUT.fullmatch(directory.name):
            continue
        if wrong := no_directory(Path(directory)):
            yield BadFile(f"objects/{directory.name}", FileKind.LAYOUT, wrong)
            continue
        for entry in sorted_entries(Path(directory)):
            path = f"objects/{directory.name}/{entry.name}"
            kind = _kind_of(directory.name, entry.name)
            is_file = entry.is_file(follow_symlinks=False)
            if entry.name.endswith(".promisor"):
                reason = "it excuses missing objects, and mirrord makes none"
                yield BadFile(path, FileKind.PLANTED, reason)
            elif entry.name == "commit-graphs" and (wrong := no_directory(Path(entry))):
                yield BadFile(path, FileKind.DERIVED, wrong)
            elif kind and not is_file and (wrong := no_file(Path(entry))):
                yield BadFile(path, kind, wrong)


def _kind_at(path: str) -> FileKind | None:
    """Return the kind of a file below `objects`, which is judged with its directory."""
    top, directory, *names = [*path.split("/"), "", ""]
    return _kind_of(directory, names[0]) if top == "objects" else None


def _kind_of(directory: str, name: str) -> FileKind | None:
    # git's temporary files there, tmp_obj_*, are none
    if _FAN_OUT.fullmatch(directory):
        return FileKind.LOOSE if LOOSE_NAME.fullmatch(name) else None
    if directory == "info":
        return FileKind.DERIVED if name == "commit-graph" else None
    of_packs = r"[^.].*\.(pack|idx|rev|mtimes|bitmap|promisor)|multi-pack-index.*"
    if not re.fullmatch(of_packs, name):
        return None
    return {".pack": FileKind.PACK, ".idx": FileKind.INDEX}.get(Path(name).suffix, FileKind.DERIVED)


def sorted_entries(directory: Path) -> list[os.DirEntry[str]]:
    """List a directory by name; empty for one that is gone, because git removes empty ones."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def no_directory(path: Path) -> str | None:
    """Explain why a path is not a directory; None where it is, or is fan-out that git removed."""
    file_type = _type_of(path)
    if file_type is None:
        return None if _FAN_OUT.fullmatch(path.name) else "the directory is lost"
    return None if file_type == "a directory" else f"it is {file_type}, not a directory"


def no_file(path: Path) -> str | None:
    """Explain why a path is not a file; None where it is, or nothing exists."""
    file_type = _type_of(path)
    return None if file_type in {None, "a file"} else f"it is {file_type}, not a file"


def _type_of(path: Path) -> str | None:
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    table = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link"}
    return table.get(stat.S_IFMT(mode), "a special file")
