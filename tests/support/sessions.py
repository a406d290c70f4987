"""The commands that the documents show, and a shell that runs them one by one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from waiting import BOUND_S

PROJECT = Path(__file__).parents[2]
BASES = ("6366d3dd190a9e58ca582955cddf7e2ac5f32dcc", "147c8511ddbfa5e8f71bbf5c18ede0c4ceb3bba4")
"""Commits in the documents; the tests replace them by those of their upstream."""

_END = "-- end of command --"


def section(document: str, heading: str) -> str:
    """The text below a heading of the second level."""
    text = (PROJECT / document).read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def blocks(document: str, language: str) -> list[str]:
    text = (PROJECT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def session(block: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a `console` block and their output; a here-document is part of its command."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        first, _, rest = part.partition("\n")
        if here := re.search(r"<<'(\w+)'$", first):
            body, _, rest = rest.partition(f"{here[1]}\n")
            first = f"{first}\n{body}{here[1]}"
        yield first, rest


def localized(text: str, bases: Sequence[str]) -> str:
    """A document's text with the commits of our upstream."""
    for theirs, ours in zip(BASES, bases, strict=True):
        text = text.replace(theirs, ours).replace(theirs[:7], ours[:7])
    return text


class Ran(NamedTuple):
    command: str
    status: int
    printed: str


class Shell:
    """One bash that keeps its directory and variables between commands."""

    def __init__(
        self,
        command: Sequence[str] = ("bash",),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._bash = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            text=True,
        )

    def try_run(self, command: str) -> Ran:
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{command}\nended=$?; echo; echo '{_END}' $ended\n")
        self._bash.stdin.flush()
        printed: list[str] = []
        while not (line := self._bash.stdout.readline()).startswith(_END):
            assert line, f"the shell ended in {command!r}: {printed}"
            printed.append(line)
        return Ran(command, int(line.split()[-1]), "".join(printed).removesuffix("\n"))

    def run(self, command: str) -> str:
        """What a command printed; its status must be 0."""
        ran = self.try_run(command)
        assert ran.status == 0, f"{command!r} failed: {ran.printed}"
        return ran.printed

    def close(self) -> None:
        self._bash.communicate(timeout=BOUND_S)
