"""Verbs that run in this process, without a daemon: `config …`, `doctor`, `verify-seal`."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .. import config, errors, places
from ..doctor import Check, examine
from ..model import History, MirrorName, parse_commit
from ..places import Layout
from ..seal.verify import verify_seal as verify
from ..telemetry import masked
from .output import count
from .parameters import Argument, Option
from .session import Session, print_line

if TYPE_CHECKING:
    from ..config import Settings
    from ..protocol import SealReport

_COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


def config_check(
    session: Session,
    file: Annotated[
        Path | None, Argument(metavar="[FILE]", help="Default: the one in use.")
    ] = None,
) -> None:
    """Reports every fault at once, each with its key and line."""
    path = file or _config_path(session)
    settings = config.load(path)
    text = f"{path}: no faults" if path else "no configuration file: the defaults are in use"
    session.answer(_without_secrets(settings), [text])


def config_show(session: Session) -> None:
    """Prints the daemon's settings when one answers, else the file's; stderr says which.

    The output is TOML for a configuration file, with --json an object. Secrets in URLs are masked.
    """
    named = Path(session.config) if session.config else None
    try:
        found = session.client.configuration()
    except (errors.NoDaemonError, errors.AccessError, errors.InvalidConfigError):
        found = None  # config.load reports an invalid file
    if found and (named is None or found.path == str(named.absolute())):
        values = found.settings
        source = f"in effect; read from {found.path or 'no file: the defaults'}"
    else:
        path = _config_path(session)
        values = _without_secrets(config.load(path))
        source = f"no daemon answers: from {path or 'no file: the defaults'}"
    session.answer(values, _toml(values))
    session.note(source)


_ARRAYS_OF_TABLES = ("mirror", "rule")


def _config_path(session: Session) -> Path | None:
    return Path(session.config) if session.config else places.find_path()


def _without_secrets(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(masked(settings.model_dump_json()))
    return values


def _toml(values: dict[str, Any], above: str = "") -> Iterator[str]:
    """JSON's strings, numbers, booleans and arrays are TOML's. Tables come after plain values."""
    tables: list[tuple[str, dict[str, Any]]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            tables.append((f"[{above}{key}]", value))
        elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
            tables += [(f"[[{above}{key}]]", each) for each in value]
        elif value is not None and (value or key not in _ARRAYS_OF_TABLES):
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for header, table in tables:
        yield f"\n{header}"
        yield from _toml(table, f"{header.strip('[]')}.")
