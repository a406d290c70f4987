"""Types of settings, with checks that raise ValueError with a clause."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictInt,
)

from ..errors import MirrordError
from ..model import FindingKind, MirrorName, shown
from ..units import format_duration, format_size, parse_duration, parse_size


class Section(BaseModel):
    """A table of the file."""

    # unknown keys are errors: a daemon with other settings than were meant is worse than none
    model_config = ConfigDict(extra="forbid", frozen=True)


def _like(pattern: str, fault: str, *, is_secret: bool = False) -> Callable[[str], str]:
    """Make a check of a text by a pattern. The message does not show secrets."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(fault if is_secret else f"{shown(value)} {fault}")
        return value

    return check


# host:path of scp, but not host::path: git starts the remote helper of that name, and `ext::`
# runs a command
url = _like(
    r"(?i:(?:(?:https?|ssh|git|file)://|/|[a-z0-9][a-z0-9._@-]*:(?!:|/?/))[^\x00-\x20\x7f]*)",
    "is neither a URL of https, http, ssh, git or file, nor an absolute path, nor user@host:path",
    is_secret=True,
)

index = _like(
    r"(?i:(?:(?:https?://|file:///|/)[^\x00-\x20\x7f]*)?)",
    "is neither a URL of https, http or file, nor an absolute path",
    is_secret=True,
)

catalog = _like(
    r"(?:postgresql(?:\+psycopg)?://(?:[^/?#@\s'\"]*@)?[^/?#@\s'\"]*/[^/?#@\s'\"]+"
    r"(?:\?[^#@\s'\"]*)?)?",
    "is neither empty nor of the form postgresql+psycopg://user@host/name; a password in it is"
    " percent-encoded",
    is_secret=True,
)

store = _like(
    r"(?:(?:s3|gs|az)://[a-zA-Z0-9][a-zA-Z0-9._-]*(?:/[^\x00-\x20\x7f?#@]*)?"
    r"|file:///[^\x00-\x20\x7f?#]+)?",
    "is neither empty nor of the form s3://bucket/prefix, gs://, az:// or file:///path;"
    " credentials come from the environment",
    is_secret=True,
)

# a name of DNS has at most 253 characters
_HOST = r"[a-z0-9](?:[a-z0-9._-]{0,251}[a-z0-9])?"

host = _like(rf"(?i:{_HOST}|[0-9a-f:.]+)", "is not a name or an address, without a port")

rule_name = _like(
    r"[a-z0-9][a-z0-9-]{0,63}", "is not a name of lower-case letters, digits and dashes"
)


def _url_template(value: str) -> str:
    unknown = [name for name in re.findall(r"\{([^}]*)\}", value) if name not in {"owner", "name"}]
    if unknown:
        raise ValueError(f"knows {{owner}} and {{name}}, not {{{unknown[0]}}}")
    if "{name}" not in value:
        raise ValueError("needs {name}, or every repository would have the same upstream")
    return url(value)


def ref_pattern(value: str) -> str:
    # what git-check-ref-format(1) refuses in every ref
    invalid = re.search(r"[\s~^:?\[\\\x00-\x1f\x7f]|\.\.|//|@\{", value)
    if not value.startswith("refs/") or value.count("*") > 1 or invalid:
        rule = "it begins with refs/ and has at most one *"
        raise ValueError(f"{shown(value)} is not a ref pattern; {rule}")
    # a ref of upstream's there would be one of ours; a replace ref changes what a commit id names
    if value.startswith(("refs/mirrord/", "refs/replace/")):
        raise ValueError(f"{shown(value)} is reserved or unsafe and never comes from upstream")
    return value


def repo(value: str) -> str:
    try:
        return MirrorName.parse(value).repo
    except MirrordError as error:
        raise ValueError(error.message) from error


def account(value: str) -> str:
    if not value.isprintable():  # the user database takes no NUL
        raise ValueError(f"{shown(value)} is not a name")
    return value


def user(value: object) -> str | int:
    if isinstance(value, str) and value:
        return account(value)
    if type(value) is int and 0 <= value < 1 << 32:
        return value
    raise ValueError("is neither the name of a user nor a uid")


