"""Which objects of a mirror are not what their names say: `git fsck` hashes every object once and walks from every ref.

When it finds nothing, everything that a ref reaches is there and is what it is named. When it finds something, packs are verified
one by one, and whatever looks damaged is read once more by itself; git may have a good copy of it elsewhere. `rev-list
--verify-objects` is not used: git 2.39 hashes neither trees nor most commits in it, and ends with status 0 where it did find a
mismatch. Runs in a worker.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import lines_of
from ..git.command import run_git_sync
from ..git.environment import UNTRUSTING
from .object_files import TIMEOUT, BadFile, FileKind

_OID = re.compile(r"\b[0-9a-f]{40}\b")


_HARMLESS = re.compile(
    r"notice: |(?:error|warning) in (?:commit|tree|tag|blob) [0-9a-f]{40}: [a-z][A-Za-z]+: "
)
"""What real histories have: who and when written wrong, odd modes. "broken links" has no such name before it."""
_FOUND_SLIPS = 1 | 4  # in an object, and in the pack that holds it
_AT_ONCE = 1000  # their bytes are in memory together


@dataclass(frozen=True, slots=True)
class Fsck:
    """`named` is every object in a complaint."""

    is_sound: bool
    named: set[str]


@dataclass(slots=True)
class Damage:
    """`objects` cannot be read as what they are named; `files` are damaged packs, with the reason."""

    objects: set[str] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)


def check_everything(git_dir: Path) -> Fsck:
    """Hash every object and walk from every ref; once more when packs went away meanwhile, because they were repacked."""
    before = _packs(git_dir)
    fsck = _check_everything(git_dir)
    return fsck if fsck.is_sound or before <= _packs(git_dir) else _check_everything(git_dir)


def _packs(git_dir: Path) -> set[str]:
    return {file.name for file in (git_dir / "objects/pack").glob("pack-*.pack")}


def _check_everything(git_dir: Path) -> Fsck:
    done = run_git_sync(
        *UNTRUSTING, "fsck", "--full", "--no-dangling", "--no-progress", "--no-reflogs",
        git_dir=git_dir, ok=range(256), timeout=TIMEOUT, doing="fsck",
    )  # fmt: skip
    said = f"{done.stderr}\n{done.stdout.decode('utf-8', 'replace')}"
    complaints = [line for line in said.splitlines() if line and not _HARMLESS.match(line)]
    return Fsck(
        not done.status & ~_FOUND_SLIPS and not complaints, set(_OID.findall("\n".join(complaints)))
    )


def find_damage(git_dir: Path, bad_files: Collection[BadFile], fsck: Fsck) -> Damage:
    """Tell what `fsck` complained of; `bad_files` were found by their own checksums."""
    damage = Damage(files=_failing_packs(git_dir))
    suspects = {
        bad.path.removeprefix("objects/").replace("/", "")
        for bad in bad_files
        if bad.kind is FileKind.LOOSE
    }
    damage.objects = unreadable(git_dir, sorted(suspects | fsck.named))
    return damage


def _failing_packs(git_dir: Path) -> dict[str, str]:
    faults: dict[str, str] = {}
    for index in sorted((git_dir / "objects/pack").glob("pack-*.idx")):
        try:
            # what `git verify-pack` runs; without it in between, which would leave it behind when it is killed
            pack = str(index.with_suffix(".pack"))
            run_git_sync(
                "index-pack",
                "--verify",
                pack,
                git_dir=git_dir,
                timeout=TIMEOUT,
                doing=f"verify {index.name}",
            )
        except (CorruptObjectError, GitFailedError) as error:
            if index.exists():
                faults[index.with_suffix(".pack").name] = error.message
    return faults


def unreadable(git_dir: Path, oids: Collection[str]) -> set[str]:
    """Those of `oids` that git cannot read as what they are named."""
    listed = list(oids)
    pending = [listed[at : at + _AT_ONCE] for at in range(0, len(listed), _AT_ONCE)]
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
        *UNTRUSTING,
        "cat-file",
        "--batch",
        git_dir=git_dir,
        stdin=lines_of(oids),
        timeout=TIMEOUT,
        doing="read objects",
    ).stdout
    bad: set[str] = set()
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        words = output[at:end].split()
        at = end + 1
        if (
            len(words) != 3
        ):  # "missing" is said of a loose object whose first bytes do not inflate, too
            bad.add(words[0].decode())
            continue
        body = output[at : at + int(words[2])]
        at += len(body) + 1
        digest = hashlib.sha1(b"%s %d\0%s" % (words[1], len(body), body), usedforsecurity=False)
        if digest.hexdigest() != words[0].decode():
            bad.add(words[0].decode())
    return bad
