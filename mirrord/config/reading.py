"""A configuration file, read with `toml` and checked as a whole: every fault at once, each with its key and line.

Never changes anything: a bad file is refused, and whoever holds the old settings goes on with them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import toml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..errors import InvalidConfigError
from .settings import MirrorSettings, Settings, setting_keys


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong in a configuration file; `line` counts from 1."""

    key: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return f"{place}{self.key}: {self.message}" if self.key else f"{place}{self.message}"


# toml 0.10.2 needs the cube of the `=` in an invalid line: 52 s for 64 KiB of them, 0.3 s for 4 KiB
_LONGEST_FILE = 128 * 1024
_LONGEST_LINE = 4096

_KINDS = {
    "missing": "is required",
    "model_type": "must be a table",
    "tuple_type": "must be an array",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "path_type": "must be a string",
    "too_short": "must not be empty",
}


def load(path: Path | None) -> Settings:
    """Read settings from a file, or the defaults for None. Raises InvalidConfigError with all `faults`."""
    if path is None:
        return Settings()
    text = _read_text(path)
    values = _parse(path, text)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        faults = [_fault(e, text) for e in error.errors() if not _follows(e, error.errors())]
    raise _refusal(path, sorted(faults, key=lambda fault: fault.line or 0))


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        text = content.decode()
    except OSError as error:
        raise _refusal(path, [Fault("", f"not readable: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise _refusal(path, [Fault("", "not UTF-8")]) from error
    if len(content) > _LONGEST_FILE:
        raise _refusal(path, [Fault("", f"longer than {_LONGEST_FILE >> 10} KiB")])
    return text


def _parse(path: Path, text: str) -> dict[str, Any]:
    long = [number for number, line in enumerate(text.split("\n"), 1) if len(line) > _LONGEST_LINE]
    if long:
        raise _refusal(
            path, [Fault("", f"longer than {_LONGEST_LINE} characters", number) for number in long]
        )
    try:
        return toml.loads(text)
    except toml.TomlDecodeError as error:
        fault = Fault("", f"not TOML: {_without_values(error.msg)}", error.lineno)
    except Exception as error:  # noqa: BLE001  toml 0.10.2: IndexError, OverflowError, RecursionError
        fault = Fault("", f"not TOML: {_without_values(str(error))}")
    raise _refusal(path, [fault])


def _refusal(path: Path, faults: list[Fault]) -> InvalidConfigError:
    listing = "".join(f"\n  {fault}" for fault in faults)
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return InvalidConfigError(
        f"cannot use configuration {path}: {count}{listing}",
        hint="the commented sample config.toml names every key; `mirrord config check` tries a file",
        faults=[asdict(fault) for fault in faults],
    )


def _without_values(message: str) -> str:
    """Toml 0.10.2 puts whole tables into messages, and a table may hold a URL with a password."""
    message = message.replace(
        "Not a homogeneous array",
        "an array has values of one type; a uid may be written as a string",
    )
    return re.sub(r"\{.*", "", re.sub(r"\S*://\S*", "a URL", message), flags=re.DOTALL).strip()


def _follows(error: ErrorDetails, errors: list[ErrorDetails]) -> bool:
    """Whether a list is too short only because of faults in it, which are told."""
    return error["type"] == "too_short" and any(
        other["loc"][:-1] == error["loc"] for other in errors
    )


def _fault(error: ErrorDetails, text: str) -> Fault:
    path = (
        *error["loc"],
        *error.get("ctx", {}).get("place", ()),
    )  # what is wrong of a whole list is so at one place
    key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    return Fault(key, _message(error), _line_of(list(path), text))


def _message(error: ErrorDetails) -> str:
    """The fault in the words of TOML: pydantic speaks of Python's types."""
    kind, said = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return "unknown key" + _suggestion([str(p) for p in error["loc"] if isinstance(p, str)])
    if kind in {"enum", "literal_error"}:
        return f"must be {error['ctx']['expected']}" + _guess(
            str(error["input"]).lower(), re.findall(r"\w+", error["ctx"]["expected"])
        )
    return _KINDS.get(kind) or said.replace("Input should be", "must be")


def _suggestion(path: list[str]) -> str:
    known = [key for key, _ in setting_keys()]
    sections = sorted({key.partition(".")[0] for key in known})
    mirror = [f"mirror.{name}" for name in MirrorSettings.model_fields]
    wrong = ".".join(path)
    same_leaf = [key for key in known if key.rpartition(".")[2] == path[-1]]
    return _guess(
        wrong, [*known, *mirror, *(sections if len(path) == 1 else ())], otherwise=same_leaf
    )


def _guess(wrong: str, known: list[str], otherwise: Sequence[str] = ()) -> str:
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6) or otherwise
    return f"; did you mean {close[0]}?" if close else ""


def _line_of(path: list[int | str], text: str) -> int | None:
    """The line that sets `path`, else the header of its table: the toml package keeps no positions."""
    names = ".".join(p for p in path if isinstance(p, str))
    table = next((p for p in path if isinstance(p, int)), 0) if names.startswith("mirror") else 0
    places = {(key, count): number for number, key, count in reversed(list(_iter_keys(text)))}
    return places.get((names, table)) or places.get((names.partition(".")[0], table))


def _iter_keys(text: str) -> Iterator[tuple[int, str, int]]:
    """Line number, dotted key (a header's is its table's name), and how many tables of that name came before."""
    section, counts = "", {"": 0}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
            section = header[1]
            counts[section] = counts.get(section, -1) + 1
            yield number, section, counts[section]
        elif key := re.match(r"""\s*["']?([^"'=\s#]+)["']?\s*=""", line):
            yield number, f"{section}.{key[1]}" if section else key[1], counts[section]
