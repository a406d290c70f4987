"""The fields of one dataset row: which column has each, and how its value is read.

Rows are untrusted: an invalid value raises RowError with a reason. A value that was interpreted, or
found in an unusual column, is noted in the row's rules. No I/O.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from enum import StrEnum
from typing import Any, TypeVar

from ..errors import InvalidCommitError, InvalidNameError, InvalidRequestError
from ..jsontext import loads
from ..model import UNREAD_LIST, CommitId, Direction, History, MirrorName, parse_commit, shown
from ..places import read_workdir
from ..telemetry import mask_url
from ..testlogs import SCRIPTS
from .testlists import is_absent, is_encodable, read_names

RawFields = Mapping[str, Any]
Choice = TypeVar("Choice", bound=StrEnum)

# What pandas and `str` write for a missing value. Only an id can be one of these words.
NO_VALUE = frozenset(("nan", "NaN", "None", "null", "NULL", "NaT", "<NA>"))
OWNERS = ("user", "owner", "org", "organization")
# columns that have the owner of a repository that is a name alone
URLS = ("github_url", "repo_url", "github", "html_url")
PLACE = re.compile(r"\{([^{}]*)\}")


def host_label(url: str) -> str:
    """Return the host and port of a URL as a part of a mirror's name."""
    scheme, _, rest = url.rpartition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return (host if scheme else host.partition(":")[0]).lower().replace(":", "-")


class RowError(Exception):
    """A row is invalid. The message is a clause, such as `repo is missing`."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns in which a format has the fields of a row.

    A source is a column, a path in one (`base.sha`, also through text that holds JSON), or a
    template of such (`{org}/{repo}`); the first one with a value is taken. `defaults` are values or
    templates for empty fields.
    """

    sources: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, str]

    def replace(
        self, sources: Mapping[str, str | tuple[str, ...]], defaults: Mapping[str, str]
    ) -> Columns:
        """Return a copy with other sources and defaults of some fields."""
        changed = {f: (name,) if isinstance(name, str) else name for f, name in sources.items()}
        return Columns({**self.sources, **changed}, {**self.defaults, **defaults})

    def names(self) -> set[str]:
        """Return all columns, and paths in columns, that are read."""
        texts = [text for sources in self.sources.values() for text in sources]
        templates = [text for text in (*texts, *self.defaults.values()) if "{" in text]
        paths = {text for text in texts if "{" not in text}
        paths.update(*(PLACE.findall(text) for text in templates))
        return paths | {path.partition(".")[0] for path in paths}


_SELF_NAMED = (
    *("instance_id", "repo", "base_commit", "revision", "environment_setup_commit", "gold_commits"),
    *("patch", "test_patch", "direction", "history", "python_version", "version", "created_at"),
    *("install_config", "log_parser", "workdir"),
)
# all fields, with their columns in SWE-bench's family
STANDARD = Columns(
    {
        **{name: (name,) for name in _SELF_NAMED},
        "patch": ("patch", "golden_patch", "gold_patch"),
        "fail_to_pass": ("FAIL_TO_PASS", "fail_to_pass"),
        "pass_to_pass": ("PASS_TO_PASS", "pass_to_pass"),
        "image_name": ("image_name", "docker_image", "image"),
        "workdir": ("workdir", "work_dir"),
        "eval_script": ("eval_script",),
        "before_script": ("before_script",),
        "run_script": ("run_script", "run_script.sh"),
        "parsing_script": ("parsing_script", "parser.py"),
        "test_files": ("selected_test_files_to_run",),
        "restored_files": ("restored_files",),
    },
    {},
)


def find_value(row: RawFields, path: str) -> Any:
    """Find the value at a dotted path, also within text that holds JSON."""
    if path in row or "." not in path:
        return row.get(path)
    value: Any = row
    for part in path.split("."):
        if isinstance(value, str):
            value = parse_json(value)
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def parse_json(text: str) -> Any:
    try:
        return loads(text)
    except ValueError:
        return None


