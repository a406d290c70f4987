"""The reader of TOML files, which reports all faults; an invalid file is refused whole."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import toml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..errors import InvalidConfigError
from .credentials import AppSettings, CredentialSettings
from .settings import MirrorSettings, RuleSettings, Settings, setting_keys
from .values import did_you_mean


class ConfigFault(NamedTuple):
    """A fault of a configuration file. `line` counts from 1."""

    key: str
    message: str
    line: int | None = None


def load(path: Path | None) -> Settings:
    """Read settings from a file, or the defaults for None. Raises InvalidConfigError."""
    if path is None:
        return Settings()
    text = _read_text(path)
    try:
        tomllib.loads(text)  # toml 0.10.2 takes an array without its end for a whole one
        values = toml.loads(text)
    except tomllib.TOMLDecodeError as error:
        said, _, position = str(error).rpartition(" (at ")
        number = re.match(r"line (\d+)", position)  # else at the end of the document
        line = int(number[1]) if number else len(text.rstrip().splitlines())
        fault = ConfigFault("", f"not TOML: {_without_values(said)}", line)
        raise _refusal(path, fault) from None
    except toml.TomlDecodeError as error:
        fault = ConfigFault("", f"not TOML: {_without_values(error.msg)}", error.lineno)
        raise _refusal(path, fault) from None
    except Exception as error:  # noqa: BLE001
        # toml 0.10.2: IndexError, OverflowError, RecursionError
        fault = ConfigFault("", f"not TOML: {_without_values(str(error))}")
        raise _refusal(path, fault) from None
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        # the default of a setting is not made where one that it is made from is faulty
        errors = [
            detail for detail in error.errors() if detail["type"] != "default_factory_not_called"
        ]
    faults = []
    for detail in errors:
        # pydantic leaves out faulty items and then reports the list as too short
        if detail["type"] == "too_short" and any(e["loc"][:-1] == detail["loc"] for e in errors):
            continue
        place = [*detail["loc"], *detail.get("ctx", {}).get("place", ())]
        place = [part for part in place if part != "[key]"]  # pydantic's mark of a dict's key
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
        faults.append(ConfigFault(key, _message(detail), _line_of(place, text)))
    raise _refusal(path, *sorted(faults, key=lambda fault: fault.line or 0))


# the shipped file, with a comment for every setting, has 7 kB
_LONGEST_FILE = 128 * 1024


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        # editors of Windows write a byte order mark, which would be part of the first key
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise _refusal(path, ConfigFault("", f"not readable: {error.strerror}")) from error
    except UnicodeDecodeError as error:
        raise _refusal(path, ConfigFault("", "not UTF-8")) from error
    if len(content) > _LONGEST_FILE:
        raise _refusal(path, ConfigFault("", f"longer than {_LONGEST_FILE >> 10} KiB"))
    # toml 0.10.2 takes cubic time in the `=` of an invalid line: 52 s for 64 KiB, 0.3 s for 4 KiB
    lines = enumerate(text.split("\n"), 1)
    if long := [number for number, line in lines if len(line) > 4096]:
        fact = "longer than 4096 characters"
        raise _refusal(path, *(ConfigFault("", fact, number) for number in long))
    return text


def _refusal(path: Path, *faults: ConfigFault) -> InvalidConfigError:
    listing = ""
    for key, message, line in faults:
        place = [f"line {line}"] if line else []
        listing += "\n  " + ": ".join([*place, *([key] if key else []), message])
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return InvalidConfigError(
        f"cannot use configuration {path}: {count}{listing}",
        hint="the sample config.toml names every key; `mirrord config check` tries a file",
        faults=[fault._asdict() for fault in faults],
    )


def _without_values(message: str) -> str:
    """Remove values: toml 0.10.2 quotes whole tables, which may hold a URL with a password."""
    fact = "an array has values of one type; a uid may be written as a string"
    message = re.sub(r"\S*://\S*", "a URL", message.replace("Not a homogeneous array", fact))
    return re.sub(r"\{.*", "", message, flags=re.DOTALL).strip()


_KINDS = {
    "missing": "is required",
    "model_type": "must be a table",
    "tuple_type": "must be an array",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "path_type": "must be a string",
    "too_short": "must not be empty",
    "greater_than": "must be greater than zero",
}


def _message(error: ErrorDetails) -> str:
    """Describe a fault in terms of TOML instead of Python's types."""
    kind = error["type"]
    if kind in {"enum", "literal_error"}:
        expected = error["ctx"]["expected"]
        choices = re.findall(r"\w+", expected)
        return f"must be {expected}" + did_you_mean(str(error["input"]).lower(), choices)
    if kind != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return _KINDS.get(kind) or message.replace("Input should be", "must be")
    path = [str(part) for part in error["loc"] if isinstance(part, str)]
    keys = [key for key, _ in setting_keys()]
    same_leaf = [key for key in keys if key.rpartition(".")[2] == path[-1]]
    keys += [f"mirror.{name}" for name in MirrorSettings.model_fields]
    keys += [f"credential.{name}" for name in CredentialSettings.model_fields]
    keys += [f"credential.github_app.{name}" for name in AppSettings.model_fields]
    keys += [f"grading.rule.{name}" for name in RuleSettings.model_fields]
    if len(path) == 1:
        keys += sorted({key.partition(".")[0] for key in keys})
    return "unknown key" + did_you_mean(".".join(path), keys, otherwise=same_leaf)


def _line_of(path: list[int | str], text: str) -> int | None:
    """Find the line that sets `path`, else its table's header. The toml package knows no lines."""
    names = ".".join(p for p in path if isinstance(p, str))
    is_array = names.startswith(("mirror", "credential", "grading.rule"))  # of tables
    table = next((p for p in path if isinstance(p, int)), 0) if is_array else 0
    places = {(key, count): number for number, key, count in reversed(list(_iter_keys(text)))}
    return places.get((names, table)) or places.get((names.partition(".")[0], table))


def _iter_keys(text: str) -> Iterator[tuple[int, str, int]]:
    """Iterate over line number, dotted key, and index of the table among those of its name.

    The key of a header is its table's name.
    """
    section, counts = "", {"": 0}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
            section = header[1]
            counts[section] = counts.get(section, -1) + 1
            yield number, section, counts[section]
        elif key := re.match(r"""\s*["']?([^"'=\s#]+)["']?\s*=""", line):
            yield number, f"{section}.{key[1]}" if section else key[1], counts[section]
