"""`mirrord doctor`: in this process, with no daemon."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from .. import config, places
from ..doctor import Check, examine
from .session import Session, print_line

_RESOURCE = 7
_COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


def doctor(session: Session) -> None:
    """Changes nothing. Status 7 when something that mirrord needs is missing."""
    checks = examine(config.load(session.config_path() or places.find_path()))
    if session.json:
        print_line(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        for line in _lines(checks):
            print_line(line)
    if any(check.verdict == "fail" for check in checks):
        raise SystemExit(_RESOURCE)


def _lines(checks: list[Check]) -> Iterator[str]:
    width = max(len(check.name) for check in checks)
    for check in checks:
        yield f"{_coloured(check.verdict)}  {check.name.ljust(width)}  {check.fact}"
        if check.remedy:
            yield f"{' ' * (width + 8)}{check.remedy}"


def _coloured(verdict: str) -> str:
    text = verdict.ljust(4)
    return f"\x1b[{_COLOURS[verdict]}m{text}\x1b[0m" if sys.stdout.isatty() else text
