"""One call of the command line, from arguments to exit status. Every failure of any verb ends here."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import typer
from typer.exceptions import TyperException

from ..errors import MirrordError
from .commands import build
from .session import Session

_INTERRUPTED = 128 + signal.SIGINT


def main(args: Sequence[str] | None = None) -> None:
    """The console script: run, and exit with the status of the table in `mirrord --help`'s verbs."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run one verb; answers its exit status."""
    session = Session()
    _stand_where_the_shell_is()
    try:
        status = build().main(args, prog_name="mirrord", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_gone()
    except TyperException as error:
        return _misused(error)
    except MirrordError as error:
        session.fail(error)
        _show_traceback(session)
        return error.exit_status
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001
        return _bug(session, error)
    return status if isinstance(status, int) else 0


def _stand_where_the_shell_is() -> None:
    """A reset puts another directory in the place of a checkout's tree: whoever stood in it stands in none, until `cd .`."""
    try:
        os.getcwd()
    except FileNotFoundError:
        with suppress(OSError):
            os.chdir(os.environ.get("PWD", "/"))


def _misused(error: TyperException) -> int:
    show = getattr(error, "show", None)
    if show is not None:
        show()
    return error.exit_code


def _reader_gone() -> int:
    """`mirrord … | head`: what could still be flushed at exit has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _bug(session: Session, error: Exception) -> int:
    print(f"mirrord: a bug: {type(error).__name__}: {error}", file=sys.stderr)
    if not session.debug:
        print("hint: report it with what --debug shows", file=sys.stderr)
    _show_traceback(session)
    return 1


def _show_traceback(session: Session) -> None:
    if session.debug:
        traceback.print_exc(file=sys.stderr)
