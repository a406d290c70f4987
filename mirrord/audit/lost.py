"""Refs that are not there and should be: those that the ref history has, and those that do not lead to all they should.

Every move of a ref by mirrord is in the ref history, in the same transaction; so a ref that the newest record has and the mirror
has not was taken away by somebody else. Reads only. Runs in a worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..mirrors.repository import HISTORY, PINS
from ..model import AuditLevel
from .graph import TIMEOUT, UNTRUSTING, lines_of
from .names import Names, read_names

_TOLD = 10


def lost_refs(repository: Path, git_dir: Path) -> dict[str, str]:
    """Faults by ref. `repository` has the objects of `git_dir`, and is what git can read."""
    found = _lost(repository, read_names(git_dir))
    if not found:
        return {}
    again = _lost(repository, read_names(git_dir))  # a sync may have moved refs in between
    return {ref: reason for ref, reason in found.items() if again.get(ref) == reason}


def _lost(repository: Path, names: Names) -> dict[str, str]:
    gone = absent(repository, names.refs.values())
    # a pin that names nothing is told as the commit that it should keep
    faults = _told("it names an object that is not here", (r for r, oid in names.refs.items() if oid in gone and PINS not in r))
    broken = {bad.path for bad in names.faults}
    if HISTORY not in names.refs:
        return faults | ({HISTORY: "it is gone"} if names.refs and HISTORY not in broken else {})
    recorded, _ = read_record(repository, names.refs[HISTORY])
    missing = (ref for ref in recorded if ref not in names.refs and ref not in broken)
    return faults | _told("it is gone, and the ref history has it", missing)


def incomplete_refs(repository: Path, names: Names, level: AuditLevel, proven: Collection[str]) -> dict[str, str]:
    """A fault for the first ref whose objects are not all there: of the ref history, and at level `content` of all refs.

    Nothing is walked behind `proven`, commits that are whole. One fault is enough for a heal, which looks at all of them.
    """
    gone = absent(repository, names.refs.values())
    there = {ref: oid for ref, oid in sorted(names.refs.items()) if oid not in gone and PINS not in ref}
    found = {}
    for refs in ([HISTORY], [ref for ref in there if ref != HISTORY] if level is AuditLevel.CONTENT else []):
        tips = {ref: there[ref] for ref in refs if ref in there}
        if reason := _hole(repository, tips.values(), proven):
            first = _first_with_a_hole(repository, tips, proven)
            found[first] = f"not all that it reaches is here: {reason}"
    return found


def _hole(repository: Path, tips: Iterable[str], proven: Iterable[str]) -> str | None:
    """What git says where something is missing behind `tips`."""
    wanted = sorted(set(tips))
    if not wanted:
        return None
    revisions = [*wanted, *(f"^{oid}" for oid in proven)]
    walk = ("rev-list", "--objects", "--quiet", "--stdin")
    try:
        run_git_sync(
            *UNTRUSTING, *walk, git_dir=repository, stdin=lines_of(revisions), timeout=TIMEOUT, doing="walk what refs reach"
        )
    except (CorruptObjectError, GitFailedError) as error:
        return error.message.removeprefix("cannot walk what refs reach: ")
    return None


def _first_with_a_hole(repository: Path, tips: Mapping[str, str], proven: Collection[str]) -> str:
    refs = list(tips)
    while len(refs) > 1:
        half = refs[: len(refs) // 2]
        refs = half if _hole(repository, [tips[ref] for ref in half], proven) else refs[len(half) :]
    return refs[0]


def _told(reason: str, refs: Iterable[str]) -> dict[str, str]:
    """One fault for each ref; many become one."""
    listed = sorted(refs)
    if len(listed) <= _TOLD:
        return dict.fromkeys(listed, reason)
    return {listed[0]: f"{reason}; {len(listed) - 1} more refs are like that"}


def absent(repository: Path, oids: Iterable[str]) -> set[str]:
    """Which of `oids` are not in the object store."""
    asked = sorted(set(oids))
    if not asked:
        return set()
    shown = run_git_sync(
        "cat-file",
        "--batch-check=%(objectname)",
        git_dir=repository,
        stdin=lines_of(asked),
        ok=(0, 128),
        timeout=TIMEOUT,
        doing="look up objects",
    ).lines
    return set(asked) - {line for line in shown if len(line) == 40}


def read_record(repository: Path, record: str) -> tuple[dict[str, str], str | None]:
    """The refs of a record of the ref history, and what HEAD named; nothing where it cannot be read."""
    try:
        shown = run_git_sync("cat-file", "blob", f"{record}:refs", git_dir=repository, doing="read a ref record")
    except (CorruptObjectError, GitFailedError):
        return {}, None
    pairs = [line.partition(" ")[::2] for line in shown.lines]
    head = next((ref.removeprefix("HEAD ") for oid, ref in pairs if oid == "@"), None)
    return {ref: oid for oid, ref in pairs if oid != "@" and ref.startswith("refs/")}, head
