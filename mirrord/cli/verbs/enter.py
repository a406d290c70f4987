"""`enter`: the namespaces of an ordinary user's daemon, for a command."""

import os
from pathlib import Path
from typing import Annotated

from ... import errors
from ...host.namespaces import home
from ..session import Argument, Session

_COMMAND_HELP = "The command, with or without -- before it; default: a shell."


def enter(
    session: Session,
    command: Annotated[list[str], Argument(_COMMAND_HELP, "[COMMAND]...", is_command=True)] = [],  # noqa: B006
) -> None:
    """The command sees the checkouts of this user's daemon at their paths, and everything that it
    starts does too: a harness needs no change. Its user and its rights stay as they are. The exit
    status is that of the command.
    """
    home.enter_existing(Path(session.client.status().state_dir))
    command = command or [os.environ.get("SHELL", "/bin/sh")]
    session.close()
    try:
        # without a shell: the words are the command's own
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        fact = f"cannot run {command[0]}: {error.strerror}"
        raise errors.UsageError(fact, hint="name a program that exists") from error
