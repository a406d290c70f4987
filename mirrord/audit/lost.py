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
from .names import Names, read_names
from .past import Record, parse_record
from .questions import Answers, ask

_TOLD = 10


def lost_refs(repository: Path, git_dir: Path, names: Names, answers: Answers) -> dict[str, str]:
    """Faults by ref. `repository` has the objects of `git_dir`, and is what git can read; `answers` are to `questions`."""
    found = _lost(names, answers)
    if not found:
        return {}
    now = read_names(git_dir)  # a sync may have moved refs in between
    asked = questions(now)
    again = _lost(now, ask(repository, asked, blob=record_of(now)))
    return {ref: reason for ref, reason in found.items() if again.get(ref) == reason}


def questions(names: Names) -> set[str]:
    """What has to be known of the objects that refs name."""
    return set(names.refs.values())


def record_of(names: Names) -> str | None:
    """The newest record of the ref history, as git is asked for its text."""
    return f"{names.refs[HISTORY]}:refs" if HISTORY in names.refs else None


def _lost(names: Names, answers: Answers) -> dict[str, str]:
    # a pin that names nothing is told as the commit that it should keep
    hollow = (ref for ref, oid in names.refs.items() if oid not in answers.objects and PINS not in ref)
    faults = _told("it names an object that is not here", hollow)
    broken = {bad.path for bad in names.faults}
    if HISTORY not in names.refs:
        return faults | ({HISTORY: "it is gone"} if names.refs and HISTORY not in broken else {})
    recorded, _ = parse_record(answers.text or b"")
    missing = (ref for ref in recorded if ref not in names.refs and ref not in broken)
    return faults | _told("it is gone, and the ref history has it", missing)


def _told(reason: str, refs: Iterable[str]) -> dict[str, str]:
    """One fault for each ref; many become one."""
    listed = sorted(refs)
    if len(listed) <= _TOLD:
        return dict.fromkeys(listed, reason)
    return {listed[0]: f"{reason}; {len(listed) - 1} more refs are like that"}


def read_record(repository: Path, record: str) -> Record:
    """One record of the ref history; nothing where it cannot be read."""
    try:
        shown = run_git_sync("cat-file", "blob", f"{record}:refs", git_dir=repository, doing="read a ref record")
    except (CorruptObjectError, GitFailedError):
        return {}, None
    return parse_record(shown.stdout)
