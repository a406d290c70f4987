"""The kinds of values that settings have, each checked as it is read. Raises ValueError with half a sentence."""

from __future__ import annotations

import difflib
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

from ..errors import MirrordError
from ..model import FindingKind, MirrorName, shown
from ..units import format_duration, format_size, parse_duration, parse_size

_URL = re.compile(
    r"(?:(?:https?|ssh|git|file)://|/|[a-z0-9][a-z0-9._@-]*:(?!:|/?/))[^\x00-\x20\x7f]*",
    re.IGNORECASE,
)


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta():
        raise ValueError("must be longer than nothing")
    return value


def _url(value: str) -> str:
    """The message holds nothing of the value, which may hold a password."""
    if not _URL.fullmatch(value):
        raise ValueError(
            "is neither a URL of https, http, ssh, git or file, nor an absolute path, nor user@host:path"
        )
    return value


def _url_template(value: str) -> str:
    unknown = [name for name in re.findall(r"\{([^}]*)\}", value) if name not in {"owner", "name"}]
    if unknown:
        raise ValueError(f"knows {{owner}} and {{name}}, not {{{unknown[0]}}}")
    if "{name}" not in value:
        raise ValueError("needs {name}, or every repository would have the same upstream")
    return _url(value)


def _ref_pattern(value: str) -> str:
    if (
        not value.startswith("refs/")
        or value.count("*") > 1
        or re.search(r"[\s~^:?\[\\\x00-\x1f\x7f]|\.\.|//|@\{", value)
    ):
        raise ValueError(
            f"{shown(value)} is not a ref pattern; it begins with refs/ and has at most one *"
        )
    if value.startswith(("refs/mirrord/", "refs/replace/")):
        raise ValueError(f"{shown(value)} is ours or unsafe and never comes from upstream")
    return value


def _repo(value: str) -> str:
    try:
        return MirrorName.parse(value).repo
    except MirrordError as error:
        raise ValueError(error.message) from error


def _account(value: str) -> str:
    """The user database takes no NUL, and no name that cannot be typed is in it."""
    if not value.isprintable():
        raise ValueError(f"{shown(value)} is not a name")
    return value


def _user(value: object) -> str | int:
    if isinstance(value, str) and value:
        return _account(value)
    if type(value) is int and 0 <= value < 1 << 32:
        return value
    raise ValueError("is neither the name of a user nor a uid")


def _acceptance(value: str) -> str:
    words = value.split()
    if not 1 <= len(words) <= 3:
        raise ValueError(f"{shown(value)} is not KIND, KIND owner/name or KIND owner/name SUBJECT")
    kinds = [str(kind) for kind in FindingKind]
    if words[0] not in kinds:
        close = difflib.get_close_matches(words[0], kinds, n=1)
        guess = f"; did you mean {close[0]}?" if close else f": {', '.join(kinds)}"
        raise ValueError(f"{shown(words[0])} is no kind of finding{guess}")
    return " ".join([words[0], *map(_repo, words[1:2]), *words[2:]])


def _absolute(value: Path) -> Path:
    if "\0" in str(value) or not value.is_absolute():
        raise ValueError(f"{shown(str(value))} is not an absolute path")
    return value


Duration = Annotated[timedelta, BeforeValidator(parse_duration), PlainSerializer(format_duration)]
Period = Annotated[Duration, AfterValidator(_positive)]
Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size)]
Acceptance = Annotated[str, AfterValidator(_acceptance)]
"""A finding that is known and accepted: its kind, the mirror, and the commit, file or ref."""

AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Repo = Annotated[str, AfterValidator(_repo)]
Url = Annotated[str, AfterValidator(_url)]
UrlTemplate = Annotated[str, AfterValidator(_url_template)]
User = Annotated[str | int, BeforeValidator(_user)]
Group = Annotated[str, AfterValidator(_account)]
RefPattern = Annotated[str, AfterValidator(_ref_pattern)]
Restart = object()
"""Marks a setting that a reload refuses: what was built from it at the start would have to be built again."""
