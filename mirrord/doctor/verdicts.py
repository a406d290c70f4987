"""What a check answers, and what most checks need."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]
Result = tuple[Verdict, str, str]
"""A verdict, the fact behind it, and a remedy unless it is ok."""


def judge(well: bool, fact: str, remedy: str, *, otherwise: Verdict = "fail") -> Result:
    return ("ok", fact, "") if well else (otherwise, fact, remedy)


def existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def entries(path: Path) -> Iterator[os.DirEntry[str]]:
    if path.is_dir():
        with os.scandir(path) as found:
            yield from found
