"""Files of predictions, read row by row.

Predictions are SWE-bench's rows (`instance_id`, `model_patch`, `model_name_or_path`) as JSON lines,
a JSON array, or an object by instance id.
"""

import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from .. import errors
from ..datasets.readers import Element, iter_elements
from ..jsontext import loads

_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 1024**2
_NAMES = {"instance_id", "model_patch"}
_OBJECT_BY_ID = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\{')


class Prediction(NamedTuple):
    """A row. `line` counts from 1: lines of JSON lines, else rows."""

    line: int
    instance: str
    model: str
    patch: bytes

    @property
    def key(self) -> tuple[str, str]:
        """The key of which the last row counts."""
        return self.instance, self.model


class Fault(NamedTuple):
    """An invalid row, and the reason."""

    line: int
    reason: str


def read_predictions(path: Path) -> Iterator[Prediction | Fault]:
    """Yield the rows of a file; raises UsageError if it has none."""
    if path.exists() and not path.is_file():
        raise _unusable(path, "it is not a regular file")
    try:
        with path.open("rb") as file:
            if file.peek(len(_BOM)).startswith(_BOM):
                file.read(len(_BOM))
            is_empty = True
            for line, element in enumerate(_iter_rows(file), 1):
                if element.text.strip() or element.fault:
                    is_empty = False
                    yield _read_row(line, element)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    if is_empty:
        raise _unusable(path, "it has no predictions")


def _iter_rows(file: BufferedReader) -> Iterator[Element]:
    """Yield lines, or the elements of one JSON document, which may be a single line."""
    start = file.tell()
    head = file.read(_HEAD_BYTES).lstrip()
    file.seek(start)
    if head.startswith(b"["):
        return iter_elements(file)
    first, _, rest = head.partition(b"\n")
    value = _decoded(first)
    if value is None:
        is_document = _OBJECT_BY_ID.match(head) is not None
    else:
        is_document = value.keys().isdisjoint(_NAMES) and not rest.strip()
    return iter_elements(file) if is_document else map(Element, file)


def _read_row(line: int, element: Element) -> Prediction | Fault:
    if element.fault:
        return Fault(line, element.fault)
    value = _decoded(element.text)
    if value is None:
        return Fault(line, "it is not a JSON object")
    if element.key is not None:
        value.setdefault("instance_id", loads(element.key))
    instance, patch = value.get("instance_id"), value.get("model_patch")
    model = value.get("model_name_or_path")
    if not isinstance(instance, str) or not instance:
        return Fault(line, "it has no instance_id")
    if "model_patch" not in value or not isinstance(patch, str | None):
        return Fault(line, "it has no model_patch")
    try:
        content = (patch or "").encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return Fault(line, "its model_patch is not valid Unicode")
    return Prediction(line, instance, model if isinstance(model, str) else "", content)


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _unusable(path: Path, fact: str) -> errors.UsageError:
    hint = "give JSON lines with instance_id, model_patch and model_name_or_path, as SWE-bench does"
    return errors.UsageError(f"cannot read the predictions in {path}: {fact}", hint=hint)
