"""Durations as they are typed: 90s, 10m, 2h, the spelling of the configuration."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from ..errors import UsageError
from ..units import parse_duration
from .parameters import Option

Ttl = Annotated[
    str | None,
    Option(
        "--ttl",
        help="How long it is held unless renewed, such as 90s, 30m or 2h; default: as configured.",
    ),
]


def read_duration(text: str | None, option: str) -> timedelta | None:
    """None stays None, for the default."""
    if text is None:
        return None
    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise UsageError(
            f"cannot read {option}: {error}", hint=f"write for example {option} 2h"
        ) from error
    if duration <= timedelta():
        raise UsageError(
            f"cannot take {option} {text}: it must be greater than zero",
            hint=f"write for example {option} 2h",
        )
    return duration
