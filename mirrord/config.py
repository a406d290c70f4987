"""The configuration: the table of settings, and its reader of TOML files, which reports all faults.

An invalid file is refused whole, and the daemon keeps its settings.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import toml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    StrictInt,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from .errors import InvalidConfigError, MirrordError
from .model import (
    AuditLevel,
    Backend,
    FindingKind,
    History,
    MirrorName,
    Policy,
    SteeringKind,
    shown,
)
from .places import default_socket, default_state_dir
from .units import format_duration, format_size, parse_duration, parse_size

# -- checks of values: each raises ValueError with a clause ---------------------------------------


def _like(pattern: str, fault: str, *, is_secret: bool = False) -> Callable[[str], str]:
    """Make a check of a text by a pattern. The message does not show secrets."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(fault if is_secret else f"{shown(value)} {fault}")
        return value

    return check


_url = _like(
    r"(?i:(?:(?:https?|ssh|git|file)://|/|[a-z0-9][a-z0-9._@-]*:(?!:|/?/))[^\x00-\x20\x7f]*)",
    "is neither a URL of https, http, ssh, git or file, nor an absolute path, nor user@host:path",
    is_secret=True,
)
_index = _like(
    r"(?i:(?:(?:https?://|file:///|/)[^\x00-\x20\x7f]*)?)",
    "is neither a URL of https, http or file, nor an absolute path",
    is_secret=True,
)
_catalog = _like(
    r"(?:postgresql(?:\+psycopg)?://(?:[^/?#@\s'\"]*@)?[^/?#@\s'\"]*/[^/?#@\s'\"]+"
    r"(?:\?[^#@\s'\"]*)?)?",
    "is neither empty nor of the form postgresql+psycopg://user@host/name; a password in it is"
    " percent-encoded",
    is_secret=True,
)
_store = _like(
    r"(?:(?:s3|gs|az)://[a-zA-Z0-9][a-zA-Z0-9._-]*(?:/[^\x00-\x20\x7f?#@]*)?"
    r"|file:///[^\x00-\x20\x7f?#]+)?",
    "is neither empty nor of the form s3://bucket/prefix, gs://, az:// or file:///path;"
    " credentials come from the environment",
    is_secret=True,
)
_HOST = r"[a-z0-9](?:[a-z0-9._-]{0,251}[a-z0-9])?"
_host = _like(rf"(?i:{_HOST}|[0-9a-f:.]+)", "is not a name or an address, without a port")
_rule_name = _like(
    r"[a-z0-9][a-z0-9-]{0,63}", "is not a name of lower-case letters, digits and dashes"
)


def _url_template(value: str) -> str:
    unknown = [name for name in re.findall(r"\{([^}]*)\}", value) if name not in {"owner", "name"}]
    if unknown:
        raise ValueError(f"knows {{owner}} and {{name}}, not {{{unknown[0]}}}")
    if "{name}" not in value:
        raise ValueError("needs {name}, or every repository would have the same upstream")
    return _url(value)


def _ref_pattern(value: str) -> str:
    invalid = re.search(r"[\s~^:?\[\\\x00-\x1f\x7f]|\.\.|//|@\{", value)
    if not value.startswith("refs/") or value.count("*") > 1 or invalid:
        rule = "it begins with refs/ and has at most one *"
        raise ValueError(f"{shown(value)} is not a ref pattern; {rule}")
    if value.startswith(("refs/mirrord/", "refs/replace/")):
        raise ValueError(f"{shown(value)} is reserved or unsafe and never comes from upstream")
    return value


def _repo(value: str) -> str:
    try:
        return MirrorName.parse(value).repo
    except MirrordError as error:
        raise ValueError(error.message) from error


def _account(value: str) -> str:
    if not value.isprintable():  # the user database takes no NUL
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
        guess = _guess(words[0], kinds) or f": {', '.join(kinds)}"
        raise ValueError(f"{shown(words[0])} is no kind of finding{guess}")
    return " ".join([words[0], *map(_repo, words[1:2]), *words[2:]])


def _path_pattern(value: str) -> str:
    if not value.strip("/") or len(value) > 400 or not value.isprintable():
        raise ValueError(f"{shown(value)} is not a pattern of paths")
    return value


_LISTEN = re.compile(rf"(?:{_HOST}|\[[0-9a-f:.]+\]):(\d{{1,5}})", re.IGNORECASE)


def _listen(value: str) -> str:
    found = _LISTEN.fullmatch(value)
    if value and not (found and 0 < int(found[1]) < 1 << 16):
        raise ValueError(f"{shown(value)} is not host:port, such as 127.0.0.1:8780 or [::1]:8780")
    return value.lower()


