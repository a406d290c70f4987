"""Refs that are not there and should be: those that the ref history has, and those that name an object which is not here.

Every move of a ref by mirrord is in the ref history, in the same transaction; so a ref that the newest record has and the mirror
has not was taken away by somebody else. Reads only. Runs in a worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..mirrors.repository import HISTORY, PINS
from .graph import TIMEOUT, lines_of
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
