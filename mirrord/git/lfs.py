"""Git LFS: pointers, and the directory of objects that git-lfs has in every repository.

An object is `lfs/objects/ab/cd/<sha256>` below a git directory. What is there was verified.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError
from ..host.files import open_plain, read_plain
from ..presence import matching

# in this order and without anything more, as the specification has it; `ext-` is of extensions
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:ext-[^\n]{1,200}\n)*"
    rb"oid sha256:([0-9a-f]{64})\nsize (\d{1,18})\n"
)
# git-lfs takes longer files for no pointer
POINTER_BYTES = 1024
OBJECTS, RECORDS = "lfs/objects", "lfs/objects.txt"
_OID = re.compile(r"[0-9a-f]{64}")


class Pointer(NamedTuple):
    """An LFS object: its sha256, and its size in bytes."""

    oid: str
    size: int


def parse_pointer(data: bytes) -> Pointer | None:
    match = _POINTER.fullmatch(data) if len(data) < POINTER_BYTES else None
    return Pointer(match[1].decode(), int(match[2])) if match else None


def pointer_bytes(pointer: Pointer) -> bytes:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{pointer.oid}\n"
    return f"{text}size {pointer.size}\n".encode()


def object_path(git_dir: Path, oid: str) -> Path:
    return git_dir / OBJECTS / oid[:2] / oid[2:4] / oid


def has_object(git_dir: Path, pointer: Pointer) -> bool:
    """Return whether an object is there, by its size."""
    try:
        return object_path(git_dir, pointer.oid).stat().st_size == pointer.size
    except FileNotFoundError:
        return False


def read_target(git_dir: Path, data: bytes) -> bytes | None:
    """Return the object that `data` points to; None where it is no pointer, or not had."""
    pointer = parse_pointer(data)
    return read_object(git_dir, pointer) if pointer else None


def read_object(git_dir: Path, pointer: Pointer) -> bytes | None:
    """Return an object, None where it is not had; CorruptObjectError where it is another."""
    try:
        data = read_plain(object_path(git_dir, pointer.oid))
    except FileNotFoundError:
        return None
    if hashlib.sha256(data).hexdigest() != pointer.oid:
        raise CorruptObjectError(
            f"cannot read LFS object {pointer.oid}: it is damaged", hint="audit and heal the mirror"
        )
    return data


def find_fault(file: Path, pointer: Pointer, *, reads: bool = True) -> str | None:
    """Say how a file differs from the object that a pointer means; None where it is right."""
    try:
        with open_plain(file) as opened:
            if (size := os.fstat(opened.fileno()).st_size) != pointer.size:
                return f"it has {size} bytes, not {pointer.size}"
            if reads and hashlib.file_digest(opened, "sha256").hexdigest() != pointer.oid:
                return "sha256 mismatch"
    except FileNotFoundError:
        return "it is gone"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None


class RecordedObject(NamedTuple):
    """An object that a mirror has had, and the server that `.lfsconfig` named for it."""

    pointer: Pointer
    url: str | None = None


def has_recorded(git_dir: Path) -> bool:
    """Return whether all objects that a mirror has had are there, by their sizes."""
    return all(has_object(git_dir, record.pointer) for record in read_records(git_dir))


def read_records(git_dir: Path) -> set[RecordedObject]:
    """Return what a mirror should have: its list, and what is on disk besides."""
    try:
        lines = read_plain(git_dir / RECORDS).decode().splitlines()
    except FileNotFoundError:
        lines = []
    records = set[RecordedObject]()
    for line in lines:
        oid, size, *url = line.split(" ")
        records.add(RecordedObject(Pointer(oid, int(size)), url[0] if url else None))
    listed = {record.pointer.oid for record in records}
    for file in matching(git_dir / OBJECTS, "??/??/*"):
        if _OID.fullmatch(file.name) and file.name not in listed:
            records.add(RecordedObject(Pointer(file.name, file.stat().st_size)))
    return records


def records_bytes(records: Iterable[RecordedObject]) -> bytes:
    rows = ((record.pointer.oid, str(record.pointer.size), record.url or "") for record in records)
    return "".join(f"{' '.join(row).rstrip()}\n" for row in sorted(rows)).encode()


# -- the filter of a checkout ----------------------------------------------------------------------
#
# Its own, in POSIX shell, because git-lfs may be absent. Objects are looked for, and put, where
# git-lfs has them: one that is installed for the whole system sets `process`, which git prefers,
# and needs no server for what is there. An empty `process` would disable both commands (git 2.39).
# `#` and `;` begin comments in git's configuration, and a sealed one has none; `%%` and `%f` are
# replaced by git.

_BEGIN = (
    "d=$(git rev-parse --git-common-dir)/lfs/objects\n"
    'mkdir -p "$d" && t=$(mktemp "$d/XXXXXXXX") && cat >"$t" || exit 1\n'
    'if head -c 42 "$t" | grep -aq "^version https://git-lfs.github.com/spec/v1"\n'
)
_CLEAN = _BEGIN + (
    'then cat "$t"\n'
    'elif [ -s "$t" ]\n'
    'then s=$(sha256sum <"$t" | cut -c 1-64) && n=$(wc -c <"$t") || exit 1\n'
    'printf "version https://git-lfs.github.com/spec/v1\\noid sha256:%s\\nsize %d\\n" "$s" "$n"\n'
    'p=$d/$(printf %.2s "$s")/$(printf %s "$s" | cut -c 3-4)\n'
    '[ -f "$p/$s" ] || { mkdir -p "$p" && mv "$t" "$p/$s"\n}\n'
    "fi\n"
    'rm -f "$t"\n'
)
_SMUDGE = _BEGIN + (
    'then s=$(sed -n "s/^oid sha256:\\([0-9a-f]*\\)$/\\1/p" "$t" | head -n 1)\n'
    'p=$d/$(printf %.2s "$s")/$(printf %s "$s" | cut -c 3-4)/$s\n'
    "fi\n"
    'if [ -n "$s" ] && [ -f "$p" ]\n'
    'then cat "$p"\n'
    'else cat "$t"\n'
    "fi\n"
    'rm -f "$t"\n'
)
# the settings `filter.lfs.*` of a checkout that has objects
FILTER = {"clean": _CLEAN, "smudge": _SMUDGE, "required": "false"}
# of one that has none: git-lfs would ask a server, and `required` makes its failure git's
NO_FILTER = {"clean": "", "smudge": "", "process": "", "required": "false"}


def filter_config(settings: dict[str, str]) -> bytes:
    lines = ['[filter "lfs"]\n']
    for name, value in settings.items():
        text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        quoted = f' "{text}"' if name in ("clean", "smudge") and text else f" {text}".rstrip()
        lines.append(f"\t{name} ={quoted}\n")
    return "".join(lines).encode()
