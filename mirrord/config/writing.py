"""Settings as the TOML of a configuration file."""

import json
from collections.abc import Iterator
from typing import Any

_ARRAYS_OF_TABLES = ("credential", "mirror", "rule")  # empty, they are left out


def toml_lines(values: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield the lines of a table; strings, numbers, booleans and arrays are as in JSON."""
    tables: list[tuple[str, dict[str, Any]]] = []  # after plain values
    for key, value in values.items():
        if isinstance(value, dict):
            tables.append((f"[{above}{key}]", value))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            tables += [(f"[[{above}{key}]]", item) for item in value]
        elif value is not None and (value or key not in _ARRAYS_OF_TABLES):
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for header, table in tables:
        yield f"\n{header}"
        yield from toml_lines(table, f"{header.strip('[]')}.")
