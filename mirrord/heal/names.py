"""What the refs and HEAD of a mirror should be, where they are lost or broken: from their names, the ref history and the catalog.

A pin and a kept ref carry the object in their name; the others are in the newest record of the ref history; whatever any record
had and nothing reaches any more is kept. A ref that is there and names something is never moved. Reads only; runs in a worker.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..audit.files import FileKind
from ..audit.graph import TIMEOUT, lines_of, read_graph
from ..audit.lost import read_record
from ..audit.names import Names
from ..audit.past import read_records, unkept
from ..git.command import run_git_sync
from ..mirrors.history import WAS
from ..mirrors.refs import is_followed
from ..mirrors.repository import HISTORY, KEPT, OURS, PINS

_NAMED = re.compile(f"(?:{KEPT}|{PINS}.+/)([0-9a-f]{{40}})")
_OURS = re.compile(rb"committer mirrord <mirrord@localhost> (\d+) ")
_TRAILER = b"\n\nRefs: "
_FORMER = f"\n{WAS}: ".encode()
_USUAL = ("refs/heads/main", "refs/heads/master")


@dataclass(slots=True)
class RefPlan:
    """`restore` are refs to make again; `head` is what HEAD should name."""

    restore: dict[str, str] = field(default_factory=dict)
    head: str | None = None


def plan_refs(view: Path, names: Names, default_branch: str | None) -> RefPlan:
    """Say what is to be restored. `view` has the refs that could be read, and every object that could be had so far."""
    broken = {bad.path for bad in names.faults if bad.kind is FileKind.REF}
    restore = {ref: found[1] for ref in broken if (found := _NAMED.fullmatch(ref))}
    history = names.refs.get(HISTORY) or _find_history(view, names.refs)
    records = read_records(view, history) if history else []
    if history and HISTORY not in names.refs:
        restore[HISTORY] = history
    recorded, head = records[0] if records else ({}, None)
    restore |= {ref: oid for ref, oid in recorded.items() if ref not in names.refs and is_followed(ref)}
    restore |= unkept(view, records, {**names.refs, **restore})
    return RefPlan(restore, _head(names, head, default_branch, {**names.refs, **restore}))


def _commits_among(view: Path, oids: Collection[str]) -> set[str]:
    asked = sorted(set(oids))
    shown = run_git_sync(
        "cat-file", "--batch-check=%(objecttype)", git_dir=view, stdin=lines_of(asked), timeout=TIMEOUT, doing="look up objects"
    ).lines
    return {oid for oid, kind in zip(asked, shown, strict=True) if kind == "commit"}


def _find_history(view: Path, refs: Mapping[str, str]) -> str | None:
    """The newest record that no other record builds on; of two of one time the one that was written again.

    What upstream's refs reach is upstream's, whatever it looks like.
    """
    theirs = {oid for ref, oid in refs.items() if not ref.startswith(OURS)}
    graph = read_graph(view, _commits_among(view, theirs))
    candidates = {oid: when for oid, when in _looking_like_records(view) if oid not in graph}
    parents = {parent for oid in candidates for parent in _parents(view, oid)}
    last = [oid for oid in candidates if oid not in parents]
    return max(last, key=lambda oid: (candidates[oid], oid), default=None)


def _looking_like_records(view: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    listing = run_git_sync(
        "cat-file", "--batch-all-objects", "--unordered", "--buffer", "--batch-check=%(objecttype) %(objectname)",
        git_dir=view,
        timeout=TIMEOUT,
        doing="look for the ref history",
    )  # fmt: skip
    commits = [line.split()[1] for line in listing.lines if line.startswith("commit ")]
    output = run_git_sync(
        "cat-file",
        "--batch",
        "--buffer",
        git_dir=view,
        stdin=lines_of(commits),
        timeout=TIMEOUT,
        doing="look for the ref history",
    ).stdout
    at = 0
    while at < len(output):
        end = output.index(b"\n", at)
        oid, _, size = output[at:end].split()
        body = output[end + 1 : end + 1 + int(size)]
        found = _OURS.search(body.partition(b"\n\n")[0])
        if found and _TRAILER in body and read_record(view, oid.decode())[0]:
            yield oid.decode(), (int(found[1]), body.count(_FORMER))
        at = end + int(size) + 2


def _parents(view: Path, oid: str) -> tuple[str, ...]:
    shown = run_git_sync("cat-file", "commit", oid, git_dir=view, doing="read a ref record").stdout
    header = shown.partition(b"\n\n")[0]
    return tuple(line[7:].decode() for line in header.split(b"\n") if line.startswith(b"parent "))


def _head(names: Names, recorded: str | None, default_branch: str | None, refs: Mapping[str, str]) -> str | None:
    """HEAD as it is where that can be read, else what the record, the catalog or custom says."""
    said = (names.head, recorded, f"refs/heads/{default_branch}" if default_branch else None, *_USUAL)
    branches = (ref for ref in sorted(refs) if ref.startswith("refs/heads/"))
    return names.head or next((ref for ref in (*said, *branches) if ref in refs), None)
