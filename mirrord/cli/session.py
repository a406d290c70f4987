"""The shared options of an invocation, its output as text or JSON, and parameters of many verbs."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import click

import mirrord

from ..errors import MirrordError, UsageError
from ..jsontext import dumps
from ..model import Backend, History, View, shown
from ..places import find_config_path
from ..quoting import legible
from ..units import parse_duration

if TYPE_CHECKING:
    from ..protocol import AddReport, Message

T = TypeVar("T")


@dataclass
class Session:
    """The shared options and the client of one invocation; every verb's first argument."""

    json: bool = False
    quiet: bool = False
    config: str | None = None
    socket: str | None = None
    debug: bool = False
    erase: str = ""  # what is drawn on stderr, before anything else is written there
    # the error with a better hint; `main` knows the words of this invocation
    advise: Callable[[MirrordError], MirrordError] | None = None

    @cached_property
    def client(self) -> mirrord.Client:
        """The client of the chosen daemon, made on first use."""
        return mirrord.Client(self.socket, config=self.config)

    @property
    def config_path(self) -> Path | None:
        """The configuration file of --config, else the default one if it exists."""
        return Path(self.config) if self.config else find_config_path()

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()

    def answer(
        self, answer: Message | Sequence[Message] | dict[str, Any] | None, lines: Iterable[str]
    ) -> None:
        """Print the answer as the API's JSON with --json, else as lines of text."""
        if self.json:
            self.print_json(answer)
            return
        if sys.stdout.isatty():
            lines = list(lines)
            if sum(line.count("\n") + 1 for line in lines) > shutil.get_terminal_size().lines:
                # in $PAGER, else less, as git does; a terminal's colours are shown
                click.echo_via_pager("".join(f"{line}\n" for line in lines), color=True)
                return
        for line in lines:
            print_line(line)

    def print_json(self, value: Any) -> None:
        print_line(as_json(value, indent=2))

    def note(self, text: str) -> None:
        """Print a remark to stderr, but not with --json or --quiet."""
        if not (self.json or self.quiet):
            self._print_safely(text)

    def report(self, report: AddReport) -> None:
        """Send a report for the daemon's page; a refused one is only noted."""
        if not report.results:
            return
        # instances named in files or arguments may be longer than ids, or not printable
        faults = {n: step for n, step in report.faults.items() if len(n) <= 500 and n.isprintable()}
        report = replace(report, faults=faults)
        try:
            self.client.add_report(report)
        except MirrordError as error:
            self.note(f"cannot show this run on the web page: {error.message}")

    def fail(self, error: MirrordError) -> None:
        error = self.advise(error) if self.advise else error
        if self.json:
            print(dumps(error.problem(), default=str), file=sys.stderr)
            return
        self._print_safely(f"mirrord: {error.message}")
        if error.hint:
            self._print_safely(f"hint: {error.hint}")

    def _print_safely(self, text: str) -> None:
        """Print lines to stderr, with control characters of names and rows escaped."""
        for line in text.splitlines():
            print(f"{self.erase}{legible(line)}", file=sys.stderr)

    def each(self, items: Iterable[T], work: Callable[[T], None]) -> None:
        """Call `work` for all items; exit with the status of the first failure, if any."""
        status = 0
        for item in items:
            try:
                work(item)
            except MirrordError as error:
                self.fail(error)
                status = status or error.exit_status
        if status:
            raise SystemExit(status)


def as_json(value: Any, indent: int | None = None) -> str:
    """Return JSON; messages in it are as the API sends them."""
    return dumps(value, indent=indent, default=methodcaller("to_json"))


def print_line(text: str) -> None:
    """Print a line of the answer. Names in git need not be UTF-8: bytes are printed unchanged."""
    sys.stdout.buffer.write(os.fsencode(text) + b"\n")
    sys.stdout.buffer.flush()


def read_file(path: str) -> bytes:
    """Return the content of a file named on the command line; `-` is standard input."""
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        hint = "name a readable file, or - for standard input"
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from error


class Argument(NamedTuple):
    """A positional parameter; by default `metavar` is its name in capitals.

    Shells complete `names`, a kind of `completion`. A command takes all words that are left.
    """

    help: str
    metavar: str | None = None
    names: str = ""
    is_command: bool = False


class Option(NamedTuple):
    """An option; by default `flags` is `--` and the parameter's name. `names` as for arguments."""

    help: str
    metavar: str | None = None
    flags: str = ""
    names: str = ""


_MIRROR_HELP = "owner/name or owner__name, in any letter case."
MirrorArgument = Annotated[str, Argument(_MIRROR_HELP, "NAME", "mirror")]
NoWait = Annotated[bool, Option("Print the operation instead of waiting for it.")]
_INSTANCE_HELP = "An instance id, or NAME@COMMITISH."
InstanceArgument = Annotated[str, Argument(_INSTANCE_HELP, "INSTANCE", "instance")]
HistoryOption = Annotated[
    History | None, Option("How much of the past to show; default: as configured.")
]
ViewOption = Annotated[View, Option("For an agent or for a grader.")]
BackendOption = Annotated[Backend | None, Option("How to make the tree; default: as configured.")]
OwnerOption = Annotated[str | None, Option("Owner, by name or uid; default: you.", "USER")]
_PARSERS_HELP = "A file of Python with parsers of logs, such as SWE-rebench V2's (with --run)."
ParsersOption = Annotated[Path | None, Option(_PARSERS_HELP, "FILE")]
_TTL_HELP = "Length of the lease, such as 90s, 30m or 2h; default: as configured."
Ttl = Annotated[str | None, Option(_TTL_HELP, "DURATION")]


def read_duration(text: str | None, option: str) -> timedelta | None:
    """Parse a duration such as 90s, 10m or 2h; None stays None, for the default."""
    if text is None:
        return None
    hint = f"for example {option} 2h"
    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"cannot read {option}: {error}", hint=hint) from error
    if duration <= timedelta():
        fact = "it must be greater than zero"
        raise UsageError(f"cannot take {option} {text}: {fact}", hint=hint)
    return duration


def read_jobs(text: str, option: str = "--jobs") -> int:
    """Parse --jobs, or another option that is a number of 1 to 256."""
    if not text.isdecimal() or not 0 < int(text) <= 256:
        raise UsageError(f"cannot read {option} {text}", hint="give a number from 1 to 256")
    return int(text)


def read_pid(text: str | None) -> int | None:
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    raise UsageError(f"cannot read --pid {shown(text)}: it is not a number")


def read_owner(text: str | None) -> int | None:
    """Return the uid of a user, given by name or uid."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError as error:
        fact = "this host has no such user"
        raise UsageError(f"cannot find user {shown(text)}: {fact}", hint="give the uid") from error
