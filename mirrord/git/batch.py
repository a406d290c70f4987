"""`git cat-file` in its batch modes: many objects asked of one process.

git (2.39) dies of the first damaged object and says nothing of the rest. With `bisect` the names
are asked again by halves, until the damaged ones stand alone.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from .command import DEFAULT_TIMEOUT, Git, run_git_sync

_INFO, _CONTENTS = "info", "contents"
_INFO_FORMAT = "--batch-command=%(objectname) %(objecttype)"  # a size costs a look into each delta
_CONTENTS_FORMAT = f"{_INFO_FORMAT} %(objectsize)"
_TYPES = {"commit", "tree", "blob", "tag"}
_Asked = list[tuple[str, str]]


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
    contents: bool = False,
    bisect: bool = False,
    quarantine_objects: Path | None = None,
) -> list[BatchObject]:
    """Id and type of each name, in order; with `contents` the bytes too."""
    found: list[BatchObject] = []
    verb, form = (_CONTENTS, _CONTENTS_FORMAT) if contents else (_INFO, _INFO_FORMAT)
    pending = [[(verb, name) for name in names]]
    while pending:
        if not (asked := pending.pop()):
            continue
        try:
            done = await git.run(
                "cat-file", "--buffer", form,
                git_dir=git_dir,
                stdin=lines_of(map(" ".join, asked)),
                quarantine_objects=quarantine_objects,
                doing=doing,
            )  # fmt: skip
            found += _parse(asked, done.stdout)
        except (CorruptObjectError, GitFailedError):
            if not bisect:
                raise
            found += _ask_again(asked, pending)
    return found


def read_objects_sync(
    git_dir: Path,
    names: Collection[str],
    *,
    info: Collection[str] = (),
    doing: str,
    options: Sequence[str] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
    bisect: bool = False,
) -> Iterator[BatchObject]:
    """Id and type of each of `info`, then id, type and bytes of each of `names`, in order.

    `options` stand before `cat-file`. Runs, and fails, from the first `next` on.
    """
    pending = [[*((_INFO, name) for name in info), *((_CONTENTS, name) for name in names)]]
    while pending:
        if not (asked := pending.pop()):
            continue
        try:
            done = run_git_sync(
                *options, "cat-file", "--buffer",
                _INFO_FORMAT if asked[-1][0] == _INFO else _CONTENTS_FORMAT,
                git_dir=git_dir,
                stdin=lines_of(map(" ".join, asked)),
                timeout=timeout,
                doing=doing,
            )  # fmt: skip
        except (CorruptObjectError, GitFailedError):
            if not bisect:
                raise
            yield from _ask_again(asked, pending)
        else:
            yield from _parse(asked, done.stdout)


def _ask_again(asked: _Asked, pending: list[_Asked]) -> list[BatchObject]:
    """Ask by halves what git died of; the damaged object is where one name stands alone."""
    if len(asked) == 1:
        return [BatchObject(asked[0][1], "", "damaged")]
    middle = len(asked) // 2
    pending += [asked[middle:], asked[:middle]]
    return []


def _parse(asked: Iterable[tuple[str, str]], output: bytes) -> Iterator[BatchObject]:
    at = 0
    for verb, name in asked:
        end = output.index(b"\n", at)
        oid, _, kind = output[at:end].decode("utf-8", "surrogateescape").partition(" ")
        at = end + 1
        kind, _, size = kind.partition(" ") if kind.rpartition(" ")[2].isdigit() else (kind, "", "")
        if kind not in _TYPES:  # `<name> missing`; a name may have spaces
            yield BatchObject(name, "", kind.rpartition(" ")[2])
        elif verb == _INFO:
            yield BatchObject(name, oid, kind)
        else:
            yield BatchObject(name, oid, kind, output[at : at + int(size)])
            at += int(size) + 1
