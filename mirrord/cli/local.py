"""Verbs that run here, without a daemon: `config …`, `doctor`, `service …`, `verify-seal`."""

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from .. import config, errors, installer, places
from ..config import Settings
from ..doctor import Check, examine
from ..doctor.checks import Step
from ..doctor.repairs import Repaired, repair
from ..model import History, MirrorName, parse_commit, printable
from ..places import Layout
from ..protocol import RootReport, SealReport
from ..seal.scan import scan_root
from ..seal.verify import verify_seal as verify
from ..telemetry import masked
from .output import count, size
from .session import Argument, Option, Session, print_line

_ARRAYS_OF_TABLES = ("mirror", "rule")  # in TOML none is written where there is none
_COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


def config_check(
    session: Session,
    file: Annotated[Path | None, Argument("Default: the one in use.", "[FILE]")] = None,
) -> None:
    """Reports every fault at once, each with its key and line."""
    path = file or find_config(session)
    settings = config.load(path)
    text = f"{path}: no faults" if path else "no configuration file: the defaults are in use"
    session.answer(_without_secrets(settings), [text])


def config_show(session: Session) -> None:
    """Prints the daemon's settings when one answers, else the file's; stderr says which.

    The output is TOML for a configuration file, with --json an object. Secrets in URLs are masked.
    """
    named = Path(session.config) if session.config else None
    try:
        found = session.client.configuration()
    except (errors.NoDaemonError, errors.AccessError, errors.InvalidConfigError):
        found = None  # config.load reports an invalid file
    if found and (named is None or found.path == str(named.absolute())):
        values = found.settings
        source = f"in effect; read from {found.path or 'no file: the defaults'}"
    else:
        path = find_config(session)
        values = _without_secrets(config.load(path))
        source = f"no daemon answers: from {path or 'no file: the defaults'}"
    session.answer(values, _toml(values))
    session.note(source)


def find_config(session: Session) -> Path | None:
    """The configuration file that is named, else the default one, if it exists."""
    return Path(session.config) if session.config else places.find_path()


