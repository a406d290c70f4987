"""The journal of a change of several files in a checkout.

Written to the lease's private directory before the first name is made in the tree. As
`changing.json` it is undone, and as `changed.json`, once all is in place, it is finished: by the
call itself, or after a crash by the next one or the next start.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..host.files import opened, write_all
from ..presence import lexists
from ..telemetry import log

_CHANGING, _CHANGED = "changing.json", "changed.json"


class PathStep(NamedTuple):
    """What happens to one path: what is there moves away, new content moves in, or both.

    The temporary names are in the directory `beside`, which is there before and after the change.
    """

    path: bytes
    beside: bytes
    has_old: bool
    has_new: bool


class Cleared(NamedTuple):
    """A directory that a file takes the place of; its temporary name is in `beside`."""

    path: bytes
    beside: bytes
    mode: int


@dataclass(frozen=True, slots=True)
class Journal:
    """A change. New files have `mtime_ns`, by which they are told from those of the owner.

    Directories in `made` are made; those in `cleared`, with their modes, are moved away once they
    are empty. Both list parents first. No directory with content is renamed, which overlayfs may
    refuse (EXDEV).
    """

    token: str
    mtime_ns: int
    steps: tuple[PathStep, ...]
    made: tuple[bytes, ...]
    cleared: tuple[Cleared, ...]
    is_done: bool = False

    def iter_old(self) -> Iterator[tuple[bytes, PathStep]]:
        """Yield the steps that move something away, each with its temporary name."""
        steps = enumerate(self.steps)
        return ((self._name(step.beside, f"{n}.old"), step) for n, step in steps if step.has_old)

    def iter_new(self) -> Iterator[tuple[bytes, PathStep]]:
        """Yield the steps that move something in, each with its temporary name."""
        steps = enumerate(self.steps)
        return ((self._name(step.beside, f"{n}.new"), step) for n, step in steps if step.has_new)

    def iter_cleared(self) -> Iterator[tuple[bytes, Cleared]]:
        """Yield the directories that are moved away, the deepest first, with temporary names."""
        for n, cleared in reversed([*enumerate(self.cleared)]):
            yield self._name(cleared.beside, f"{n}.directory"), cleared

    def _name(self, beside: bytes, end: str) -> bytes:
        name = f".mirrord-{self.token}-{end}".encode()
        return beside + b"/" + name if beside else name


def has_journal(private: Path) -> bool:
    """Return whether a change in the checkout with this private directory was not completed."""
    return any(lexists(f"{private}/{name}") for name in (_CHANGING, _CHANGED))


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def begin(private: Path, journal: Journal) -> None:
    """Write the journal of a change that begins."""
    path = f"{private}/{_CHANGING}"
    # not flushed: after a power failure it may be without sense (`read`)
    with opened(os.open(f"{path}.new", _CREATE, 0o600)) as fd:
        write_all(fd, _to_json(journal))
    os.rename(f"{path}.new", path)


def complete(private: Path) -> None:
    """Record that all is in place: from here on the change is finished, not undone."""
    os.rename(private / _CHANGING, private / _CHANGED)


def end(private: Path) -> None:
    """Remove the journal: nothing is left to do, or the tree was made anew."""
    for name in (_CHANGING, _CHANGED, f"{_CHANGING}.new"):
        if lexists(path := private / name):  # each reset asks, hardly ever is there one
            path.unlink()


def read(private: Path) -> Journal | None:
    """Return the journal of a change that was not completed; raises OSError if it is unreadable.

    One without sense, as after a power failure, is set aside: its temporary names stay in the tree.
    """
    for name, is_done in ((_CHANGING, False), (_CHANGED, True)):
        path = private / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        try:
            return _from_json(data, is_done=is_done)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("journal.unreadable", path=str(path), error=str(error))
            os.rename(path, f"{path}.unreadable")
    return None


def _to_json(journal: Journal) -> bytes:
    def text(path: bytes) -> str:
        return path.decode(errors="surrogateescape")

    steps = [[text(step.path), text(step.beside), *step[2:]] for step in journal.steps]
    cleared = [[text(path), text(beside), mode] for path, beside, mode in journal.cleared]
    made = [text(path) for path in journal.made]
    members = (journal.token, journal.mtime_ns, steps, made, cleared)
    return json.dumps(members).encode()


def _from_json(data: bytes, *, is_done: bool) -> Journal:
    def path(text: str) -> bytes:
        return text.encode(errors="surrogateescape")

    token, mtime_ns, steps, made, cleared = json.loads(data)
    return Journal(
        token,
        mtime_ns,
        tuple(PathStep(path(step[0]), path(step[1]), *step[2:]) for step in steps),
        tuple(map(path, made)),
        tuple(Cleared(path(name), path(beside), mode) for name, beside, mode in cleared),
        is_done,
    )