def acceptance(value: str) -> str:
    words = value.split()
    if not 1 <= len(words) <= 3:
        raise ValueError(f"{shown(value)} is not KIND, KIND owner/name or KIND owner/name SUBJECT")
    kinds = [str(kind) for kind in FindingKind]
    if words[0] not in kinds:
        guess = did_you_mean(words[0], kinds) or f": {', '.join(kinds)}"
        raise ValueError(f"{shown(words[0])} is no kind of finding{guess}")
    return " ".join([words[0], *map(repo, words[1:2]), *words[2:]])


def is_accepted(lines: Iterable[str], kind: FindingKind, name: MirrorName, subject: str) -> bool:
    """True if a line of `[audit] accept` names a finding; `*` in its subject matches anything."""
    for line in lines:
        accepted, mirror, pattern = (*line.split(), "", "")[:3]
        is_of_mirror = not mirror or MirrorName.parse(mirror).key == name.key
        is_of_subject = not pattern or fnmatchcase(subject, pattern)
        if accepted == kind and is_of_mirror and is_of_subject:
            return True
    return False


def path_pattern(value: str) -> str:
    if not value.strip("/") or len(value) > 400 or not value.isprintable():
        raise ValueError(f"{shown(value)} is not a pattern of paths")
    return value


_LISTEN = re.compile(rf"(?:{_HOST}|\[[0-9a-f:.]+\]):(\d{{1,5}})", re.IGNORECASE)


web_url = _like(
    r"https?://[^\x00-\x20\x7f@?#]+", "is no URL of https or http without user", is_secret=True
)
proxy = _like(
    r"(?:https?|socks[45]h?|socks5a?)://[^\x00-\x20\x7f]+",
    "is no URL such as http://proxy.example.com:3128",
    is_secret=True,
)


def one_line(value: str | int) -> str:
    text = str(value)
    if not text or not text.isprintable():
        raise ValueError(f"{shown(text)} is empty or has control characters")
    return text


systemd_name = _like(r"[A-Za-z0-9._-]{1,200}", "is not the name of a systemd credential")
# no host begins with a dash, which ssh would read as an option
credential_url = _like(
    r"(?i:https?://[^\x00-\x20\x7f@/?#]+(?:/[^\x00-\x20\x7f@?#]*)?"
    r"|ssh://(?:[a-z0-9._-]+@)?[^\x00-\x20\x7f@/?#-][^\x00-\x20\x7f@/?#]*(?:/[^\x00-\x20\x7f@?#]*)?"
    r"|[a-z0-9._-]+@[a-z0-9][a-z0-9.-]*:[^\x00-\x20\x7f]*)",
    "is neither https://host/prefix, http://, ssh://user@host/prefix nor user@host:prefix; a"
    " password is kept in a file",
    is_secret=True,
)


def listen(value: str) -> str:
    match = _LISTEN.fullmatch(value)
    if value and not (match and 0 < int(match[1]) < 1 << 16):
        raise ValueError(f"{shown(value)} is not host:port, such as 127.0.0.1:8780 or [::1]:8780")
    return value.lower()


def _absolute(value: Path) -> Path:
    if "\0" in str(value) or not value.is_absolute():
        raise ValueError(f"{shown(str(value))} is not an absolute path")
    return value


def path_or_nothing(text: str) -> str:
    """Return an absolute path, or nothing."""
    return str(_absolute(Path(text))) if text else text


Duration = Annotated[timedelta, BeforeValidator(parse_duration), PlainSerializer(format_duration)]

Period = Annotated[Duration, Field(gt=timedelta())]

Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size)]

# a checkout is a mount, and Linux allows 100,000 in a namespace (fs.mount-max)
Count = Annotated[StrictInt, Field(ge=1, le=100_000)]

AbsolutePath = Annotated[Path, AfterValidator(_absolute)]

UrlTemplate = Annotated[str, AfterValidator(_url_template)]

# marks a setting that is read only at start, so that a reload refuses its change
Restart = object()


def did_you_mean(wrong: str, words: Sequence[str], otherwise: Sequence[str] = ()) -> str:
    close = difflib.get_close_matches(wrong, words, n=1, cutoff=0.6) or otherwise
    return f"; did you mean {close[0]}?" if close else ""
