"""A mapping of one's own: TOML that says which column of a file is what.

It comes from whoever imports, so its size is bounded and it can name columns only: no code, no
paths of files. No I/O.
"""

import difflib
import tomllib
from collections.abc import Iterator
from typing import Any

from ..errors import InvalidMappingError
from ..model import Direction, History, shown
from .fields import PLACE, STANDARD, Columns

MAPPING_LIMIT_BYTES = 8 * 1024

_CHOICES: dict[str, set[str]] = {"direction": set(Direction), "history": set(History)}
_SOURCES_LIMIT = 20


def parse_mapping(text: str) -> Columns:
    """The standard columns, but for what the mapping says. Raises InvalidMappingError."""
    if len(text.encode()) > MAPPING_LIMIT_BYTES:
        raise _refused([f"it is longer than {MAPPING_LIMIT_BYTES >> 10} KiB"])
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _refused([f"it is not TOML: {error}"]) from error
    defaults = document.pop("defaults", {})
    if not isinstance(defaults, dict):
        raise _refused(["defaults is not a table"])
    document = {key.lower(): value for key, value in document.items()}
    defaults = {key.lower(): value for key, value in defaults.items()}
    faults = [f for key, value in document.items() for f in _iter_faults(key, value)]
    for key, value in defaults.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        checked = str(value) if is_number else value if isinstance(value, str) else None
        faults += _iter_faults(key, checked, "defaults.")
    if faults:
        raise _refused(faults)
    sources = {key: (v,) if isinstance(v, str) else tuple(v) for key, v in document.items()}
    defaults = {key: str(value) for key, value in defaults.items()}
    for field, choices in _CHOICES.items():  # a constant, not a column of that name
        if sources.get(field, ("",))[0] in choices:
            defaults[field] = sources.pop(field)[0]
            sources[field] = ()
    return Columns({**STANDARD.sources, **sources}, defaults)


def _iter_faults(field: str, value: Any, table: str = "") -> Iterator[str]:
    if field not in STANDARD.sources:
        close = difflib.get_close_matches(field, STANDARD.sources, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        yield f"{table}{shown(field)} is no field of a row{guess}"
        return
    texts = value if isinstance(value, list) and not table and value else [value]
    if len(texts) > _SOURCES_LIMIT:
        yield f"{field} has more than {_SOURCES_LIMIT} columns"
    for text in texts[:_SOURCES_LIMIT]:
        if not isinstance(text, str) or not text:
            kind = "text or a number" if table else "a column, a template, or a list of those"
            yield f"{table}{field} must be {kind}"
        elif "{" in (rest := PLACE.sub("", text)) or "}" in rest or "" in PLACE.findall(text):
            yield f"{table}{field} = {shown(text)}: each {{ }} must hold a column"
        elif table and field in _CHOICES and text not in _CHOICES[field]:
            yield f"{table}{field} must be one of {', '.join(sorted(_CHOICES[field]))}"


def _refused(faults: list[str]) -> InvalidMappingError:
    return InvalidMappingError(
        f"cannot use the mapping: {'; '.join(faults[:10])}",
        hint=f"its fields are {', '.join(STANDARD.sources)}, and a table [defaults]; see"
        " docs/formats.md",
    )
