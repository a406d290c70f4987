"""A row of a dataset file by its fields: the rules that every format shares. No I/O.

Values come from strangers. An invalid field raises RowError with a reason. A rule that had to
interpret a value is counted under its name, so that an import says how it understood the file.
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

_URL = re.compile(r"(?:https?|ssh|git)://(?:[^@/]*@)?[^/]+/|git@[^:/]+:")
_ABBREVIATED = re.compile(r"[0-9a-fA-F]{4,39}")
_KINDS = {"bool": "true or false", "int": "a number", "float": "a number"}
_KINDS |= {"list": "a list", "dict": "an object", "bytes": "binary"}


class RowError(Exception):
    """Why a row is invalid, as half a sentence."""


class Fields:
    """One row. `rules` counts for all rows of a file."""

    def __init__(self, row: Mapping[str, Any], rules: Counter[str]) -> None:
        self.row = row
        self._rules = rules

    def count(self, rule: str) -> None:
        self._rules[rule] += 1

    def has(self, name: str) -> bool:
        return self.row.get(name) not in (None, "")

    def instance_id(self, name: str = "instance_id") -> str:
        text = self._required(name)
        if not text.isprintable() or text != text.strip():
            raise RowError(f"{name} {shown(text)} has control characters or outer spaces")
        if len(text) > 500:  # a request can ask for no longer one
            raise RowError(f"{name} {shown(text)} is {len(text)} characters long; 500 are allowed")
        return text

    def mirror(self, name: str = "repo") -> MirrorName:
        """A repository: `owner/name`, or a URL that ends so."""
        text = path = self._required(name)
        if _URL.search(text):
            self.count(f"{name}: URL")
            path = _URL.sub("", text, count=1).strip("/")
        try:
            return MirrorName.parse(path)
        except InvalidNameError as error:
            raise RowError(f"{name} {shown(text)} is not owner/name") from error

    def commit(self, name: str) -> CommitId:
        text = self._required(name)
        try:
            commit = parse_commit(text)
        except InvalidCommitError as error:
            kind = "not a full commit id"
            if _ABBREVIATED.fullmatch(text):
                kind = "abbreviated; it can come to mean another commit"
            raise RowError(f"{name} {shown(text)} is {kind}") from error
        if commit != text:
            self.count(f"{name}: letter case or spaces")
        return commit

    def patch(self, name: str) -> str | None:
        """A patch, byte for byte; None where the field is empty."""
        return self._required(name) if self.has(name) else None

    def names(self, name: str) -> tuple[str, ...]:
        """Test names: a list, a string holding JSON or a Python literal, or an object's keys."""
        if not self.has(name):
            return ()
        value = self.row[name]
        if isinstance(value, str):
            value = self._parsed(name, value)
        if isinstance(value, Mapping):
            self.count(f"{name}: keys of an object")
            value = list(value)
        if isinstance(value, (list, tuple, set)) and all(
            isinstance(item, str) and _is_encodable(item) for item in value
        ):
            return tuple(sorted(value) if isinstance(value, set) else value)
        self.count(f"{name}: not readable as a list of names, left empty")
        return ()

    def _parsed(self, name: str, text: str) -> Any:
        try:
            value = json.loads(text)
            self.count(f"{name}: string holding JSON")
            return value
        except (ValueError, RecursionError):
            pass
        if len(text) > 4 * 1024**2:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a name such as 'a\d' is an invalid escape
                value = ast.literal_eval(text)
            self.count(f"{name}: string holding a Python literal")
            return value
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None

    def _required(self, name: str) -> str:
        if not self.has(name):
            raise RowError(f"{name} is missing")
        value = self.row[name]
        if not isinstance(value, str):
            kind = type(value).__name__
            raise RowError(f"{name} is {_KINDS.get(kind, kind)}, not text")
        if not _is_encodable(value):
            raise RowError(f"{name} holds a lone surrogate, which is no character")
        return value


def _is_encodable(text: str) -> bool:
    """JSON can spell half a character (a lone surrogate), which has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
