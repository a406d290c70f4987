"""The shared options of one call, and its ways to answer: text for people, JSON for programs."""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import mirrord

from ..errors import MirrordError, UsageError
from ..model import Backend, History, View, printable, shown
from ..units import parse_duration

if TYPE_CHECKING:
    from ..protocol import AddReport, Message

T = TypeVar("T")


@dataclass
class Session:
    """One per process; each verb gets it first."""

    json: bool = False
    config: str | None = None
    socket: str | None = None
    debug: bool = False

    @cached_property
    def client(self) -> mirrord.Client:
        """A client of the named daemon, which `close` closes. Loads the client's libraries."""
        return mirrord.Client(self.socket, config=self.config)

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()

    def answer(
        self, answer: Message | Sequence[Message] | dict[str, Any] | None, shown: Iterable[str]
    ) -> None:
        """Print an answer: the API's JSON with --json, else the lines for people."""
        if self.json:
            self.print_json(plain(answer))
            return
        for line in shown:
            print_line(line)

    def print_json(self, value: Any) -> None:
        print_line(json.dumps(value, indent=2, ensure_ascii=False))

    def note(self, text: str) -> None:
        """Print something that is not the answer, to stderr."""
        if not self.json:
            print(text, file=sys.stderr)

    def report(self, report: AddReport) -> None:
        """Send a report for the daemon's page. One that is not taken fails nothing else."""
        if not report.results:
            return
        # names of files and words of the command line may be longer than ids, or no text
        named = {n: step for n, step in report.faults.items() if len(n) <= 500 and n.isprintable()}
        report = replace(report, faults=named)
        try:
            self.client.add_report(report)
        except MirrordError as error:
            self.note(f"this run is not on the page: {error.message}")

    def fail(self, error: MirrordError) -> None:
        """Print an error and its hint."""
        if self.json:
            print(json.dumps(error.problem(), ensure_ascii=False, default=str), file=sys.stderr)
            return
        for line in f"mirrord: {error.message}".splitlines():
            print(printable(line), file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)

    def each(self, items: Iterable[T], work: Callable[[T], None]) -> None:
        """Work on all items although some fail; then exit with the status of the first failure."""
        status = 0
        for item in items:
            try:
                work(item)
            except MirrordError as error:
                self.fail(error)
                status = status or error.exit_status
        if status:
            raise SystemExit(status)


def plain(answer: Any) -> Any:
    """Messages as the JSON values that the API sends."""
    if isinstance(answer, Sequence):
        return [plain(item) for item in answer]
    return answer if answer is None or isinstance(answer, dict) else answer.to_json()


def print_line(text: str) -> None:
    """One line of the answer. Names in git need not be UTF-8: their bytes go out unchanged."""
    sys.stdout.buffer.write(os.fsencode(text) + b"\n")
    sys.stdout.buffer.flush()


def read_file(path: str) -> bytes:
    """A file named on the command line; `-` is standard input."""
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        hint = "name a file that you may read, or - for standard input"
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from error


class Argument(NamedTuple):
    """A positional parameter; `metavar` is its name in capitals by default."""

    help: str
    metavar: str | None = None


class Option(NamedTuple):
    """`flags` are `--name` by default, after the parameter."""

    help: str
    metavar: str | None = None
    flags: str = ""


MirrorArgument = Annotated[str, Argument("owner/name or owner__name, in any letter case.")]
NoWait = Annotated[bool, Option("Answer with the operation at once.")]
InstanceArgument = Annotated[str, Argument("An instance id, or NAME@COMMITISH.", "INSTANCE")]
HistoryOption = Annotated[
    History | None, Option("How much of the past it shows; default: as configured.")
]
ViewOption = Annotated[View, Option("For an agent, or for the grader of one.")]
BackendOption = Annotated[Backend | None, Option("How it is made; default: as configured.")]
OwnerOption = Annotated[str | None, Option("The owner, by name or uid; default: you.", "USER")]
_TTL_HELP = "How long it is held unless renewed, such as 90s, 30m or 2h; default: as configured."
Ttl = Annotated[str | None, Option(_TTL_HELP, "DURATION")]


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


def read_jobs(text: str, option: str) -> int:
    """How many of something at a time, from 1 to 256."""
    if not text.isdecimal() or not 0 < int(text) <= 256:
        raise UsageError(f"cannot read {option} {text}", hint="give a number from 1 to 256")
    return int(text)


def read_pid(text: str | None) -> int | None:
    if text is None or text.isdecimal():
        return int(text) if text else None
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
