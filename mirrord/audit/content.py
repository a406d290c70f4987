"""Which objects of a mirror are not what their names say: every pack hashed by git, every loose object by `files`.

`rev-list --verify-objects` is not used: git 2.39 hashes neither trees nor most commits in it, and ends with status 0 where it did
find a mismatch. Whatever looks damaged is read once more by itself; git may have a good copy of it elsewhere. Runs in a worker.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..git.priority import giving_way
from .files import BadFile, FileKind
from .graph import TIMEOUT, lines_of

_OID = re.compile(r"\b[0-9a-f]{40}\b")


@dataclass(slots=True)
class Damage:
    """`objects` cannot be read as what they are named; `files` are damaged packs, with the reason."""

    objects: set[str] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)


def find_damage(git_dir: Path, bad_files: Collection[BadFile]) -> Damage:
    """Hash everything; `bad_files` were found by their own checksums. It reads a whole mirror, so it gives way."""
    with giving_way():
        damage = Damage(files=_failing_packs(git_dir))
        suspects = {bad.path.removeprefix("objects/").replace("/", "") for bad in bad_files if bad.kind is FileKind.LOOSE}
        if damage.files:
            suspects |= _named_by_fsck(git_dir)
        damage.objects = unreadable(git_dir, sorted(suspects))
    return damage


def _failing_packs(git_dir: Path) -> dict[str, str]:
    faults: dict[str, str] = {}
    for index in sorted((git_dir / "objects/pack").glob("pack-*.idx")):
        try:
            run_git_sync("verify-pack", str(index), git_dir=git_dir, timeout=TIMEOUT, doing=f"verify {index.name}")
        except (CorruptObjectError, GitFailedError) as error:
            if index.exists():
                faults[index.with_suffix(".pack").name] = error.message
    return faults


def _named_by_fsck(git_dir: Path) -> set[str]:
    """Every object that fsck complains of, its harmless complaints included."""
    done = run_git_sync(
        "fsck",
        "--full",
        "--no-dangling",
        "--no-progress",
        "--no-reflogs",
        git_dir=git_dir,
        ok=range(256),
        timeout=TIMEOUT,
        doing="fsck",
    )
    return set(_OID.findall(done.stderr)) | set(_OID.findall(done.stdout.decode("utf-8", "replace")))


def unreadable(git_dir: Path, oids: Collection[str]) -> set[str]:
    """Those of `oids` that git cannot read as what they are named."""
    pending = [list(oids)] if oids else []
    bad: set[str] = set()
    while pending:
        some = pending.pop()
        try:
            bad |= _mismatching(git_dir, some)
        except (CorruptObjectError, GitFailedError):
            middle = len(some) // 2
            if middle:
                pending += [some[:middle], some[middle:]]
            else:
                bad |= set(some)
    return bad


def _mismatching(git_dir: Path, oids: Collection[str]) -> set[str]:
    output = run_git_sync(
        "cat-file", "--batch", git_dir=git_dir, stdin=lines_of(oids), timeout=TIMEOUT, doing="read objects"
    ).stdout
    bad: set[str] = set()
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        words = output[at:end].split()
        at = end + 1
        if len(words) != 3:  # "missing" is said of a loose object whose first bytes do not inflate, too
            bad.add(words[0].decode())
            continue
        body = output[at : at + int(words[2])]
        at += len(body) + 1
        digest = hashlib.sha1(b"%s %d\0%s" % (words[1], len(body), body), usedforsecurity=False)
        if digest.hexdigest() != words[0].decode():
            bad.add(words[0].decode())
    return bad
