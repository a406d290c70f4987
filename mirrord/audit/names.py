"""The names of a mirror (HEAD, refs) and its configuration, read without git: git refuses a repository whose HEAD is lost.

Says which files are not what git or mirrord wrote. Where they keep git from reading the mirror, `readable` lends a stand-in
with the refs that could be read, so that the objects can be judged all the same. Reads only. Runs in a worker.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import GitFailedError
from ..git.command import run_git_sync
from ..mirrors.repository import PROTECTION
from .files import BadFile, FileKind

_VALUE = re.compile(r"([0-9a-f]{40})\n?")
_SYMBOLIC = re.compile(r"ref: (refs/\S+)\n?")
_PACKED = re.compile(r"([0-9a-f]{40}) (refs/\S+)")
_PEELED = re.compile(r"\^[0-9a-f]{40}")
_SECTION = re.compile(r"\[([a-z]+)\]")
_ENTRY = re.compile(r"\t([A-Za-z]+) = ([\w./-]+)")
_WANTED = {"core.repositoryformatversion": "0", "core.bare": "true"} | {key.lower(): value for key, value in PROTECTION.items()}
_NEVER = "refs/replace/"
_STOPS_GIT = {FileKind.HEAD, FileKind.CONFIG, FileKind.PACKED_REFS}


@dataclass(slots=True)
class Names:
    """`head` is the ref that HEAD names, `refs` what could be read, planted ones left out."""

    head: str | None = None
    refs: dict[str, str] = field(default_factory=dict)
    faults: list[BadFile] = field(default_factory=list)

    @property
    def stops_git(self) -> bool:
        return any(bad.kind in _STOPS_GIT for bad in self.faults)


def read_names(git_dir: Path) -> Names:
    """Read them all; what looks bad is looked at twice, because refs may move meanwhile."""
    names = _read(git_dir)
    if names.faults:
        again = _read(git_dir)
        again.faults = [bad for bad in again.faults if bad in names.faults]
        return again
    return names


def _read(git_dir: Path) -> Names:
    names = Names()
    _read_head(git_dir, names)
    loose = dict(_loose_refs(git_dir, names))  # loose ones first: packing moves refs the other way
    names.refs = {**dict(_packed_refs(git_dir, names)), **loose}
    for bad in names.faults:
        names.refs.pop(bad.path, None)  # what is packed under that name is older
    names.faults += [*_config_faults(git_dir), *_lost_directories(git_dir)]
    names.faults.sort()
    return names


def read_packed(git_dir: Path) -> dict[str, str]:
    """What the good lines of `packed-refs` say."""
    return dict(_packed_refs(git_dir, Names()))


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_head(git_dir: Path, names: Names) -> None:
    text = _text(git_dir / "HEAD")
    found = _SYMBOLIC.fullmatch(text or "")
    if found:
        names.head = found[1]
    elif text is None or not _VALUE.fullmatch(text):
        names.faults.append(BadFile("HEAD", FileKind.HEAD, "it is lost" if text is None else "it names no ref"))


def _loose_refs(git_dir: Path, names: Names) -> Iterator[tuple[str, str]]:
    for directory, _, files in os.walk(git_dir / "refs"):
        for file in files:
            ref = str((Path(directory) / file).relative_to(git_dir))
            text = _text(git_dir / ref)
            if file.endswith(".lock") or text is None:
                continue
            found = _VALUE.fullmatch(text)
            if ref.startswith(_NEVER):
                names.faults.append(BadFile(ref, FileKind.PLANTED, "it gives an object another's content"))
            elif found and found[1] != "0" * 40:
                yield ref, found[1]
            elif not _SYMBOLIC.fullmatch(text):
                names.faults.append(BadFile(ref, FileKind.REF, "it is empty" if not text else "it does not hold an object id"))


def _packed_refs(git_dir: Path, names: Names) -> Iterator[tuple[str, str]]:
    text = _text(git_dir / "packed-refs")
    if text is None:
        return
    lines = text.split("\n")
    bad = ["its end is missing"] if lines.pop() else []
    before = ""
    for number, line in enumerate(lines, 1):
        found = _PACKED.fullmatch(line)
        if found and found[2].startswith(_NEVER):
            names.faults.append(BadFile("packed-refs", FileKind.PACKED_REFS, f"line {number} gives an object another's content"))
        elif found:
            if found[2] <= before:
                bad.append(f"line {number} is out of order")
            before = found[2]
            yield found[2], found[1]
        elif not _PEELED.fullmatch(line) and not (line.startswith("# pack-refs") and number == 1):
            bad.append(f"line {number} is no ref")
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        names.faults.append(BadFile("packed-refs", FileKind.PACKED_REFS, bad[0] + more))


def _config_faults(git_dir: Path) -> Iterator[BadFile]:
    """git reads a mirror without configuration, but nothing then protects it from a person who runs git in it."""
    path = git_dir / "config"
    if not path.exists():
        yield BadFile("config", FileKind.CONFIG, "it is lost")
        return
    try:
        there = _plain_config(path) or _read_config(path)
    except GitFailedError:
        yield BadFile("config", FileKind.CONFIG, "git cannot read it")
        return
    lacking = sorted(key for key, value in _WANTED.items() if there.get(key) != value)
    if lacking:
        yield BadFile("config", FileKind.CONFIG, f"it lacks {', '.join(lacking)}")


def _plain_config(path: Path) -> dict[str, str] | None:
    """A configuration as git writes it when nobody edits it; None for one that only git can read."""
    there: dict[str, str] = {}
    section = ""
    for line in path.read_text("utf-8", "replace").splitlines():
        if head := _SECTION.fullmatch(line):
            section = head[1].lower()
        elif section and (entry := _ENTRY.fullmatch(line)):
            there[f"{section}.{entry[1].lower()}"] = entry[2]
        else:
            return None
    return there


def _read_config(path: Path) -> dict[str, str]:
    shown = run_git_sync("config", "--file", str(path), "--null", "--list", doing="read a mirror's configuration").stdout
    return dict(item.partition("\n")[::2] for item in shown.decode("utf-8", "replace").split("\0"))


def _lost_directories(git_dir: Path) -> Iterator[BadFile]:
    for name in ("objects", "refs"):
        if not (git_dir / name).is_dir():
            yield BadFile(name, FileKind.HEAD, "the directory is lost")


@contextmanager
def readable(git_dir: Path, names: Names) -> Iterator[Path]:
    """The mirror itself, or a stand-in with its objects where git would refuse it."""
    if not names.stops_git:
        yield git_dir
        return
    with tempfile.TemporaryDirectory(prefix="mirrord-stand-in-") as directory:
        stand_in = Path(directory)
        (stand_in / "objects").symlink_to(git_dir / "objects")
        write_skeleton(stand_in, names.refs, names.head)
        yield stand_in


def write_skeleton(repository: Path, refs: dict[str, str], head: str | None) -> None:
    """What git needs beside objects: HEAD, and refs, all packed."""
    (repository / "HEAD").write_text(f"ref: {head or 'refs/heads/main'}\n")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "packed-refs").write_bytes(packed_refs(refs))


def packed_refs(refs: dict[str, str]) -> bytes:
    """The content of a packed-refs file. Nothing is peeled, so git does that when it is asked."""
    lines = (f"{oid} {ref}\n" for ref, oid in sorted(refs.items()))
    return "".join(["# pack-refs with: sorted \n", *lines]).encode("utf-8", "surrogateescape")
