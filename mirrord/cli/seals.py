"""`mirrord verify-seal`: in this process, with no daemon, on any repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import config
from ..checkouts.seal import verify_seal
from ..errors import MirrorNotFoundError, PathNotFoundError
from ..model import MirrorName, parse_commit
from .output import count
from .session import Session

if TYPE_CHECKING:
    from ..protocol import SealReport

_LEAK = 8


def verify(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(help="A working tree or a .git directory, ours or not.")],
    base: Annotated[str, typer.Option(metavar="SHA", help="The commit after which nothing may be found.")],
    mirror: Annotated[
        str | None, typer.Option(metavar="NAME", help="A mirror, or the path of a repository, that knows the history.")
    ] = None,
) -> None:
    """Status 8 when it leaks. The repository's own configuration and hooks are never used; no daemon is needed."""
    session = Session.of(ctx)
    if not path.exists():
        raise PathNotFoundError(f"cannot verify {path}: no such path")
    report = verify_seal(path.absolute(), parse_commit(base), _mirror_path(session, mirror))
    session.answer(report, lambda: _lines(report))
    if not report.sealed:
        raise typer.Exit(_LEAK)


def _mirror_path(session: Session, named: str | None) -> Path | None:
    if named is None:
        return None
    if Path(named).is_dir():
        return Path(named).absolute()
    mirrors = config.load(session.config_path() or config.find_path()).state_dir / "mirrors"
    key = MirrorName.parse(named).key
    try:
        found = [entry for entry in mirrors.iterdir() if entry.name.lower() == key]
    except OSError as error:
        raise MirrorNotFoundError(
            f"cannot read the mirrors in {mirrors}: {error.strerror}", hint="give the repository's path"
        ) from error
    if not found:
        raise MirrorNotFoundError(f"cannot find mirror {named}: not in {mirrors}", hint="give the repository's path")
    return found[0]


def _lines(report: SealReport) -> Iterator[str]:
    for leak in report.leaks:
        yield f"{leak.kind}: {leak.detail}"
    verdict = "sealed" if report.sealed else f"leaks ({count(len(report.leaks), 'leak')})"
    objects = f"{count(report.objects_present, 'object')} present, {report.objects_in_closure:,} in the closure of {report.base}"
    yield f"{verdict}: {objects}"
    yield from (f"  checked {what}" for what in report.checked)
