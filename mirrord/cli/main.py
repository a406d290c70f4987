"""One invocation of the command line, from arguments to exit status.

Every failure ends in `run`.
"""

import errno
import gc
import os
import signal
import stat
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from ..errors import InternalError, MirrordError, NotFoundError, UsageError, host_error
from ..model import shown
from .commands import build
from .session import Session


def main(args: Sequence[str] | None = None) -> None:
    """Run a verb and exit with its status: the console script."""
    status = run(args)
    gc.freeze()  # what the last collections would look through is 8 % of `mirrord exec`
    sys.exit(status)


def run(args: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit status."""
    session = Session()
    # such as of a sandbox that is weaker: a remark for people, without the line that warns
    warnings.showwarning = lambda message, *_: session.note(f"mirrord: {message}")
    arguments = sys.argv[1:] if args is None else args
    session.advise = partial(_with_suggestion, session, arguments)
    try:
        os.getcwd()
    except FileNotFoundError:  # a reset replaced the current directory: enter the new one
        with suppress(OSError):
            os.chdir(os.environ.get("PWD", "/"))
    try:
        root = build()
        # set by the script that `mirrord completion` prints
        if "_MIRRORD_COMPLETE" in os.environ:
            root.main(prog_name="mirrord", obj=session)  # prints completions and exits
        with root.make_context("mirrord", list(arguments), obj=session) as context:
            root.invoke(context)
        # not only at exit: there a full disk or a closed pipe would end with 120
        sys.stdout.flush()
    except BrokenPipeError:  # `mirrord … | head`
        _flush_or_drop()
        # as a shell says it of a process that this signal ended
        return 128 + signal.SIGPIPE
    except click.ClickException as error:
        # click may have failed before it reached --json; what follows -- is another command's.
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        session.json |= "--json" in own
        if isinstance(error, click.exceptions.NoArgsIsHelpError) and not session.json:
            error.show()
        else:
            session.fail(_usage_error(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except click.exceptions.Exit as end:  # --help, --version
        return end.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    # whatever it is: one line with a hint and an exit status, no traceback that nobody asked for
    except Exception as error:  # noqa: BLE001
        hint = None if session.debug else "report it with the output of --debug"
        bug = InternalError(f"a bug: {type(error).__name__}: {error}", hint=hint)
        failure = error if isinstance(error, MirrordError) else _fault_of_path(error) or bug
        session.fail(failure)
        _flush_or_drop()
        if session.debug:
            sys.excepthook(*sys.exc_info())
        return failure.exit_status
    finally:
        session.close()
    return 0


def _with_suggestion(
    session: Session, arguments: Sequence[str], error: MirrordError
) -> MirrordError:
    if not isinstance(error, NotFoundError):
        return error
    from .suggestions import with_suggestion  # noqa: PLC0415 - only a failure asks

    return with_suggestion(session, error, arguments)


def _flush_or_drop() -> None:
    """Drop output that cannot be written: Python's flush at exit would end with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# faults of a path that the user named, not of mirrord or the disk
_PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}


def _fault_of_path(error: Exception) -> MirrordError | None:
    """Return our error for a path that the user may not use, or a full disk; None for others."""
    if not isinstance(error, OSError):
        return None
    if error.errno in _PATH_ERRORS and error.filename is not None:
        fact = f"cannot use {os.fsdecode(error.filename)}: {error.strerror}"
        hint = "name a path that this user may use"
        if _is_closed(os.fsdecode(error.filename)):
            hint = "it is mounted in the daemon's own namespaces: run this by `mirrord enter -- …`"
        return UsageError(fact, hint=hint)
    return host_error(error, "write")


def _is_closed(path: str) -> bool:
    """Return whether a path is below the tree of an overlay that only a user's home shows."""
    for directory in Path(path).absolute().parents:
        with suppress(OSError):
            if stat.S_IMODE(directory.lstat().st_mode) == 0:
                return directory.name == "tree"
    return False


def _usage_error(error: click.ClickException) -> UsageError:
    text = error.format_message()
    # without a verb, click's message is the whole help text
    fact = "a verb is missing" if "\n" in text else text.rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "mirrord"
    hint = f"see `{command} --help`"
    if isinstance(error, click.exceptions.NoSuchCommand):
        fact = f"{command} has no verb {shown(error.command_name)}"
        from .suggestions import find_verbs  # noqa: PLC0415 - only a failure asks

        if verbs := find_verbs(command.partition(" ")[2], error.command_name):
            hint = f"did you mean {' or '.join(f'`mirrord {verb}`' for verb in verbs)}?"
    return UsageError(f"cannot read the command line: {fact}", hint=hint)
