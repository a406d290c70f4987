"""What needs no daemon: `config …`, `doctor`, `verify-seal`, `completion`, the systemd service."""

import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import click
from click.shell_completion import get_completion_class

from ... import config, errors
from ...config import Settings, toml_lines
from ...doctor import Check, examine, installer, user_service
from ...doctor.repairs import Repaired, repair
from ...model import History, MirrorName, parse_commit
from ...places import Layout
from ...presence import exists, is_dir
from ...protocol import RootReport, SealReport
from ...quoting import legible, quote_name
from ...seal.scan import scan_root
from ...seal.verify import verify_seal as verify_repository
from ...telemetry import masked
from ..output import count, facts, size, styled
from ..session import Argument, Option, Session, print_line

_POLL_S = 0.1  # while a daemon starts; nothing tells that its socket will exist
_LAST_WORDS_BYTES = 4096


def _log_path(session: Session) -> Path:
    return Layout(config.load(session.config_path).state_dir).detached_log


def detach(session: Session) -> bool:
    """Go on in a process without terminal, which logs to a file: false there.

    True in this one, when that process serves. Exits with its status if it ended before.
    """
    if pid := _fork(session):
        _wait_for_child(session, pid)
    return bool(pid)


def _fork(session: Session) -> int:
    with suppress(errors.NoDaemonError):
        session.client.health()
        fact = f"cannot start a daemon: one answers at {session.client.socket}"
        raise errors.ConflictError(fact, hint="stop it, or name another socket and state_dir")
    path = _log_path(session)
    Layout(path.parent).make_root()
    # O_APPEND: the daemon and its children write to one end, not over each other
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    if pid := os.fork():
        os.close(log)
        return pid
    # else the end of the terminal would end the daemon, too (SIGHUP)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, file in enumerate((nothing, log, log)):
        os.dup2(file, fd)
    return 0


def _wait_for_child(session: Session, pid: int) -> None:
    """Return when the daemon answers, with its exit status and last words if it ends before."""
    path = _log_path(session)
    start = path.stat().st_size
    while True:
        with suppress(errors.NoDaemonError):
            session.client.health()
            break
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with path.open("rb") as log:
                log.seek(start)
                session.note(log.read(_LAST_WORDS_BYTES).decode(errors="replace").rstrip())
            raise SystemExit(os.waitstatus_to_exitcode(status))
        time.sleep(_POLL_S)
    answer = {"pid": pid, "socket": str(session.client.socket), "log": str(path)}
    session.answer(answer, facts(answer.items()))


def config_check(
    session: Session,
    file: Annotated[
        Path | None, Argument("File to check; default: the one in use.", "[FILE]")
    ] = None,
) -> None:
    """Reports all faults at once, each with its key and line."""
    path = file or session.config_path
    settings = config.load(path)
    text = f"{path}: no faults" if path else "no configuration file: the defaults are in use"
    session.answer(_without_secrets(settings), [text])


def config_show(session: Session) -> None:
    """Prints the daemon's settings, or those of the file if no daemon answers; stderr says which.

    The output is TOML, with --json an object. Secrets in URLs are masked.
    """
    named = Path(session.config) if session.config else None
    running, reason = None, "the daemon has another file"
    try:
        running = session.client.configuration()
    except (errors.NoDaemonError, errors.InvalidConfigError):  # config.load reports an invalid file
        reason = "no daemon answers"
    except errors.AccessError:
        reason = "only administrators see the daemon's settings"
    if running and (named is None or running.path == str(named.absolute())):
        values = running.settings
        source = f"in effect; read from {running.path or 'no file: the defaults'}"
    else:
        path = session.config_path
        values = _without_secrets(config.load(path))
        source = f"{reason}; read from {path or 'no file: the defaults'}"
    session.answer(values, toml_lines(values))
    session.note(source)


