"""What one git can be asked about many objects: which are there, of what kind, where names lead, what a small blob says.

git ends at some damaged objects and leaves the rest unanswered; those it did not answer are asked again by halves, so that one
damaged object is one unanswered name. Runs in a worker, reads only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..git.batch import lines_of
from ..git.command import run_git_sync
from ..git.environment import UNTRUSTING
from .graph import TIMEOUT


class Known(NamedTuple):
    oid: str
    kind: str


@dataclass(frozen=True, slots=True)
class Answers:
    """`objects` by the name asked for, without those that lead nowhere; `text` is the blob's, None where it cannot be read."""

    objects: dict[str, Known]
    text: bytes | None = None


def ask(git_dir: Path, names: Collection[str], *, blob: str | None = None) -> Answers:
    """Look up `names`, which are object ids or lead on from one (`ID^{tree}`), and read `blob`, all with one process."""
    asked = sorted(set(names))
    lines = [f"info {name}" for name in asked] + ([f"contents {blob}"] if blob else [])
    if not lines:
        return Answers({})
    done = run_git_sync(
        *UNTRUSTING, "cat-file", "--batch-command", "--buffer",
        git_dir=git_dir, stdin=lines_of(lines), ok=range(256), timeout=TIMEOUT, doing="look up objects",
    )  # fmt: skip
    if done.status and len(lines) > 1:
        return _ask_by_halves(git_dir, asked, blob)
    if done.status:
        return Answers({})
    return _answers(asked, done.stdout, blob is not None)


def _ask_by_halves(git_dir: Path, asked: list[str], blob: str | None) -> Answers:
    middle = len(asked) // 2
    if blob is not None:
        return Answers(ask(git_dir, asked).objects, ask(git_dir, (), blob=blob).text)
    return Answers(ask(git_dir, asked[:middle]).objects | ask(git_dir, asked[middle:]).objects)


def _answers(asked: list[str], output: bytes, has_blob: bool) -> Answers:
    at = 0
    objects: dict[str, Known] = {}
    for name in asked:
        end = output.index(b"\n", at)
        words = output[at:end].decode("utf-8", "surrogateescape").split(" ")
        at = end + 1
        if len(words) == 3 and words[2].isdigit():  # else it says "missing"
            objects[name] = Known(words[0], words[1])
    if not has_blob:
        return Answers(objects)
    head, _, text = output[at:].partition(b"\n")
    return Answers(objects, text[:-1] if head.split()[1:2] == [b"blob"] else None)


# -- names that lead on -----------------------------------------------------------------------------------------------


def peeled(oid: str) -> str:
    """How git is asked for the commit that an object leads to."""
    return f"{oid}^{{commit}}"


def tree_of(oid: str) -> str:
    """How git is asked for the tree of a commit."""
    return f"{oid}^{{tree}}"


def peel(refs: Mapping[str, str], known: Mapping[str, Known]) -> dict[str, str]:
    """Every ref to the commit it names, through its tag objects; those that name none are left out."""
    return {ref: known[name].oid for ref, oid in refs.items() if (name := peeled(oid)) in known}