# no part of a longer number, such as a sha256 of an image
_FULL = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")


def full_commits(text: str) -> list[str]:
    return list(dict.fromkeys(_FULL.findall(text.lower())))


_URL = re.compile(r"(?:https?|ssh|git)://(?:[^@/]*@)?[^/]+/|git@[^:/]+:")
_USER = re.compile(r"(?<=://)[^@/]*@")
_WWW = re.compile(r"(?<=://)www\.(?=github\.com/)")  # the forge answers there with a redirect
# git takes no fewer than four digits for an id
_ABBREVIATED = re.compile(r"[0-9a-fA-F]{4,39}")
# only an id is put into lower case: the name of a branch may have capitals
_UPPER = re.compile(r"^[0-9a-fA-F]{40}(?=[~^])")
_STEPS = re.compile(r"[~^]")
_INSTALL = {
    *("python", "pre_install", "packages", "pip_packages", "reqs_path", "env_yml_path", "install"),
    *("test_cmd", "log_parser", "env_vars", "eval_commands", "base_image_name"),
    *(*SCRIPTS, "test_files", "restored_files"),  # as an export has them
}


# of a row's steps of installation; longer ones are left out, with a note
_INSTALL_BYTES = 64 * 1024
_KINDS = {"bool": "true or false", "int": "a number", "float": "a number"}
_KINDS |= {"list": "a list", "dict": "an object", "bytes": "binary"}


