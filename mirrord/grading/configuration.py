"""The conditions on parts of configuration: a section of an INI file, a table, a member of JSON.

The bytes are an agent's: a file that cannot be parsed counts as changed.
"""

import configparser
import tomllib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import iniconfig

from ..git.modes import SYMLINK
from ..jsontext import loads
from ..patches.fit import Change
from .context import Context

T = TypeVar("T")

# a pyproject.toml of 120,000 dotted parts took tomllib minutes, an INI file of 9,000 defaults and
# as many sections gigabytes
_PARSED_BYTES, _MOST_DOTS = 128 * 1024, 100

# the base of many changes is one: to parse it for each was 6 % of the calls of a worker
_read_once = lru_cache(maxsize=4)

_Ini = tuple[configparser.RawConfigParser, iniconfig.IniConfig]


def sections(change: Change, context: Context, *names: str) -> str | None:
    """A section of an INI file differs, for either of the two that read it.

    setuptools and coverage read it with configparser. pytest's iniconfig keeps the case of keys,
    and finds sections where configparser finds none.
    """
    return _differing(change, context, _read_ini, _pick, names)


@_read_once
def _read_ini(text: str) -> _Ini:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    parser.read_string(text)
    return parser, iniconfig.IniConfig("", data=text)


def _pick(readers: _Ini, name: str) -> list[dict[str, str] | None]:
    parser, ini = readers
    sections = parser[name] if parser.has_section(name) else None, ini.sections.get(name)
    return [None if section is None else dict(section) for section in sections]


def tables(change: Change, context: Context, *names: str) -> str | None:
    """A table of a TOML file differs, or an array or value with that dotted name."""
    return _differing(change, context, _read_toml, _dig, names)


@_read_once
def _read_toml(text: str) -> Any:
    # tomllib (3.11) takes time that is quadratic in the parts of a dotted key
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise ValueError("a key has too many parts")
    return tomllib.loads(text)


def keys(change: Change, context: Context, *names: str) -> str | None:
    """A member of a JSON object differs."""
    return _differing(change, context, lambda text: loads(text or "{}"), _dig, names)


def _dig(value: Any, name: str) -> Any:
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _differing(
    change: Change,
    context: Context,
    read: Callable[[str], T],
    pick: Callable[[T, str], Any],
    names: tuple[str, ...],
) -> str | None:
    if change.mode == SYMLINK:
        return "becomes a symbolic link"
    before, after = context.before(change), change.data
    if max(len(before), len(after)) > _PARSED_BYTES:
        return "too long to be read"
    try:
        old, new = read(before.decode()), read(after.decode())
        return ", ".join(name for name in names if pick(old, name) != pick(new, name)) or None
    except (ValueError, configparser.Error, iniconfig.ParseError, RecursionError, AttributeError):
        return "cannot be read"
