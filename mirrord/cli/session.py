"""The shared options of one call, and its ways to answer: text for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mirrord

from ..errors import MirrordError, UsageError
from ..model import printable

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
