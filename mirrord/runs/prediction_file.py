"""Files of predictions, read row by row.

Predictions are rows of SWE-bench, SWE-bench Pro, Multi-SWE-bench or OpenHands as JSON lines, a JSON
array, or an object of rows or patches by instance id; or a directory of patches named after their
instances, or one that an agent wrote: with such a file in it, or SWE-agent's `ID.pred`.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from .. import errors
from ..datasets.elements import Element, iter_elements
from ..datasets.fields import NO_VALUE, find_value
from ..jsontext import loads
from ..presence import exists, is_dir, is_file, iter_below
from ..quoting import quote_name

# SWE-bench, Multi-SWE-bench, SWE-bench Pro, OpenHands, its archives
_PATCHES = ("model_patch", "fix_patch", "patch", "test_result.git_patch", "git_patch")
_MODELS = ("model_name_or_path", "prefix", "metadata.llm_config.model", "model")
_NAMES = {"instance_id", "test_result", *_PATCHES}
_NO_PATCH = {word.encode() for word in NO_VALUE}
# as long as a patch that the daemon takes (PATCH_LIMIT_BYTES of `api/request.py`)
_ROW_BYTES = 64 * 1024**2
_SUFFIXES = {".patch", ".diff"}
# files of mini-swe-agent, SWE-agent and Agentless, and OpenHands in their own directories
_COLLECTED = ("preds.json", "all_preds.jsonl", "predictions.jsonl", "output.jsonl")


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


# before UTF-8 as Windows writes it; a JSON parser refuses it
_BOM = b"\xef\xbb\xbf"


def read_predictions(path: Path) -> Iterator[Prediction | Fault]:
    """Yield the rows of a file or a directory of patches; raises UsageError if it has none."""
    if is_dir(path):
        collected = (path / name for name in _COLLECTED)
        path = next((file for file in collected if is_file(file)), path)
    if is_dir(path):
        yield from _read_directory(path)
        return
    if exists(path) and not is_file(path):
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


# names of patches that stand in a directory named after the instance
_UNNAMED = {"patch", "model", "model_patch", "fix"}


def _read_directory(directory: Path) -> Iterator[Prediction | Fault]:
    """Yield `ID.pred`, or `ID.patch` and `ID/patch.diff`, in the order of their paths."""
    try:
        below = sorted(iter_below(directory))
    except OSError as error:
        raise _unusable(Path(error.filename), error.strerror or str(error)) from error
    paths = [path for path in below if path.suffix in _SUFFIXES]
    if rows := [path for path in below if path.suffix == ".pred"]:  # beside them, patches of some
        for line, path in enumerate(rows, 1):
            try:
                yield _read_row(line, Element(path.read_bytes()))
            except OSError as error:
                yield Fault(line, f"cannot read {quote_name(path.name)}: {error.strerror}")
        return
    if not paths:
        raise _unusable(directory, "it is a directory without files ID.patch or ID.diff")
    for line, path in enumerate(paths, 1):
        instance = path.parent.name if path.stem in _UNNAMED else path.stem
        try:
            yield Prediction(line, instance, "", _content(path.read_bytes()))
        except OSError as error:
            yield Fault(line, f"cannot read {quote_name(path.name)}: {error.strerror}")


def _content(patch: bytes) -> bytes:
    """Return the patch; empty if it is only spaces or a word for no value, as in a CSV file."""
    text = patch.strip()
    return b"" if not text or text in _NO_PATCH else patch


# tells JSON lines from one document, whose first line may be long
_HEAD_BYTES = 1024**2
# as in preds.json of mini-swe-agent: an object of objects
_OBJECT_BY_ID = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\{')


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
        if not is_document and first.strip() == b"{":  # one row, over several lines
            text = file.read(_ROW_BYTES)
            file.seek(start)
            if (value := _decoded(text)) is not None:
                return iter(_patches_by_id(value) or [Element(text)])
    else:
        is_document = value.keys().isdisjoint(_NAMES) and not rest.strip()
        if is_document and (patches := _patches_by_id(value)):
            return iter(patches)
    return iter_elements(file) if is_document else map(Element, file)


def _patches_by_id(value: dict[str, Any]) -> list[Element]:
    """Return the rows of an object whose members are patches themselves; none of any other."""
    if not any(isinstance(patch, str) and "\n@@ " in patch for patch in value.values()):
        return []
    if not value.keys().isdisjoint(_NAMES):
        return []
    return [
        Element(json.dumps({"model_patch": patch}).encode(), json.dumps(name).encode())
        for name, patch in value.items()
    ]


def _read_row(line: int, element: Element) -> Prediction | Fault:
    if element.fault:
        return Fault(line, element.fault)
    value = _decoded(element.text)
    if value is None:
        return Fault(line, "it is not a JSON object")
    if element.key is not None:
        value.setdefault("instance_id", loads(element.key))
    instance = value.get("instance_id") or _multi_id(value)
    if not isinstance(instance, str) or not instance:
        return Fault(line, "it has no instance_id")
    patch = _first(value, _PATCHES)
    # pandas writes NaN for a missing text
    is_empty = patch is None or (isinstance(patch, float) and math.isnan(patch))
    if value.keys().isdisjoint(_NAMES - {"instance_id"}) or not (
        is_empty or isinstance(patch, str)
    ):
        return Fault(line, "it has no model_patch")
    model = _first(value, _MODELS)
    try:
        content = b"" if is_empty else _content(patch.encode("utf-8", "surrogateescape"))
    # a surrogate that stands for no byte
    except UnicodeEncodeError:
        return Fault(line, "its model_patch is not valid Unicode")
    return Prediction(line, instance, model if isinstance(model, str) else "", content)


def _first(row: dict[str, Any], paths: Iterable[str]) -> Any:
    """Return the value of the first path whose column the row has, None if it has none."""
    path = next((candidate for candidate in paths if candidate.partition(".")[0] in row), "")
    return find_value(row, path)


def _multi_id(row: dict[str, Any]) -> str | None:
    """Return the id that Multi-SWE-bench makes of organisation, repository and number."""
    names = [row.get(name) for name in ("org", "repo", "number")]
    if any(isinstance(name, bool) or not isinstance(name, str | int) for name in names):
        return None
    return "{}__{}-{}".format(*names)


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _unusable(path: Path, fact: str) -> errors.UsageError:
    hint = "give JSON lines with instance_id, model_patch and model_name_or_path, as SWE-bench"
    hint += " does, or a directory of ID.patch"
    return errors.UsageError(f"cannot read the predictions in {path}: {fact}", hint=hint)
