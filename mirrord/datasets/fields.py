"""A row of a dataset file by its fields: the rules that every format shares, each checked, each counted when it fires.

Values come from strangers. A field that cannot be used raises RowError with a reason; what a rule had to do to read a field is
counted under its name, so that an import says how it understood the file. No I/O.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidCommitError, InvalidNameError
from ..model import CommitId, MirrorName, parse_commit, shown

ID_LIMIT = 500
"""The longest instance id that a request can ask for."""

_LITERAL_LIMIT = 4 * 1024**2
_URL = re.compile(r"(?:https?|ssh|git)://(?:[^@/]*@)?[^/]+/|git@[^:/]+:")
_ABBREVIATED = re.compile(r"[0-9a-fA-F]{4,39}")


class RowError(Exception):
    """Why a row cannot be used, as half a sentence."""


class Fields:
    """One row. `rules` is shared by all rows of a file."""

    def __init__(self, row: Mapping[str, Any], rules: Counter[str]) -> None:
        self.row = row
        self._rules = rules

    def fired(self, rule: str) -> None:
        self._rules[rule] += 1

    def has(self, name: str) -> bool:
        return self.row.get(name) not in (None, "")

    def instance_id(self, name: str = "instance_id") -> str:
        text = self._required_text(name)
        if not text.isprintable() or text != text.strip():
            raise RowError(f"{name} {shown(text)} has control characters or outer spaces")
        if len(text) > ID_LIMIT:
            raise RowError(
                f"{name} {shown(text)} is {len(text)} characters long; {ID_LIMIT} are allowed"
            )
        return text

    def mirror(self, name: str = "repo") -> MirrorName:
        """A repository: `owner/name`, or a URL that ends so."""
        text = self._required_text(name)
        path = _URL.sub("", text, count=1)
        if path != text:
            self.fired(f"{name}: URL")
        try:
            return MirrorName.parse(path.strip("/") if path != text else path)
        except InvalidNameError as error:
            raise RowError(f"{name} {shown(text)} is not owner/name") from error

    def commit(self, name: str) -> CommitId:
        text = self._required_text(name)
        try:
            commit = parse_commit(text)
        except InvalidCommitError as error:
            kind = (
                "abbreviated; it can come to mean another commit"
                if _ABBREVIATED.fullmatch(text)
                else "not a full commit id"
            )
            raise RowError(f"{name} {shown(text)} is {kind}") from error
        if commit != text:
            self.fired(f"{name}: letter case or spaces")
        return commit

    def patch(self, name: str) -> str | None:
        """A patch, byte for byte; None where there is none."""
        value = self.row.get(name)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise RowError(f"{name} is {_kind(value)}, not text")
        _check_encodable(name, value)
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A list of test names: a list, a string holding JSON or a Python literal, or the keys of an object."""
        value = self.row.get(name)
        if value is None or value == "":
            return ()
        if isinstance(value, str):
            value = self._parsed(name, value)
        if isinstance(value, Mapping):
            self.fired(f"{name}: keys of an object")
            value = list(value)
        if isinstance(value, (list, tuple, set)) and all(
            isinstance(item, str) and _is_encodable(item) for item in value
        ):
            return tuple(sorted(value) if isinstance(value, set) else value)
        self.fired(f"{name}: not readable as a list of names, left empty")
        return ()

    def _parsed(self, name: str, text: str) -> Any:
        try:
            value = json.loads(text)
            self.fired(f"{name}: string holding JSON")
            return value
        except (ValueError, RecursionError):
            pass
        if len(text) > _LITERAL_LIMIT:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a name such as 'a\d' is an invalid escape
                value = ast.literal_eval(text)
            self.fired(f"{name}: string holding a Python literal")
            return value
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None

    def _required_text(self, name: str) -> str:
        value = self.row.get(name)
        if value is None or value == "":
            raise RowError(f"{name} is missing")
        if not isinstance(value, str):
            raise RowError(f"{name} is {_kind(value)}, not text")
        _check_encodable(name, value)
        return value


def _check_encodable(name: str, text: str) -> None:
    """JSON can spell half a character (a lone surrogate), which has no bytes."""
    if not _is_encodable(text):
        raise RowError(f"{name} holds a lone surrogate, which is no character")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    return {"list": "a list", "dict": "an object", "bytes": "binary"}.get(
        type(value).__name__, type(value).__name__
    )