class Fields:
    """The fields of one row. `rules` notes how they were found and read."""

    def __init__(
        self, row: RawFields, columns: Columns = STANDARD, rules: list[str] | None = None
    ) -> None:
        self.row = row
        self.rules = [] if rules is None else rules
        self._columns = columns

    def note(self, rule: str) -> None:
        self.rules.append(rule)

    # -- finding ----------------------------------------------------------------------------------

    def _find(self, field: str) -> tuple[str, Any]:
        """Return a field's name for messages, and its value; None if empty."""
        sources = self._columns.sources.get(field, ())
        for source in sources:
            if "{" in source:
                value = self._filled(source)
            elif source in self.row:
                value = self.row[source]
            elif "." in source:
                value = find_value(self.row, source)
            else:
                continue
            if not _is_empty(field, value):
                if source != sources[0]:
                    self.note(f"{field}: {source}")
                return (field if "{" in source else source), value
        name = sources[0] if sources and "{" not in sources[0] else field
        default = self._columns.defaults.get(field)
        if default is not None and (value := self._filled(default)):
            self.note(f"{field}: {default} by default")
            return name, value
        return name, None

    def name_of(self, field: str) -> str:
        """Return a field's name for messages."""
        return self._find(field)[0]

    def _filled(self, template: str) -> str | None:
        """Fill a template from its columns; None if one is empty, or neither text nor integer."""
        values = [_whole(find_value(self.row, path)) for path in PLACE.findall(template)]
        if any(not isinstance(v, str | int) or isinstance(v, bool) or v == "" for v in values):
            return None
        filled = iter(values)
        return PLACE.sub(lambda _place: str(next(filled)), template)

    # -- reading ----------------------------------------------------------------------------------

    def instance_id(self) -> str:
        name, value = self._find("instance_id")
        value = _whole(value)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        name, text = (name, str(value)) if is_number else self._required("instance_id")
        if is_number:
            self.note(f"{name}: number")
        if not text.isprintable() or text != text.strip():
            raise RowError(f"{name} {shown(text)} has control characters or outer spaces")
        if len(text) > 500:  # the bound of ids in requests
            raise RowError(f"{name} {shown(text)} is {len(text)} characters long; 500 are allowed")
        return text

    def repository(self) -> tuple[MirrorName, str | None]:
        """Read a repository: `owner/name`, or a URL that ends in it, which is returned too."""
        name, text = self._required("repo")
        if (bare := text.strip().rstrip("/")) != text:
            self.note(f"{name}: spaces or a slash at its end")
        path, url = bare, None
        if host := _URL.match(bare):
            self.note(f"{name}: URL")
            # GitLab has the pages of a repository below /-/
            path, url = bare[host.end() :].strip("/").partition("/-/")[0], _WWW.sub("", host[0])
            if url.endswith("github.com/") and path.count("/") != 1:  # a page of a repository
                raise RowError(f"{name} {shown(mask_url(text))} is not owner/name")
            url = (url if url.startswith("ssh:") else _USER.sub("", url)) + path
            if "/" not in path:  # a forge without owners
                path = f"{host_label(url)}/{path}"
        elif "/" not in bare and "__" not in bare:
            path = self._owned(name, bare)
        try:
            return MirrorName.parse(path), url
        except InvalidNameError as error:
            raise RowError(f"{name} {shown(mask_url(text))} is not owner/name") from error

    def _owned(self, name: str, text: str) -> str:
        """Add the owner to a name, from a column that has it."""
        for column in OWNERS:
            if isinstance(owner := self.row.get(column), str) and owner:
                self.note(f"{name}: with {column}")
                return f"{owner}/{text}"
        for column in URLS:
            path = _URL.sub("", str(self.row.get(column) or ""), count=1).strip("/")
            if path.removesuffix(".git").endswith(f"/{text}"):
                self.note(f"{name}: with {column}")
                return path
        return text

    def commit(self, field: str) -> CommitId | None:
        """Read a full commit id; None if empty."""
        name, text = self._text(field)
        if text is None:
            return None
        try:
            commit = parse_commit(text)
        except InvalidCommitError as error:
            kind = "not a full commit id"
            if _ABBREVIATED.fullmatch(text):
                kind = "abbreviated; it can become ambiguous"
            raise RowError(f"{name} {shown(text)} is {kind}") from error
        if commit != text:
            self.note(f"{name}: letter case or spaces")
        return commit

    def revision(self) -> str | None:
        """Read the name of a branch or tag or a full commit id, also with steps back (`^`, `~2`);
        None if empty.
        """
        name, text = self._text("revision")
        if text is not None and not is_revision(text):
            raise RowError(f"{name} {shown(text)} cannot be the name of a branch")
        return text

    def base_revision(self) -> str | None:
        """Return the base commit if it is written as a revision: `SHA^`, `v1.0`, `main`."""
        name, text = self._text("base_commit")
        if text is None or _ABBREVIATED.fullmatch(re.split(r"[~^]", text, maxsplit=1)[0]):
            return None
        text = text.strip()
        if text.isdecimal() or re.fullmatch(r"[0-9a-fA-F]{40,}", text) or not is_revision(text):
            return None
        self.note(f"{name}: {'steps back from a commit' if _STEPS.search(text) else 'a name'}")
        return _UPPER.sub(lambda digits: digits[0].lower(), text)

    def commits(self, field: str) -> list[CommitId]:
        """Read all full commit ids in a text or in a list of texts, such as URLs."""
        name, value = self._find(field)
        texts = value if isinstance(value, list | tuple) else [value]
        commits = full_commits(" ".join(text for text in texts if isinstance(text, str)))
        if value is not None and not commits:
            self.note(f"{name}: no full commit ids, left out")
        return [parse_commit(text) for text in commits]

    def patch(self, field: str) -> str | None:
        """Read a patch, byte for byte; None if empty."""
        return self._text(field)[1]

    def choice(self, field: str, kind: type[Choice]) -> Choice | None:
        """Read a value of an enumeration; None if empty.

        Any other value counts as empty: some datasets use the column's name for something else.
        """
        name, value = self._find(field)
        if value is None or (isinstance(value, str) and value in set(kind)):
            return None if value is None else kind(value)
        self.note(f"{name}: none of {', '.join(kind)}, left out")
        default = self._columns.defaults.get(field)
        return None if default is None else kind(default)

    def text(self, field: str) -> str | None:
        """Read a short text or a number; None if empty or anything else."""
        value = self._find(field)[1]
        if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip() or not is_encodable(value):
            return None
        return value.strip()[:500]

    def time(self, field: str) -> datetime | None:
        """Read an ISO 8601 date, in UTC if it names no zone; None if empty or unreadable."""
        name, value = self._find(field)
        if value is None:
            return None
        try:
            if isinstance(value, date) and not isinstance(value, datetime):
                value = value.isoformat()
            time = value if isinstance(value, datetime) else datetime.fromisoformat(value.strip())
            zone = time.tzinfo or timezone.utc
            return time.replace(tzinfo=zone).astimezone(timezone.utc)
        except (AttributeError, TypeError, ValueError, OverflowError):
            self.note(f"{name}: not readable as a date, left empty")
            return None

    def names(self, field: str) -> tuple[str, ...]:
        """Read test names; a value that cannot be read is noted as such (`UNREAD_LIST`)."""
        name, value = self._find(field)
        if value is None:
            return ()
        listed = read_names(value)
        for note in listed.notes:
            self.note(f"{name}: {note}")
        if listed.names is None:
            self.note(f"{name}: {UNREAD_LIST}")
        return listed.names or ()

    def install_config(self) -> dict[str, Any] | None:
        """Read how the environment is built, in SWE-rebench's form.

        Only known members are kept, with texts and lists or objects of texts. The log parser and
        scripts that run the tests are columns of their own.
        """
        name, value = self._find("install_config")
        if isinstance(value, str):
            value = parse_json(value)
        config = {}
        if isinstance(value, Mapping):
            config = {key: plain(value[key]) for key in _INSTALL & value.keys()}
        elif self._find("install_config")[1] is not None:
            self.note(f"{name}: not an object, left out")
        if parser := self.text("log_parser"):
            config.setdefault("log_parser", parser)
        for script in SCRIPTS:
            if isinstance(text := self._find(script)[1], str) and is_encodable(text):
                config[script] = text
        if "run_script" in config and (files := self.names("test_files")):
            config["test_files"] = list(files)
        if files := self.names("restored_files"):
            config["restored_files"] = list(files)
        # sorted: a dataset's digest is of these bytes
        config = {key: member for key, member in sorted(config.items()) if member}
        if len(json.dumps(config)) > _INSTALL_BYTES:
            self.note(f"{name}: longer than {_INSTALL_BYTES} bytes, left out")
            return None
        return config or None

    def workdir(self) -> str | None:
        """Read where the tree is in a sandbox; a path that cannot be used is noted."""
        text = self.text("workdir")
        try:
            return read_workdir(text) if text else None
        except ValueError as error:
            self.note(f"workdir {shown(str(text), 40)}: it {error}, left out")
            return None

    def _required(self, field: str) -> tuple[str, str]:
        name, text = self._text(field)
        if text is None:
            raise RowError(f"{name} is missing")
        return name, text

    def _text(self, field: str) -> tuple[str, str | None]:
        name, value = self._find(field)
        if value is None:
            return name, None
        if isinstance(value, bytes):
            value = value.decode("utf-8", "surrogateescape")
        if not isinstance(value, str):
            kind = type(value).__name__
            raise RowError(f"{name} is {_KINDS.get(kind, kind)}, not text")
        if not is_encodable(value):
            raise RowError(f"{name} has a lone surrogate, which is not a character")
        return name, value