def _without_secrets(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(masked(settings.model_dump_json()))
    return values


def _toml(values: dict[str, Any], above: str = "") -> Iterator[str]:
    """JSON's strings, numbers, booleans and arrays are TOML's. Tables come after plain values."""
    tables: list[tuple[str, dict[str, Any]]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            tables.append((f"[{above}{key}]", value))
        elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
            tables += [(f"[[{above}{key}]]", each) for each in value]
        elif value is not None and (value or key not in _ARRAYS_OF_TABLES):
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for header, table in tables:
        yield f"\n{header}"
        yield from _toml(table, f"{header.strip('[]')}.")


def doctor(
    session: Session,
    *,
    fix: Annotated[bool, Option("Put right what needs no decision, then look again.")] = False,
    dry_run: Annotated[bool, Option("With --fix: only say what it would do.")] = False,
) -> None:
    """Changes nothing without --fix. Status 7 when something that mirrord needs is missing."""
    if dry_run and not fix:
        raise errors.UsageError("cannot read the command line: --dry-run goes with --fix")
    path = find_config(session)
    settings = config.load(path)
    repaired = repair(settings, path, dry_run=dry_run) if fix else []
    checks = examine(settings, path)
    found = [check._asdict() for check in checks]
    if session.json:
        done = [each._asdict() for each in repaired]
        session.print_json({"repairs": done, "checks": found} if fix else found)
    else:
        for line in (*_repaired(repaired), *_checked(checks)):
            print_line(line)
    is_left = any(each.state == "failed" for each in repaired)
    if is_left or any(check.verdict == "fail" for check in checks):
        raise SystemExit(errors.ResourceError.exit_status)


def _repaired(repaired: list[Repaired]) -> Iterator[str]:
    for each in repaired:
        detail = f": {each.detail}" if each.detail else ""
        yield f"{each.state.ljust(7)}  {printable(each.what)}{printable(detail)}"
    if repaired:
        yield ""


def _checked(checks: list[Check]) -> Iterator[str]:
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = check.verdict.ljust(4)
        if sys.stdout.isatty():
            verdict = f"\x1b[{_COLOURS[check.verdict]}m{verdict}\x1b[0m"
        yield f"{verdict}  {check.name.ljust(width)}  {check.fact}"
        if check.remedy:
            yield f"{' ' * (width + 8)}{check.remedy}"


def verify_seal(
    session: Session,
    path: Annotated[
        Path | None, Argument("A working tree or a .git directory, ours or not.", "[PATH]")
    ] = None,
    *,
    base: Annotated[str, Option("Base commit; anything newer is a leak.", "SHA")],
    mirror: Annotated[
        str | None, Option("A mirror, or a repository's path, that knows the history.", "NAME")
    ] = None,
    root: Annotated[
        Path | None,
        Option(
            "Judge everything in a directory, or in what `docker save` wrote; needs --mirror.",
            "DIR|IMAGE.tar",
        ),
    ] = None,
) -> None:
    """Status 8 when it leaks. Never uses the repository's own configuration or hooks."""
    if (path is None) == (root is None) or (root and mirror is None):
        fact = "it takes a PATH, or --root with --mirror"
        raise errors.UsageError(f"cannot read the command line: {fact}")
    base_commit = parse_commit(base)
    judged = path or root
    assert judged is not None
    if not judged.exists():
        raise errors.PathNotFoundError(f"cannot verify {judged}: no such path")
    if root and mirror:
        found = scan_root(root.absolute(), _mirror_path(session, mirror), base_commit)
        session.answer(found, _scanned(found))
        if not found.sealed:
            raise SystemExit(errors.IntegrityError.exit_status)
        return
    known_by = _mirror_of(judged.resolve()) if mirror is None else _mirror_path(session, mirror)
    report = verify(judged.absolute(), base_commit, known_by)
    session.answer(report, _judged(report))
    if not report.sealed:
        raise SystemExit(errors.IntegrityError.exit_status)


def _scanned(report: RootReport) -> Iterator[str]:
    for leak in report.leaks:
        covered = " (covered by a later layer)" if leak.hidden else ""
        yield f"{leak.kind}: {printable(leak.path)}: {printable(leak.detail)}{covered}"
    leaks = sum(not leak.hidden for leak in report.leaks)
    verdict = "sealed" if report.sealed else f"leaks ({count(leaks, 'leak')})"
    judged = f"{count(report.file_count, 'file')} of {size(report.size_bytes)}"
    stores = ", ".join(map(printable, report.repositories))
    yield f"{verdict}: {judged}, {f'repositories at {stores}' if stores else 'no repository'}"
    yield from (f"  note: {printable(note)}" for note in report.notes)


def _mirror_of(path: Path) -> Path | None:
    """The mirror of a squashed checkout of ours, which alone can judge it; else None.

    A lease is believed only where nobody but root or this user can have written it.
    """
    for directory in path.parents:
        layout = Layout(directory.parent.parent)
        if directory.parent != layout.checkouts:
            continue
        found = [above.stat() for above in (layout.leases, layout.root)]
        trusted = {0, os.geteuid()}
        if any(s.st_uid not in trusted or s.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for s in found):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads((layout.leases / directory.name / "lease.json").read_text())
            mirror = layout.mirrors / str(MirrorName.parse(facts["mirror"]))
            if facts["history"] == History.SQUASHED and os.access(mirror / "HEAD", os.R_OK):
                return mirror
        return None
    return None


def _mirror_path(session: Session, named: str) -> Path:
    if Path(named).is_dir():
        return Path(named).absolute()
    mirrors = config.load(find_config(session)).state_dir / "mirrors"
    key = MirrorName.parse(named).key
    hint = "give the repository's path"
    try:
        found = [entry for entry in mirrors.iterdir() if entry.name.lower() == key]
    except OSError as error:
        fact = f"cannot read the mirrors in {mirrors}: {error.strerror}"
        raise errors.MirrorNotFoundError(fact, hint=hint) from error
    if not found:
        raise errors.MirrorNotFoundError(f"cannot find mirror {named}: not in {mirrors}", hint=hint)
    return found[0]


def _judged(report: SealReport) -> Iterator[str]:
    for leak in report.leaks:
        yield f"{leak.kind}: {leak.detail}"
    verdict = "sealed" if report.sealed else f"leaks ({count(len(report.leaks), 'leak')})"
    closure = f"{report.objects_in_closure:,} in the closure of {report.base}"
    yield f"{verdict}: {count(report.objects_present, 'object')} present, {closure}"
    yield from (f"  checked {what}" for what in report.checked)


# -- mirrord as a service of this host's systemd ---------------------------------------------------

DryRun = Annotated[bool, Option("Print what it would do, and change nothing.")]


def install(session: Session, *, dry_run: DryRun = False) -> None:
    """Writes units, users, directories and a configuration where there is none, and starts them.

    The units start the environment that this mirrord is installed in. Done again after an upgrade
    of it, it writes the units of the new version and restarts the services.
    """
    if not dry_run:
        installer.refuse_host()
    _do(session, installer.plan_install(Path(sys.prefix)), dry_run=dry_run)


def uninstall(session: Session, *, dry_run: DryRun = False) -> None:
    """Keeps the configuration, the state directory and the environment, and says where they are."""
    if not dry_run:
        installer.refuse_host()
    _do(session, installer.plan_uninstall(Path(sys.prefix)), dry_run=dry_run)
    kept = [str(path) for path in (installer.CONFIG, installer.STATE) if path.exists()]
    if kept:
        session.note(f"kept: {', '.join(kept)}")


def _do(session: Session, steps: list[Step], *, dry_run: bool) -> None:
    for step in steps:
        if not session.json:
            print_line(step.what)
        if not dry_run:
            step.act()
    if session.json:
        session.print_json({"steps": [step.what for step in steps]})
