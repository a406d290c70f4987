"""`cat-file` in batch mode: many objects from one process.

git (2.39) dies at the first damaged object. With `bisect` the names are asked again in halves,
until each damaged one is found.
"""

from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from ..quoting import decode_name
from .command import DEFAULT_TIMEOUT, Git, lines_of, run_git_sync

_INFO, _CONTENTS = "info", "contents"
_INFO_FORMAT = "--batch-command=%(objectname) %(objecttype)"  # a size costs a read of each delta
_Requests = list[tuple[str, str]]


class BatchObject(NamedTuple):
    """The object that `name` means: an id, or an expression such as `ID^{tree}`.

    `kind` is its type. Without an object, `oid` and `data` are empty, and `kind` is git's word
    (`missing`, `ambiguous`), or `damaged` if git died of it. A loose object that does not inflate
    is `missing`.
    """

    name: str
    oid: str
    kind: str
    data: bytes = b""

    @property
    def exists(self) -> bool:
        return bool(self.oid)


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
    """Return id and type of each name, in order; with `contents` the bytes too."""
    answers: list[BatchObject] = []
    verb = _CONTENTS if contents else _INFO
    pending = [[(verb, name) for name in names]] if names else []
    while pending:
        requests = pending.pop()
        try:
            done = await git.run(
                *_command(requests),
                git_dir=git_dir,
                stdin=lines_of(map(" ".join, requests)),
                quarantine_objects=quarantine_objects,
                doing=doing,
            )
            answers += _parse(requests, done.stdout)
        except (CorruptObjectError, GitFailedError):
            if not bisect:
                raise
            answers += _split(requests, pending)
    return answers


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
    """Iterate id and type of each of `info`, then id, type and bytes of each of `names`, in order.

    `options` precede `cat-file`. git is started by the first `next`.
    """
    requests = [*((_INFO, name) for name in info), *((_CONTENTS, name) for name in names)]
    pending = [requests] if requests else []
    while pending:
        requests = pending.pop()
        try:
            done = run_git_sync(
                *options,
                *_command(requests),
                git_dir=git_dir,
                stdin=lines_of(map(" ".join, requests)),
                timeout=timeout,
                doing=doing,
            )
        except (CorruptObjectError, GitFailedError):
            if not bisect:
                raise
            yield from _split(requests, pending)
        else:
            yield from _parse(requests, done.stdout)


_CONTENTS_FORMAT = f"{_INFO_FORMAT} %(objectsize)"


def _command(requests: _Requests) -> tuple[str, ...]:
    wants_contents = requests[-1][0] == _CONTENTS  # they come last
    return "cat-file", "--buffer", _CONTENTS_FORMAT if wants_contents else _INFO_FORMAT


def _split(requests: _Requests, pending: list[_Requests]) -> list[BatchObject]:
    """Queue both halves of what git died of; a single request is the damaged object."""
    if len(requests) == 1:
        return [BatchObject(requests[0][1], "", "damaged")]
    middle = len(requests) // 2
    pending += [requests[middle:], requests[:middle]]
    return []


_TYPES = {"commit", "tree", "blob", "tag"}


def _parse(requests: _Requests, output: bytes) -> Iterator[BatchObject]:
    offset = 0
    for verb, name in requests:
        end = output.index(b"\n", offset)
        oid, _, kind = decode_name(output[offset:end]).partition(" ")
        offset = end + 1
        kind, _, size = kind.partition(" ") if kind.rpartition(" ")[2].isdigit() else (kind, "", "")
        if kind not in _TYPES:  # `<name> missing`; a name may have spaces
            yield BatchObject(name, "", kind.rpartition(" ")[2])
        elif verb == _INFO:
            yield BatchObject(name, oid, kind)
        else:
            yield BatchObject(name, oid, kind, output[offset : offset + int(size)])
            offset += int(size) + 1
