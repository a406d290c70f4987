"""How the checks ask the host: small readers of /proc and of paths, and the shape of a verdict."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]
Result = tuple[Verdict, str, str]
"""A verdict, the fact behind it, and what to do about it where it is not well."""


def judge(well: bool, fact: str, remedy: str, *, otherwise: Verdict = "fail") -> Result:
    """A fact that is well needs no remedy."""
    return ("ok", fact, "") if well else (otherwise, fact, remedy)


def version(text: str) -> tuple[int, int]:
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def kernel_setting(name: str) -> int:
    return int((Path("/proc/sys") / name).read_text(encoding="ascii"))


def status_field(name: str) -> str:
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(rf"^{name}:\s*(\S+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"/proc/self/status has no {name}")
    return found[1]


def existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def entries(path: Path) -> Iterator[os.DirEntry[str]]:
    if path.is_dir():
        with os.scandir(path) as entries:
            yield from entries


def file_system_of(path: Path) -> str:
    """The type of the mount that `path` lies on: the last of the longest mount points above it."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    lines = (
        Path("/proc/self/mountinfo")
        .read_text(encoding="utf-8", errors="surrogateescape")
        .splitlines()
    )
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted]
    return kinds[-1] if kinds else "not known"