def _absolute(value: Path) -> Path:
    if "\0" in str(value) or not value.is_absolute():
        raise ValueError(f"{shown(str(value))} is not an absolute path")
    return value


Duration = Annotated[timedelta, BeforeValidator(parse_duration), PlainSerializer(format_duration)]
Period = Annotated[Duration, Field(gt=timedelta())]
Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size)]
Count = Annotated[StrictInt, Field(ge=1, le=100_000)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
UrlTemplate = Annotated[str, AfterValidator(_url_template)]
Restart = object()
"""Marks a setting that is read only at start, so that a reload refuses its change."""


# -- the settings ---------------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UpstreamSettings(_Section):
    url: UrlTemplate = "https://github.com/{owner}/{name}.git"
    fallbacks: tuple[UrlTemplate, ...] = ()
    refs: Annotated[
        tuple[Annotated[str, AfterValidator(_ref_pattern)], ...], Field(min_length=1)
    ] = ("refs/heads/*", "refs/tags/*")
    timeout: Period = timedelta(minutes=10)


class SyncSettings(_Section):
    interval: Duration = timedelta(hours=6)
    jitter: Duration = timedelta(minutes=10)
    concurrency: Annotated[StrictInt, Field(ge=1, le=64)] = 4


class AuditSettings(_Section):
    """`accept` names known findings: kind, mirror, and the commit, file or ref."""

    interval: Duration = timedelta(hours=24)
    level: AuditLevel = AuditLevel.CLOSURE
    content_interval: Duration = timedelta(days=7)
    heal: StrictBool = True
    accept: tuple[Annotated[str, AfterValidator(_acceptance)], ...] = ()


class MaintenanceSettings(_Section):
    interval: Duration = timedelta(hours=24)


class CheckoutSettings(_Section):
    backend: Backend = Backend.AUTO
    history: History = History.SEALED
    ttl: Period = timedelta(hours=2)
    max: Count = 1024
    prewarm: StrictBool = True
    template_bytes: Size = 50 * 1024**3
    template_ttl: Period = timedelta(days=7)
    disk_reserve: Size = 1024**3


class DatasetSettings(_Section):
    watch: StrictBool = True


class AccessSettings(_Section):
    group: Annotated[str, AfterValidator(_account)] = "mirrord"
    admins: tuple[Annotated[str | int, BeforeValidator(_user)], ...] = ()
    commits: Literal["recorded", "any"] = "recorded"
    owners: Literal["none", "subuid"] = "subuid"
    max_per_user: Count = 256
    requests_per_user: Count = 512
    bytes_per_user: Size = 100 * 1024**3
    rate_per_user: Annotated[StrictInt, Field(ge=0, le=100_000)] = 2000
    ttl_max: Period = timedelta(hours=24)


class RuleSettings(_Section):
    """A configured rule about what could steer tests. docs/grading.md describes the patterns."""

    name: Annotated[str, AfterValidator(_rule_name)]
    paths: Annotated[tuple[Annotated[str, AfterValidator(_path_pattern)], ...], Field(min_length=1)]
    policy: Policy | None = None


class GradingSettings(_Section):
    """`policies` are by kind. A configured rule's own policy takes precedence."""

    policy: Policy = Policy.REPORT
    policies: dict[SteeringKind, Policy] = {}
    file_bytes: Size = 1024**2
    rule: tuple[RuleSettings, ...] = ()


class EnvironmentSettings(_Section):
    """A change applies to new builds, and has failed ones retried."""

    index: Annotated[str, AfterValidator(_index)] = ""
    network: StrictBool = True


class LogSettings(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class WebSettings(_Section):
    """`hosts` are names, besides the listening address, that a request's Host may have."""

    listen: Annotated[str, AfterValidator(_listen)] = ""
    hosts: tuple[Annotated[str, AfterValidator(_host), AfterValidator(str.lower)], ...] = ()


class DockerSettings(_Section):
    volumes: StrictBool = False


class CatalogSettings(_Section):
    url: Annotated[str, AfterValidator(_catalog), Restart] = ""


class StoreSettings(_Section):
    url: Annotated[
        str, AfterValidator(_store), AfterValidator(lambda url: url.rstrip("/")), Restart
    ] = ""


class MirrorSettings(_Section):
    repo: Annotated[str, AfterValidator(_repo)]
    url: Annotated[str, AfterValidator(_url)] | None = None


def _distinct(mirrors: tuple[MirrorSettings, ...]) -> tuple[MirrorSettings, ...]:
    """Refuse a second table of the same mirror, in any letter case."""
    seen: set[str] = set()
    for number, mirror in enumerate(mirrors):
        if mirror.repo.lower() in seen:
            facts = {"repo": mirror.repo, "place": (number, "repo")}
            raise PydanticCustomError("twice", "{repo} occurs twice", facts)
        seen.add(mirror.repo.lower())
    return mirrors


class Settings(_Section):
    """All settings. `mirror` has the `[[mirror]]` tables."""

    state_dir: Annotated[AbsolutePath, Restart] = Field(default_factory=default_state_dir)
    socket: Annotated[AbsolutePath, Restart] = Field(
        default_factory=lambda given: default_socket(given["state_dir"])
    )
    upstream: UpstreamSettings = UpstreamSettings()
    sync: SyncSettings = SyncSettings()
    audit: AuditSettings = AuditSettings()
    maintenance: MaintenanceSettings = MaintenanceSettings()
    checkouts: CheckoutSettings = CheckoutSettings()
    datasets: DatasetSettings = DatasetSettings()
    access: AccessSettings = AccessSettings()
    environments: EnvironmentSettings = EnvironmentSettings()
    grading: GradingSettings = GradingSettings()
    log: LogSettings = LogSettings()
    web: WebSettings = WebSettings()
    docker: DockerSettings = DockerSettings()
    catalog: CatalogSettings = CatalogSettings()
    store: StoreSettings = StoreSettings()
    mirror: Annotated[tuple[MirrorSettings, ...], AfterValidator(_distinct)] = ()


def setting_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Iterate over the dotted keys of settings, each with whether a change needs a restart."""
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from setting_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", Restart in info.metadata


# -- reload ---------------------------------------------------------------------------------------


def compare(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """Return the changed keys that a reload applies, and those that need a restart."""
    keys = [(key, restart, attrgetter(key)) for key, restart in setting_keys()]
    changed = [(key, restart) for key, restart, read in keys if read(old) != read(new)]
    applied = [key for key, restart in changed if not restart]
    return applied, [key for key, restart in changed if restart]


def merge_live(old: Settings, new: Settings) -> Settings:
    """Return `new`, but with the old settings where a change needs a restart."""
    result = new
    for key in compare(old, new)[1]:
        section, _, name = key.rpartition(".")
        update = {name: attrgetter(key)(old)}
        if section:
            update = {section: getattr(result, section).model_copy(update=update)}
        result = result.model_copy(update=update)
    return result


# -- the file -------------------------------------------------------------------------------------


# the shipped file, with a comment for every setting, has 7 kB
_LONGEST_FILE = 128 * 1024
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
    except Exception as error:  # noqa: BLE001  toml 0.10.2: IndexError, OverflowError, RecursionError
        fault = ConfigFault("", f"not TOML: {_without_values(str(error))}")
        raise _refusal(path, fault) from None
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        # the default of a setting is not made where one that it is made from is faulty
        errors = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
    faults = []
    for each in errors:
        # pydantic leaves out faulty items and then reports the list as too short
        if each["type"] == "too_short" and any(e["loc"][:-1] == each["loc"] for e in errors):
            continue
        place = [*each["loc"], *each.get("ctx", {}).get("place", ())]
        place = [part for part in place if part != "[key]"]  # pydantic's mark of a dict's key
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
        faults.append(ConfigFault(key, _message(each), _line_of(place, text)))
    raise _refusal(path, *sorted(faults, key=lambda fault: fault.line or 0))


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
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


def _message(error: ErrorDetails) -> str:
    """Describe a fault in terms of TOML instead of Python's types."""
    kind = error["type"]
    if kind in {"enum", "literal_error"}:
        expected = error["ctx"]["expected"]
        choices = re.findall(r"\w+", expected)
        return f"must be {expected}" + _guess(str(error["input"]).lower(), choices)
    if kind != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return _KINDS.get(kind) or message.replace("Input should be", "must be")
    path = [str(part) for part in error["loc"] if isinstance(part, str)]
    known = [key for key, _ in setting_keys()]
    same_leaf = [key for key in known if key.rpartition(".")[2] == path[-1]]
    known += [f"mirror.{name}" for name in MirrorSettings.model_fields]
    known += [f"grading.rule.{name}" for name in RuleSettings.model_fields]
    if len(path) == 1:
        known += sorted({key.partition(".")[0] for key in known})
    return "unknown key" + _guess(".".join(path), known, otherwise=same_leaf)


def _guess(wrong: str, known: Sequence[str], otherwise: Sequence[str] = ()) -> str:
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6) or otherwise
    return f"; did you mean {close[0]}?" if close else ""


def _line_of(path: list[int | str], text: str) -> int | None:
    """Find the line that sets `path`, else its table's header. The toml package knows no lines."""
    names = ".".join(p for p in path if isinstance(p, str))
    is_array = names.startswith(("mirror", "grading.rule"))  # of tables
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
