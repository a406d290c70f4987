"""One call of the command line, from arguments to exit status. Every failure of any verb ends here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from ..errors import InternalError, MirrordError, UsageError
from .commands import build
from .session import Session

_INTERRUPTED = 128 + signal.SIGINT


def main(args: Sequence[str] | None = None) -> None:
    """The console script: run, and exit with the status of the table in `mirrord --help`'s verbs."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run one verb; answers its exit status."""
    session = Session()
    words = sys.argv[1:] if args is None else args
    _stand_where_the_shell_is()
    try:
        root = build()
        if "_MIRRORD_COMPLETE" in os.environ:
            root.main(prog_name="mirrord")  # answers the shell, and exits
        with root.make_context("mirrord", list(words), obj=session) as context:
            root.invoke(context)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_gone()
    except click.ClickException as error:
        return _misused(session, words, error)
    except MirrordError as error:
        session.fail(error)
        _show_traceback(session)
        return error.exit_status
    except KeyboardInterrupt:
        return _INTERRUPTED
    except click.exceptions.Exit as end:  # --help, --version
        return end.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except Exception as error:  # noqa: BLE001
        return _bug(session, error)
    return 0


def _stand_where_the_shell_is() -> None:
    """A reset puts another directory in the place of a checkout's tree: whoever stood in it stands in none, until `cd .`."""
    try:
        os.getcwd()
    except FileNotFoundError:
        with suppress(OSError):
            os.chdir(os.environ.get("PWD", "/"))


def _misused(session: Session, words: Sequence[str], error: click.ClickException) -> int:
    """What could not be parsed may have stood before `--json`; what is behind `--` is not ours."""
    session.json |= "--json" in words[: words.index("--") if "--" in words else None]
    if session.json:
        session.fail(_misuse(error))
    else:
        error.show()
    return error.exit_code


def _misuse(error: click.ClickException) -> UsageError:
    """Without a verb there is no sentence but the whole help."""
    said = error.format_message()
    fact = "a verb is missing" if "\n" in said else said.rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "mirrord"
    return UsageError(
        f"cannot read the command line: {fact}", hint=f"`{command} --help` says what there is"
    )


def _reader_gone() -> int:
    """`mirrord … | head`: what could still be flushed at exit has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _bug(session: Session, error: Exception) -> int:
    hint = None if session.debug else "report it with what --debug shows"
    session.fail(InternalError(f"a bug: {type(error).__name__}: {error}", hint=hint))
    _show_traceback(session)
    return InternalError.exit_status


def _show_traceback(session: Session) -> None:
    if session.debug:
        sys.excepthook(*sys.exc_info())
