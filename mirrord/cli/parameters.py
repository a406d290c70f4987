"""How verbs describe their parameters, and the parameters that several verbs share."""

import pwd
from datetime import timedelta
from typing import Annotated, NamedTuple

from ..errors import UsageError
from ..model import Backend, History, View, shown
from ..units import parse_duration


class Argument(NamedTuple):
    """A positional parameter; `metavar` is its name in capitals by default."""

    help: str
    metavar: str | None = None


class Option:
    """`--name` by default, after the parameter."""

    def __init__(self, *flags: str, help: str, metavar: str | None = None) -> None:  # noqa: A002
        self.flags = flags
        self.help = help
        self.metavar = metavar


MirrorArgument = Annotated[str, Argument(help="owner/name or owner__name, in any letter case.")]
NoWait = Annotated[bool, Option("--no-wait", help="Answer with the operation at once.")]
InstanceArgument = Annotated[
    str, Argument(metavar="INSTANCE", help="An instance id, or NAME@COMMITISH.")
]
HistoryOption = Annotated[
    History | None, Option(help="How much of the past it shows; default: as configured.")
]
ViewOption = Annotated[View, Option(help="For an agent, or for the grader of one.")]
BackendOption = Annotated[Backend | None, Option(help="How it is made; default: as configured.")]
OwnerOption = Annotated[
    str | None, Option(metavar="USER", help="The owner, by name or uid; default: you.")
]
_TTL_HELP = "How long it is held unless renewed, such as 90s, 30m or 2h; default: as configured."
Ttl = Annotated[str | None, Option(metavar="DURATION", help=_TTL_HELP)]


def read_duration(text: str | None, option: str) -> timedelta | None:
    """A duration such as 90s, 10m or 2h; None stays None, for the default."""
    if text is None:
        return None
    hint = f"write for example {option} 2h"
    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"cannot read {option}: {error}", hint=hint) from error
    if duration <= timedelta():
        fact = "it must be greater than zero"
        raise UsageError(f"cannot take {option} {text}: {fact}", hint=hint)
    return duration


def read_pid(text: str | None) -> int | None:
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    raise UsageError(f"cannot read --pid {shown(text)}: it is not a number")


def read_owner(text: str | None) -> int | None:
    """The uid of a user, named or numbered."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError as error:
        fact = "this host has no such user"
        raise UsageError(f"cannot find user {shown(text)}: {fact}", hint="give the uid") from error