def _without_secrets(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(masked(settings.model_dump_json()))
    return values


def doctor(
    session: Session,
    *,
    fix: Annotated[bool, Option("Repair what needs no decision, then check again.")] = False,
    dry_run: Annotated[bool, Option("With --fix: print the repairs, and change nothing.")] = False,
    report: Annotated[
        Path | None, Option("Write diagnostics for a bug report into this tar.gz.", "FILE")
    ] = None,
) -> None:
    """Needs no daemon, and changes nothing without --fix. Status 7 if a check or a repair fails.

    A --report has the checks, settings, status, activity, events, operations, metrics, the journal
    of the units, mounts and sizes, but no patches, rows, commit ids, contents, passwords or tokens.
    Missing parts are listed, for example without a daemon. The file has mode 0600.
    """
    if dry_run and not fix:
        raise errors.UsageError("cannot use --dry-run without --fix")
    if report:
        from ..support import write_report  # noqa: PLC0415 - checks need none of it

        if fix:
            raise errors.UsageError("cannot use --fix with --report")
        write_report(session, report)
        return
    path = session.config_path
    settings = config.load(path)
    repaired = repair(settings, path, dry_run=dry_run) if fix else []
    checks = examine(settings, path)
    results = [check._asdict() for check in checks]
    if session.json:
        done = [step._asdict() for step in repaired]
        session.print_json({"repairs": done, "checks": results} if fix else results)
    else:
        for line in (*_repair_lines(repaired), *_check_lines(checks)):
            print_line(line)
    has_failed = any(step.state == "failed" for step in repaired)
    if has_failed or any(check.verdict == "fail" for check in checks):
        raise SystemExit(errors.ResourceError.exit_status)


def _repair_lines(repaired: list[Repaired]) -> Iterator[str]:
    for step in repaired:
        detail = f": {step.detail}" if step.detail else ""
        yield f"{step.state.ljust(7)}  {legible(step.what)}{legible(detail)}"
    if repaired:
        yield ""


_COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


def _check_lines(checks: list[Check]) -> Iterator[str]:
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = styled(check.verdict.ljust(4), _COLOURS[check.verdict])
        yield f"{verdict}  {check.name.ljust(width)}  {check.fact}"
        if check.remedy:
            yield f"{' ' * (width + 8)}{check.remedy}"
    warned, failed = (sum(check.verdict == kind for check in checks) for kind in ("warn", "fail"))
    well = len(checks) - warned - failed
    yield ""
    faults = f"{count(warned, 'warning')}, {count(failed, 'failure')}"
    yield f"{well} ok, {faults}; place: {checks[0].fact}"


def verify_seal(
    session: Session,
    path: Annotated[Path | None, Argument("Any working tree or .git directory.", "[PATH]")] = None,
    *,
    base: Annotated[str, Option("Base commit; anything newer is a leak.", "SHA")],
    mirror: Annotated[
        str | None, Option("Mirror, or path of a repository, that has the history.", "NAME")
    ] = None,
    root: Annotated[
        Path | None,
        Option(
            "Check a directory, or an image of `docker save`, for the history; needs --mirror.",
            "DIR|IMAGE.tar",
        ),
    ] = None,
) -> None:
    """Never uses the repository's own configuration or hooks. Status 8 if it leaks."""
    if (path is None) == (root is None) or (root and mirror is None):
        hint = "give a PATH, or --root with --mirror"
        raise errors.UsageError("cannot tell what to verify", hint=hint)
    base_commit = parse_commit(base)
    target = path or root
    assert target is not None
    if not exists(target):
        raise errors.PathNotFoundError(
            f"cannot verify {target}: no such path", hint="name a repository or a checkout"
        )
    known_by = _mirror_path(session, mirror) if mirror else _mirror_of(target.resolve())
    report: SealReport | RootReport
    if root and known_by:
        report = scan_root(root.absolute(), known_by, base_commit)
        session.answer(report, _scan_lines(report))
    else:
        report = verify_repository(target.absolute(), base_commit, known_by)
        session.answer(report, _seal_lines(report))
    if not report.sealed:
        raise SystemExit(errors.IntegrityError.exit_status)


def _scan_lines(report: RootReport) -> Iterator[str]:
    for leak in report.leaks:
        covered = " (covered by a later layer)" if leak.hidden else ""
        yield f"{leak.kind}: {quote_name(leak.path)}: {legible(leak.detail)}{covered}"
    leaks = sum(not leak.hidden for leak in report.leaks)
    verdict = "sealed" if report.sealed else f"leaks ({count(leaks, 'leak')})"
    scanned = f"{count(report.file_count, 'file')} of {size(report.size_bytes)}"
    paths = ", ".join(map(quote_name, report.repositories))
    yield f"{verdict}: {scanned}, {f'repositories at {paths}' if paths else 'no repository'}"
    yield from (f"  note: {legible(note)}" for note in report.notes)


def _mirror_of(path: Path) -> Path | None:
    """Return the mirror of a squashed checkout, which its seal is compared with; else None.

    Leases that others than root and this user could have written are ignored.
    """
    for directory in path.parents:
        layout = Layout(directory.parent.parent)
        if directory.parent != layout.checkouts:
            continue
        owners, writable = {0, os.geteuid()}, stat.S_IWGRP | stat.S_IWOTH
        stats = [path.stat() for path in (layout.leases, layout.root)]
        if any(st.st_uid not in owners or st.st_mode & writable for st in stats):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            lease = json.loads((layout.leases / directory.name / "lease.json").read_text())
            mirror = layout.mirrors / str(MirrorName.parse(lease["mirror"]))
            if lease["history"] == History.SQUASHED and os.access(mirror / "HEAD", os.R_OK):
                return mirror
        return None
    return None


def _mirror_path(session: Session, named: str) -> Path:
    if is_dir(named):
        return Path(named).absolute()
    mirrors = config.load(session.config_path).state_dir / "mirrors"
    key = MirrorName.parse(named).key
    hint = "give the path of a repository"
    try:
        matches = [entry for entry in mirrors.iterdir() if entry.name.lower() == key]
    except OSError as error:
        fact = f"cannot read the mirrors in {mirrors}: {error.strerror}"
        raise errors.MirrorNotFoundError(fact, hint=hint) from error
    if not matches:
        raise errors.MirrorNotFoundError(f"cannot find mirror {named}: not in {mirrors}", hint=hint)
    return matches[0]


def _seal_lines(report: SealReport) -> Iterator[str]:
    for leak in report.leaks:
        yield f"{leak.kind}: {leak.detail}"
    verdict = "sealed" if report.sealed else f"leaks ({count(len(report.leaks), 'leak')})"
    closure = f"{report.objects_in_closure:,} in the closure of {report.base}"
    yield f"{verdict}: {count(report.objects_present, 'object')} present, {closure}"
    yield from (f"  checked {fact}" for fact in report.checked)


# -- the systemd service ---------------------------------------------------------------------------


DryRun = Annotated[bool, Option("Print the steps, and change nothing.")]
OfUser = Annotated[bool, Option("One unit of this user's systemd, without root.")]


def install(session: Session, *, user: OfUser = False, dry_run: DryRun = False) -> None:
    """The units start the Python environment that this mirrord is installed in. A missing
    configuration is written too. Run it again after an upgrade: it writes the units of the new
    version and restarts the services. With --user it is an ordinary user's daemon.
    """
    _change_service(session, is_wanted=True, of_user=user, dry_run=dry_run)


def uninstall(session: Session, *, user: OfUser = False, dry_run: DryRun = False) -> None:
    """Keeps configuration, state directory and Python environment, and prints where they are."""
    _change_service(session, is_wanted=False, of_user=user, dry_run=dry_run)


def _change_service(session: Session, *, is_wanted: bool, of_user: bool, dry_run: bool) -> None:
    if not dry_run:
        (user_service.refuse_user if of_user else installer.refuse_host)()
    environment = Path(sys.prefix)
    if of_user:
        steps = (
            user_service.plan_install(environment) if is_wanted else user_service.plan_uninstall()
        )
    else:
        plan = installer.plan_install if is_wanted else installer.plan_uninstall
        steps = plan(environment)
    for step in steps:
        if not session.json:
            print_line(step.what)
        if not dry_run:
            step.act()
    if session.json:
        session.print_json({"steps": [step.what for step in steps]})
    if of_user and is_wanted:
        session.note(user_service.linger_hint())
    kept = [str(path) for path in (installer.CONFIG, installer.STATE) if exists(path)]
    if kept and not (of_user or is_wanted):
        session.note(f"kept: {', '.join(kept)}")


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    session: Session, shell: Annotated[Shell, Argument("Your shell.", "bash|zsh|fish")]
) -> None:
    """It completes verbs, options, and the names that the daemon knows."""
    root = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(root, {}, "mirrord", "_MIRRORD_COMPLETE")
    text = made.source_template % made.source_vars()
    session.answer({"shell": shell, "script": text}, [text])
