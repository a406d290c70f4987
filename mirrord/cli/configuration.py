"""`mirrord config …`"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .. import config, places
from ..errors import AccessError, InvalidConfigError, NoDaemonError
from ..telemetry import masked
from .parameters import Argument
from .session import Session

if TYPE_CHECKING:
    from ..config import Settings
    from ..protocol import Configuration


def check(
    session: Session, file: Annotated[Path | None, Argument(help="Default: the one in use.")] = None
) -> None:
    """Tells every fault at once, each with its key and line."""
    path = file or session.config_path() or places.find_path()
    settings = config.load(path)
    text = f"{path}: no faults" if path else "no configuration file: the defaults are in use"
    session.answer(_without_secrets(settings), lambda: [text])


def show(session: Session) -> None:
    """The daemon's settings if one answers, else the file's; stderr says which. Prints TOML that a
    configuration file may hold, or with --json an object. Secrets in URLs are masked."""
    named = session.config_path()
    found = _in_force(session)
    if found and (named is None or found.path == str(named.absolute())):
        values, told = (
            found.settings,
            f"in force; read from {found.path or 'no file: the defaults'}",
        )
    else:
        path = named or places.find_path()
        values = _without_secrets(config.load(path))
        told = f"no daemon tells what it runs with: from {path or 'no file: the defaults'}"
    session.answer(values, lambda: _toml(values))
    session.note(told)


def _in_force(session: Session) -> Configuration | None:
    """None without a daemon, or for a file that does not parse: reading it tells its faults."""
    try:
        with session.client() as client:
            return client.configuration()
    except (NoDaemonError, AccessError, InvalidConfigError):
        return None


def _without_secrets(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(masked(settings.model_dump_json()))
    return values


def _toml(values: dict[str, Any]) -> Iterator[str]:
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    mirrors = values["mirror"]
    yield from (
        f"{key} = {_value(value)}"
        for key, value in values.items()
        if key not in {*tables, "mirror"}
    )
    for name, section in tables.items():
        yield f"\n[{name}]"
        yield from (f"{key} = {_value(value)}" for key, value in section.items())
    for mirror in mirrors:
        yield "\n[[mirror]]"
        yield from (
            f"{key} = {_value(value)}" for key, value in mirror.items() if value is not None
        )


def _value(value: object) -> str:
    """JSON's strings, numbers, booleans and arrays are TOML's."""
    return json.dumps(value, ensure_ascii=False)