def plain(value: Any) -> Any:
    """Convert a JSON value to a text, or a list or object of texts; None for anything else."""
    if isinstance(value, Mapping):
        return {str(key): str(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [str(item) for item in value if isinstance(item, str | int | float)]
    return str(value) if isinstance(value, str | int | float) and is_encodable(str(value)) else None


# the names that git check-ref-format(1) allows, but none that looks like an option
_NAME = r"(?!-|/|.*(?:\.\.|@\{|//|\.lock$))[^\s~^:?*\[\\\x00-\x20\x7f]+"
_REVISION = re.compile(rf"{_NAME}(?:[~^][0-9]{{0,9}})*")  # a branch, tag or commit, and steps back
_REVISION_LENGTH = 250


def is_revision(text: str) -> bool:
    """Return whether git could resolve a text, as the name of a branch or tag or a commit id."""
    return _REVISION.fullmatch(text) is not None and len(text) <= _REVISION_LENGTH


def _is_empty(field: str, value: Any) -> bool:
    """Return whether a value is missing, also as pandas and JSON's readers write it."""
    if isinstance(value, str):
        return not value or (field != "instance_id" and value.strip() in NO_VALUE)
    return is_absent(value)


def _whole(value: Any) -> Any:
    """Return a whole number as such: pandas makes floats of numbers in a column with gaps."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# -- mappings: TOML that names the column of each field --------------------------------------------
#
# A mapping comes from an untrusted client: its size is bounded, and it can only name columns.

# for a dozen columns; a longer mapping is refused with 400 `invalid-mapping`
MAPPING_LIMIT_BYTES = 8 * 1024
_CHOICES: dict[str, set[str]] = {"direction": set(Direction), "history": set(History)}
# columns that one field is looked for in; each row tries them in turn
_SOURCES_LIMIT = 20


def parse_mapping(text: str) -> Columns:
    """Return the standard columns, changed by the mapping. Raises InvalidRequestError."""
    if len(text.encode()) > MAPPING_LIMIT_BYTES:
        raise _invalid([f"it is longer than {MAPPING_LIMIT_BYTES >> 10} KiB"])
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _invalid([f"it is not TOML: {error}"]) from error
    defaults = document.pop("defaults", {})
    if not isinstance(defaults, dict):
        raise _invalid(["defaults is not a table"])
    document = {key.lower(): value for key, value in document.items()}
    defaults = {key.lower(): value for key, value in defaults.items()}
    faults = [f for key, value in document.items() for f in _iter_faults(key, value)]
    for key, value in defaults.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        checked = str(value) if is_number else value if isinstance(value, str) else None
        faults += _iter_faults(key, checked, "defaults.")
    if faults:
        raise _invalid(faults)
    sources = {key: (v,) if isinstance(v, str) else tuple(v) for key, v in document.items()}
    defaults = {key: str(value) for key, value in defaults.items()}
    for field, choices in _CHOICES.items():  # such a word is the value, not a column's name
        if sources.get(field, ("",))[0] in choices:
            defaults[field] = sources.pop(field)[0]
            sources[field] = ()
    return Columns({**STANDARD.sources, **sources}, defaults)


def _iter_faults(field: str, value: Any, table: str = "") -> Iterator[str]:
    if field not in STANDARD.sources:
        close = difflib.get_close_matches(field, STANDARD.sources, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        yield f"{table}{shown(field)} is not a field of a row{guess}"
        return
    texts = value if isinstance(value, list) and not table and value else [value]
    if len(texts) > _SOURCES_LIMIT:
        yield f"{field} has more than {_SOURCES_LIMIT} columns"
    for text in texts[:_SOURCES_LIMIT]:
        if not isinstance(text, str) or not text:
            kind = "text or a number" if table else "a column, a template, or a list of those"
            yield f"{table}{field} must be {kind}"
        elif "{" in (rest := PLACE.sub("", text)) or "}" in rest or "" in PLACE.findall(text):
            yield f"{table}{field} = {shown(text)}: each {{ }} must name a column"
        elif table and field in _CHOICES and text not in _CHOICES[field]:
            yield f"{table}{field} must be one of {', '.join(sorted(_CHOICES[field]))}"


def _invalid(faults: list[str]) -> InvalidRequestError:
    return InvalidRequestError(
        f"cannot use the mapping: {'; '.join(faults[:10])}",
        hint=f"its fields are {', '.join(STANDARD.sources)}, and a table [defaults]; see"
        " docs/formats.md",
    )
