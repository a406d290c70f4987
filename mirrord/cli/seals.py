"""`mirrord verify-seal`: in this process, with no daemon, on any repository."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .. import config, places
from ..errors import MirrorNotFoundError, PathNotFoundError
from ..layout import Layout
from ..model import History, MirrorName, parse_commit
from ..seal.verify import verify_seal
from .output import count
from .parameters import Argument, Option
from .session import Session

if TYPE_CHECKING:
    from ..protocol import SealReport

_LEAK = 8


def verify(
    session: Session,
    path: Annotated[Path, Argument(help="A working tree or a .git directory, ours or not.")],
    base: Annotated[str, Option(metavar="SHA", help="Base commit; anything newer is a leak.")],
    mirror: Annotated[
        str | None,
        Option(
            metavar="NAME", help="A mirror, or the path of a repository, that knows the history."
        ),
    ] = None,
) -> None:
    """Status 8 when it leaks. The repository's own configuration and hooks are never used; no daemon is needed."""
    if not path.exists():
        raise PathNotFoundError(f"cannot verify {path}: no such path")
    base_commit = parse_commit(base)
    known_by = _mirror_of(path.resolve()) if mirror is None else _mirror_path(session, mirror)
    report = verify_seal(path.absolute(), base_commit, known_by)
    session.answer(report, lambda: _lines(report))
    if not report.sealed:
        raise SystemExit(_LEAK)


def _mirror_of(path: Path) -> Path | None:
    """What a squashed checkout of ours was made from, which alone can judge it; None for all others.

    Only what nobody but root or ourselves can have written is believed.
    """
    for directory in path.parents:
        layout = Layout(directory.parent.parent)
        if directory.parent == layout.checkouts and all(
            map(_is_ours, (layout.leases, layout.root))
        ):
            return _mirror_in(layout.leases / directory.name / "lease.json", layout)
    return None


def _mirror_in(lease: Path, layout: Layout) -> Path | None:
    """The mirror that a lease names, for whoever may read both."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads(lease.read_text())
        mirror = layout.mirrors / str(MirrorName.parse(facts["mirror"]))
        if facts["history"] == History.SQUASHED and os.access(mirror / "HEAD", os.R_OK):
            return mirror
    return None


def _is_ours(directory: Path) -> bool:
    found = directory.stat()
    return found.st_uid in {0, os.geteuid()} and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _mirror_path(session: Session, named: str) -> Path:
    if Path(named).is_dir():
        return Path(named).absolute()
    mirrors = config.load(session.config_path() or places.find_path()).state_dir / "mirrors"
    key = MirrorName.parse(named).key
    try:
        found = [entry for entry in mirrors.iterdir() if entry.name.lower() == key]
    except OSError as error:
        raise MirrorNotFoundError(
            f"cannot read the mirrors in {mirrors}: {error.strerror}",
            hint="give the repository's path",
        ) from error
    if not found:
        raise MirrorNotFoundError(
            f"cannot find mirror {named}: not in {mirrors}", hint="give the repository's path"
        )
    return found[0]


def _lines(report: SealReport) -> Iterator[str]:
    for leak in report.leaks:
        yield f"{leak.kind}: {leak.detail}"
    verdict = "sealed" if report.sealed else f"leaks ({count(len(report.leaks), 'leak')})"
    objects = f"{count(report.objects_present, 'object')} present, {report.objects_in_closure:,} in the closure of {report.base}"
    yield f"{verdict}: {objects}"
    yield from (f"  checked {what}" for what in report.checked)
