"""Lists of test names, as data sets hold them: lists, objects, and text of many kinds. No I/O.

Text is read as JSON, Python's or numpy's notation of a list, or names, one per line. What looks
like a list and cannot be read is no list: it is told from a list that is empty.
"""

import ast
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..jsontext import loads

# a longer text is not read as a Python literal, which becomes a tree in memory first
_LITERAL_BYTES = 4 * 1024**2
_LAYERS = 4  # JSON in JSON in JSON
_QUOTED = r"""(?:'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+")"""
_STRING = re.compile(_QUOTED)


class NameList(NamedTuple):
    """Names, with notes on how they were read; `names` is None if they cannot be read."""

    names: tuple[str, ...] | None
    notes: tuple[str, ...] = ()


def read_names(value: Any) -> NameList:
    notes: list[str] = []
    for _ in range(_LAYERS):
        if isinstance(value, bytes):
            value = value.decode("utf-8", "surrogateescape")
        if not isinstance(value, str):
            break
        value, note = _parsed(value.strip())
        notes.append(note)
    if isinstance(value, list) and value and all(_is_pair(member) for member in value):
        value = dict(value)  # a map of Parquet
    if isinstance(value, Mapping):
        notes.append("keys of an object")
        value = _keys(value)
    if not isinstance(value, list | tuple | set):
        return NameList(None, tuple(notes))
    items = [item for item in value if not is_absent(item)]
    if not all(isinstance(item, str) and is_encodable(item) for item in items):
        return NameList(None, tuple(notes))
    # the order of a set of texts differs from process to process
    return NameList(tuple(sorted(items) if isinstance(value, set) else items), tuple(notes))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _keys(value: Mapping[Any, Any]) -> Any:
    lists = value.get("name")  # Multi-SWE-bench in columns: names, and a list per result
    if isinstance(lists, list):
        return lists
    # in Parquet each row has the keys of all rows; None marks those of other rows
    return [key for key, result in value.items() if result is not None]


# `['a' 'b']`: for Python this is one name, `ab`
_NUMPY = re.compile(rf"\[\s*{_QUOTED}(?:\s+{_QUOTED})+\s*\]")
# the `repr` of numpy and pandas, from rows that were written with `str`
_CALL = re.compile(
    r"(?:array|list|tuple|(?:frozen)?set|deque|dict_keys|Index|Series|ListConfig)\((.*)\)",
    re.DOTALL,
)
_DTYPE = re.compile(r",\s*dtype=[\w<>'|\".]+\s*$")
# how a list, an object or a literal begins that could not be read
_OPENED = re.compile(r"""\[\s*(?:["'\[{(\]]|$)|[{(]\s*["'\[{(]|\[.*\]$|\{.*\}$|["']""", re.DOTALL)
_BETWEEN = r"(?:[,;][ \t]*|[ \t]+)"
_SEVERAL = re.compile(rf"[\w./+-]+\.\w+(?:::\w+)+(?:{_BETWEEN}[\w./+-]+\.\w+(?:::\w+)+)+")


def _parsed(text: str) -> tuple[Any, str]:
    """Return what a text holds, and a note how it was read; None if it cannot be read."""
    try:
        return loads(text), "string holding JSON"
    except ValueError:
        pass
    if _NUMPY.fullmatch(text):
        return [ast.literal_eval(item) for item in _STRING.findall(text)], "string holding an array"
    if call := _CALL.fullmatch(text):
        text = _DTYPE.sub("", call[1]).strip()
        return (text, "string holding an array") if text else ([], "string holding an array")
    if len(text) <= _LITERAL_BYTES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a name such as 'a\d' is an invalid escape
                return ast.literal_eval(text), "string holding a Python literal"
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass
    if _OPENED.match(text):
        return None, "string"
    if _SEVERAL.fullmatch(text):
        return re.split(_BETWEEN, text), "names in a line"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines, "a name per line" if len(lines) > 1 else "one name"


def is_absent(value: Any) -> bool:
    """Return whether a value is missing: None, no text, or NaN, as pandas writes it."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def is_encodable(text: str) -> bool:
    """Return whether the text has a UTF-8 form: JSON can hold a lone surrogate, which has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
