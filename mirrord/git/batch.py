"""`git cat-file` in its batch modes: many objects asked of one process.

git (2.39) dies of the first damaged object and says nothing of the rest. With `bisect` the names
are asked again by halves, until the damaged ones stand alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from ..errors import CorruptObjectError, GitFailedError
from .command import DEFAULT_TIMEOUT, Git, run_git_sync

T = TypeVar("T")
Verb = Literal["info", "contents"]

_TYPES = {"commit", "tree", "blob", "tag"}
_FORMAT = {
    "info": "--batch-command=%(objectname) %(objecttype)",  # a size costs a look into each delta
    "contents": "--batch-command=%(objectname) %(objecttype) %(objectsize)",
}
_ALL = ("cat-file", "--batch-all-objects", "--unordered", "--buffer")


class BatchObject(NamedTuple):
    """What git says of `name`: an object id, or an expression that leads on from one (`ID^{tree}`).

    `kind` is the object's type, or git's word for none (`missing`, `ambiguous`; `oid` and `data`
    are empty then), or `damaged` where git died of it. A loose object that does not inflate is
    `missing`.
    """

    name: str
    oid: str
    kind: str
    data: bytes = b""

    @property
    def exists(self) -> bool:
        return bool(self.oid)


def lines_of(names: Iterable[str]) -> bytes:
    """Names as git reads them from stdin."""
    return "".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape")


async def object_info(
    git: Git,
    git_dir: Path,
    names: Collection[str],
    *,
    doing: str,
    bisect: bool = False,
    quarantine_objects: Path | None = None,
) -> list[BatchObject]:
    """Id and type of each name, in order."""
    if not names:
        return []
    try:
        done = await git.run(
            "cat-file", "--buffer", _FORMAT["info"],
            git_dir=git_dir,
            stdin=lines_of(f"info {name}" for name in names),
            quarantine_objects=quarantine_objects,
            doing=doing,
        )  # fmt: skip
    except (CorruptObjectError, GitFailedError):
        if not bisect:
            raise
        if len(names) == 1:
            return [BatchObject(name, "", "damaged") for name in names]
        ask = partial(object_info, git, git_dir, doing=doing, quarantine_objects=quarantine_objects)
        first, last = _halves(names)
        return [*await ask(first, bisect=True), *await ask(last, bisect=True)]
    return list(_parse(_with("info", names), done.stdout))


def object_info_sync(
    git_dir: Path,
    names: Collection[str],
    *,
    doing: str,
    read: Collection[str] = (),
    options: Sequence[str] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
    bisect: bool = False,
) -> list[BatchObject]:
    """Id and type of each name, in order; then of those to `read`, with their bytes.

    `options` stand before `cat-file`.
    """
    asked = [*_with("info", names), *_with("contents", read)]
    return list(_ask(git_dir, asked, doing, options, timeout, bisect=bisect))


def read_objects_sync(
    git_dir: Path,
    names: Collection[str],
    *,
    doing: str,
    options: Sequence[str] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
    bisect: bool = False,
) -> Iterator[BatchObject]:
    """Id, type and bytes of each name, in order. Runs, and fails, from the first `next` on."""
    asked = _with("contents", names)
    return _ask(git_dir, asked, doing, options, timeout, bisect=bisect)


def all_object_ids_sync(
    git_dir: Path,
    *,
    doing: str,
    options: Sequence[str] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> list[str]:
    """Every object in the store, reachable or not.

    Ids alone: asked for all types at once, git (2.39) dies of a pack too short to be opened.
    """
    command = (*options, *_ALL, "--batch-check=%(objectname)")
    return run_git_sync(*command, git_dir=git_dir, timeout=timeout, doing=doing).lines


def _with(verb: Verb, names: Iterable[str]) -> list[tuple[Verb, str]]:
    return [(verb, name) for name in names]


def _ask(
    git_dir: Path,
    asked: Sequence[tuple[Verb, str]],
    doing: str,
    options: Sequence[str],
    timeout: timedelta,
    *,
    bisect: bool,
) -> Iterator[BatchObject]:
    if not asked:
        return
    try:
        done = run_git_sync(
            *options, "cat-file", "--buffer", _FORMAT[asked[-1][0]],
            git_dir=git_dir,
            stdin=lines_of(f"{verb} {name}" for verb, name in asked),
            timeout=timeout,
            doing=doing,
        )  # fmt: skip
    except (CorruptObjectError, GitFailedError):
        if not bisect:
            raise
        if len(asked) == 1:
            yield BatchObject(asked[0][1], "", "damaged")
            return
        for half in _halves(asked):
            yield from _ask(git_dir, half, doing, options, timeout, bisect=True)
    else:
        yield from _parse(asked, done.stdout)


def _halves(asked: Collection[T]) -> tuple[list[T], list[T]]:
    listed = list(asked)
    middle = len(listed) // 2
    return listed[:middle], listed[middle:]


def _parse(asked: Iterable[tuple[Verb, str]], output: bytes) -> Iterator[BatchObject]:
    at = 0
    for verb, name in asked:
        end = output.index(b"\n", at)
        oid, _, kind = output[at:end].decode("utf-8", "surrogateescape").partition(" ")
        at = end + 1
        kind, _, size = kind.partition(" ") if kind.rpartition(" ")[2].isdigit() else (kind, "", "")
        if kind not in _TYPES:  # `<name> missing`; a name may have spaces
            yield BatchObject(name, "", kind.rpartition(" ")[2])
        elif verb == "info":
            yield BatchObject(name, oid, kind)
        else:
            yield BatchObject(name, oid, kind, output[at : at + int(size)])
            at += int(size) + 1
