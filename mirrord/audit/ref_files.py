"""HEAD, refs and configuration of a mirror, read from their files.

Without git, which refuses a repository whose HEAD is lost and follows planted files. mirrord alone
writes them, so any difference from its own writing is a bad file. Reads only, in a worker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..mirrors.fetch import INCOMING
from ..mirrors.pins import is_pin
from ..mirrors.repository import HISTORY, KEPT, OURS, PINS, changed_settings
from .object_files import BadFile, FileKind, no_directory, no_file

_VALUE = re.compile(r"([0-9a-f]{40})\n?")
_SYMBOLIC = re.compile(r"ref: (refs/\S+)\n?")
_REPLACE = "refs/replace/"


@dataclass(slots=True)
class RefFiles:
    """`head` is the ref that HEAD names, `refs` those that are right as far as files alone tell.

    `astray` are the values of wrong refs, so that nothing is lost when those are put right.
    """

    head: str | None = None
    refs: dict[str, str] = field(default_factory=dict)
    astray: dict[str, str] = field(default_factory=dict)
    bad: list[BadFile] = field(default_factory=list)

    def report(self, path: str, kind: FileKind, reason: str) -> None:
        self.bad.append(BadFile(path, kind, reason))


def read_ref_files(git_dir: Path) -> RefFiles:
    """Read them all; what looks bad is read twice, because refs may move meanwhile."""
    found = _read(git_dir)
    if found.bad:
        first, found = found, _read(git_dir)
        found.bad = [bad for bad in found.bad if bad in first.bad]
    return found


def _read(git_dir: Path) -> RefFiles:
    found = RefFiles()
    text = _text(git_dir, "HEAD", FileKind.HEAD, found)
    if symbolic := _SYMBOLIC.fullmatch(text or ""):
        found.head = symbolic[1]
    elif not found.bad:
        is_detached = text is not None and _VALUE.fullmatch(text)
        reason = "it names a commit, not a branch" if is_detached else "it names no ref"
        found.report("HEAD", FileKind.HEAD, "it is lost" if text is None else reason)
    loose = dict(_loose_refs(git_dir, found))  # loose ones first: packing moves refs the other way
    found.refs = {**dict(_packed_refs(git_dir, found)), **loose}
    for bad in found.bad:
        found.refs.pop(bad.path, None)  # what is packed under that name is older
    _judge_ours(found)
    # a file where other refs need a directory; few directories, where refs are many
    directories = {ref.rpartition("/")[0] for ref in found.refs}
    needed = {str(above) for path in directories for above in (Path(path), *Path(path).parents)}
    needed |= {"refs/heads", "refs/tags", *(ours.rstrip("/") for ours in (OURS, PINS, KEPT))}
    for ref in sorted(loose.keys() & needed):
        found.astray[ref] = found.refs.pop(ref, loose[ref])
        found.report(ref, FileKind.REF, "it is a file, where refs need a directory")
    if wrong := no_file(git_dir / "config"):
        found.report("config", FileKind.LAYOUT, wrong)
    elif changed := changed_settings(git_dir / "config"):
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        found.report("config", FileKind.CONFIG, ", ".join(changed[:3]) + more)
    found.bad.sort()
    return found


def read_packed(git_dir: Path) -> dict[str, str]:
    """The good lines of `packed-refs`."""
    return dict(_packed_refs(git_dir, RefFiles()))


def oid_in_name(ref: str) -> str | None:
    """The object that a pin or a kept ref must name."""
    oid = ref.rpartition("/")[2]
    return oid if _VALUE.fullmatch(oid) and (ref == f"{KEPT}{oid}" or is_pin(ref)) else None


def _text(git_dir: Path, name: str, kind: FileKind, found: RefFiles) -> str | None:
    """The content of a file; None where there is none, or where it is reported."""
    wrong = no_file(git_dir / name)
    try:
        if wrong is None:
            return (git_dir / name).read_bytes().decode("utf-8", "surrogateescape")
        kind = FileKind.LAYOUT if kind is not FileKind.REF else kind
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (PermissionError, IsADirectoryError) as error:
        wrong = f"it cannot be read: {error.strerror}"
    found.report(name, kind, wrong)
    return None


def _loose_refs(
    git_dir: Path, found: RefFiles, directory: str = "refs"
) -> Iterator[tuple[str, str]]:
    if directory == "refs" and (wrong := no_directory(git_dir / directory)):
        found.report(directory, FileKind.LAYOUT, wrong)
        return
    try:
        with os.scandir(git_dir / directory) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):  # git removes directories that became empty
        return
    for entry in entries:
        ref = f"{directory}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _loose_refs(git_dir, found, ref)
            continue
        text = None if ref.endswith(".lock") else _text(git_dir, ref, FileKind.REF, found)
        if text is None:
            continue
        value = _VALUE.fullmatch(text)
        if ref.startswith(_REPLACE):
            found.report(ref, FileKind.PLANTED, "it gives an object another's content")
        elif value and value[1] != "0" * 40:
            yield ref, value[1]
        elif _SYMBOLIC.fullmatch(text):
            found.report(ref, FileKind.REF, "it is symbolic")
        else:
            reason = "it does not hold an object id" if text else "it is empty"
            found.report(ref, FileKind.REF, reason)


def _packed_refs(git_dir: Path, found: RefFiles) -> Iterator[tuple[str, str]]:
    text = _text(git_dir, "packed-refs", FileKind.PACKED_REFS, found)
    if text is None:
        return
    lines = text.split("\n")
    wrong = ["its end is missing"] if lines.pop() else []
    before = ""
    for number, line in enumerate(lines, 1):
        packed = re.fullmatch(r"([0-9a-f]{40}) (refs/\S+)", line)
        if packed and packed[2].startswith(_REPLACE):
            reason = f"line {number} gives an object another's content"
            found.report("packed-refs", FileKind.PACKED_REFS, reason)
        elif packed:
            if packed[2] <= before:
                wrong.append(f"line {number} is out of order")
            before = packed[2]
            yield packed[2], packed[1]
        elif re.fullmatch(r"\^[0-9a-f]{40}", line):
            continue  # what the tag above leads to
        elif number > 1 or not line.startswith("# pack-refs"):
            wrong.append(f"line {number} is no ref")
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        found.report("packed-refs", FileKind.PACKED_REFS, wrong[0] + more)


def _judge_ours(found: RefFiles) -> None:
    """A pin, a kept ref and the mark of a fetch have the object in their name; no other is ours."""
    for ref, oid in [item for item in found.refs.items() if item[0].startswith(OURS)]:
        is_named = ref in {HISTORY, f"{KEPT}{oid}", f"{INCOMING}{oid}"}
        if is_named or (is_pin(ref) and ref.endswith(oid)):
            continue
        found.astray[ref] = found.refs.pop(ref)
        if ref.startswith(INCOMING) or not oid_in_name(ref):
            found.report(ref, FileKind.PLANTED, "mirrord makes no such ref")
        else:
            found.report(ref, FileKind.REF, f"it names {oid}, not what its name says")
