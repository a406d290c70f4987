"""The names of a mirror (HEAD, refs) and its configuration, read without git: git refuses a
repository whose HEAD is lost, and follows what was planted.

All of these are ours, so whatever differs from what mirrord writes is a fault. Reads only. Runs in
a worker.
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
_PACKED = re.compile(r"([0-9a-f]{40}) (refs/\S+)")
_PEELED = re.compile(r"\^[0-9a-f]{40}")
_NEVER = "refs/replace/"
_DIRECTORIES = ("refs/heads", "refs/tags", OURS.rstrip("/"), PINS.rstrip("/"), KEPT.rstrip("/"))


@dataclass(slots=True)
class Names:
    """`head` is the ref that HEAD names, `refs` what is as it must be as far as names alone tell,
    `astray` what other refs name, so that nothing is lost when they are put right.
    """

    head: str | None = None
    refs: dict[str, str] = field(default_factory=dict)
    astray: dict[str, str] = field(default_factory=dict)
    faults: list[BadFile] = field(default_factory=list)


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
    _judge_ours(names)
    _judge_places(names, loose)
    if wrong := no_file(git_dir / "config"):
        names.faults.append(BadFile("config", FileKind.LAYOUT, wrong))
    elif changed := changed_settings(git_dir / "config"):
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        names.faults.append(BadFile("config", FileKind.CONFIG, ", ".join(changed[:3]) + more))
    names.faults.sort()
    return names


def read_packed(git_dir: Path) -> dict[str, str]:
    """What the good lines of `packed-refs` say."""
    return dict(_packed_refs(git_dir, Names()))


def _text(git_dir: Path, name: str, kind: FileKind, names: Names) -> str | None:
    """A file; None where there is none, or with a fault where it is something else."""
    wrong = no_file(git_dir / name)
    try:
        if wrong is None:
            return (git_dir / name).read_bytes().decode("utf-8", "surrogateescape")
        kind = FileKind.LAYOUT if kind is not FileKind.REF else kind
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (PermissionError, IsADirectoryError) as error:
        wrong = f"it cannot be read: {error.strerror}"
    names.faults.append(BadFile(name, kind, wrong))
    return None


def _read_head(git_dir: Path, names: Names) -> None:
    before = len(names.faults)
    text = _text(git_dir, "HEAD", FileKind.HEAD, names)
    if len(names.faults) > before:
        return
    if found := _SYMBOLIC.fullmatch(text or ""):
        names.head = found[1]
        return
    is_detached = _VALUE.fullmatch(text or "")
    reason = (
        "it is lost"
        if text is None
        else "it names a commit, not a branch"
        if is_detached
        else "it names no ref"
    )
    names.faults.append(BadFile("HEAD", FileKind.HEAD, reason))


def _loose_refs(git_dir: Path, names: Names, directory: str = "refs") -> Iterator[tuple[str, str]]:
    if directory == "refs" and (wrong := no_directory(git_dir / directory)):
        names.faults.append(BadFile(directory, FileKind.LAYOUT, wrong))
        return
    try:
        with os.scandir(git_dir / directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):  # git removes directories that became empty
        return
    for entry in entries:
        ref = f"{directory}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _loose_refs(git_dir, names, ref)
        elif not entry.name.endswith(".lock") and (oid := _loose_ref(git_dir, ref, names)):
            yield ref, oid


def _loose_ref(git_dir: Path, ref: str, names: Names) -> str | None:
    text = _text(git_dir, ref, FileKind.REF, names)
    if text is None:
        return None
    found = _VALUE.fullmatch(text)
    if ref.startswith(_NEVER):
        names.faults.append(BadFile(ref, FileKind.PLANTED, "it gives an object another's content"))
        return None
    if found and found[1] != "0" * 40:
        return found[1]
    symbolic = "it is symbolic" if _SYMBOLIC.fullmatch(text) else "it does not hold an object id"
    names.faults.append(BadFile(ref, FileKind.REF, symbolic if text else "it is empty"))
    return None


def _packed_refs(git_dir: Path, names: Names) -> Iterator[tuple[str, str]]:
    text = _text(git_dir, "packed-refs", FileKind.PACKED_REFS, names)
    if text is None:
        return
    lines = text.split("\n")
    bad = ["its end is missing"] if lines.pop() else []
    before = ""
    for number, line in enumerate(lines, 1):
        found = _PACKED.fullmatch(line)
        if found and found[2].startswith(_NEVER):
            names.faults.append(
                BadFile(
                    "packed-refs",
                    FileKind.PACKED_REFS,
                    f"line {number} gives an object another's content",
                )
            )
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


def _judge_ours(names: Names) -> None:
    """A pin, a kept ref and a mark of a fetch carry the object in their name; no other is ours."""
    for ref, oid in [item for item in names.refs.items() if item[0].startswith(OURS)]:
        is_named = ref.endswith(oid) and (
            is_pin(ref) or ref in {f"{KEPT}{oid}", f"{INCOMING}{oid}"}
        )
        if is_named or ref == HISTORY:
            continue
        names.astray[ref] = names.refs.pop(ref)
        if ref.startswith(INCOMING) or not named_in(ref):
            names.faults.append(BadFile(ref, FileKind.PLANTED, "mirrord makes no such ref"))
        else:
            names.faults.append(
                BadFile(ref, FileKind.REF, f"it names {oid}, not what its name says")
            )


def named_in(ref: str) -> str | None:
    """The object that a pin or a kept ref must name."""
    oid = ref.rpartition("/")[2]
    return oid if _VALUE.fullmatch(oid) and (ref == f"{KEPT}{oid}" or is_pin(ref)) else None


def _judge_places(names: Names, loose: dict[str, str]) -> None:
    """A file where other refs need a directory."""
    directories = {ref.rpartition("/")[0] for ref in names.refs}  # few, where refs are many
    needed = {str(above) for path in directories for above in (Path(path), *Path(path).parents)}
    for ref in sorted(loose.keys() & {*needed, *_DIRECTORIES}):
        names.astray[ref] = names.refs.pop(ref, loose[ref])
        names.faults.append(BadFile(ref, FileKind.REF, "it is a file, where refs need a directory"))
