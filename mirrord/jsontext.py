"""JSON as text: written so that it is always UTF-8, read with a bound on its depth.

Python's `json` writes a lone surrogate, as in a name that is not UTF-8, as an escape that other
readers refuse; and raises RecursionError for what is nested deeply, which no caller expects.
"""

import json
from collections.abc import Callable
from typing import Any

from .quoting import as_utf8

DEPTH_MAX = 100  # of what others wrote; ours has less than ten levels, a dataset's rows a few more


def dumps(
    value: Any,
    *,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """Format JSON values. A byte that is not UTF-8 becomes `\\351`, as in `quoting.legible`.

    A name that has to be read back is quoted before (`quoting.quote_name`).
    """
    form: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    text = json.dumps(value, ensure_ascii=False, default=default, **form)
    try:
        text.encode()
    except UnicodeEncodeError:
        # rare, so only then is every string looked at
        plain = json.loads(json.dumps(value, default=default))
        text = json.dumps(_as_utf8(plain), ensure_ascii=False, **form)
    return text


def loads(content: str | bytes) -> Any:
    """Read JSON that others wrote; raises ValueError, also for what is nested too deeply."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    opening = ("[", "{") if isinstance(content, str) else (b"[", b"{")
    # counting is cheap, and clears most documents: only the others are walked
    if sum(map(content.count, opening)) > DEPTH_MAX:  # type: ignore[arg-type]
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH_MAX):
        children = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for each in children for item in each if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _as_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return as_utf8(value)
    if isinstance(value, dict):
        return {_as_utf8(key): _as_utf8(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_utf8(item) for item in value]
    return value
