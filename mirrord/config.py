"""The configuration: one table of settings, read with `toml`, checked as a whole, frozen.

Owns the settings with their defaults, bounds and whether a reload applies them. Never changes anything: a bad file is refused
with every fault at once, and whoever holds the old settings goes on with them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import toml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError
from pydantic_core import ErrorDetails

from .errors import InvalidConfigError, MirrordError
from .model import AuditLevel, Backend, History, MirrorName, shown

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d|w))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_SIZES = {"B": 1, **{f"{p}B": 1000**n for n, p in enumerate("kMGT", 1)}, **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}}
_URL = re.compile(r"(?:(?:https?|ssh|git|file)://|/|[a-z0-9][a-z0-9._@-]*:(?!:|/?/))[^\x00-\x20\x7f]*", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")


# -- values -----------------------------------------------------------------------------------------------------------


def parse_duration(value: object) -> timedelta:
    """Read `90s`, `10m`, `1h30m`, `7d`; `0` is none at all. Raises ValueError."""
    if isinstance(value, timedelta):
        return value
    if value in ("0", 0):
        return timedelta()
    if not isinstance(value, str) or not _DURATION.fullmatch(value):
        raise ValueError(f"{shown(str(value))} is not a duration; write a number and one of ms, s, m, h, d, w, for example 10m")
    seconds = sum(float(n) * _UNITS[unit] for n, unit in _DURATION_PART.findall(value))
    if seconds > 366 * 86400 * 10:
        raise ValueError(f"{value} is longer than ten years")
    return timedelta(seconds=seconds)


def parse_size(value: object) -> int:
    """Read `512MiB` or `50GB` as bytes. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if not found:
        raise ValueError(f"{shown(str(value))} is not a size; write a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return int(float(found[1]) * _SIZES[found[2]])


def format_duration(value: timedelta) -> str:
    """The shortest single-unit spelling that `parse_duration` reads back."""
    milliseconds = round(value.total_seconds() * 1000)
    for unit in ("w", "d", "h", "m", "s", "ms"):
        size = round(_UNITS[unit] * 1000)
        if milliseconds and milliseconds % size == 0 and (unit != "w" or milliseconds > 4 * size):
            return f"{milliseconds // size}{unit}"
    return "0"


def format_size(value: int) -> str:
    """The largest binary unit that divides it, or plain bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _SIZES[unit] == 0:
            return f"{value // _SIZES[unit]}{unit}"
    return f"{value}B"


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta():
        raise ValueError("must be longer than nothing")
    return value


def _url(value: str) -> str:
    """The message holds nothing of the value, which may hold a password."""
    if not _URL.fullmatch(value):
        raise ValueError("is neither a URL of https, http, ssh, git or file, nor an absolute path, nor user@host:path")
    return value


def _url_template(value: str) -> str:
    unknown = [name for name in re.findall(r"\{([^}]*)\}", value) if name not in {"owner", "name"}]
    if unknown:
        raise ValueError(f"knows {{owner}} and {{name}}, not {{{unknown[0]}}}")
    if "{name}" not in value:
        raise ValueError("needs {name}, or every repository would have the same upstream")
    return _url(value)


def _ref_pattern(value: str) -> str:
    if not value.startswith("refs/") or value.count("*") > 1 or re.search(r"[\s~^:?\[\\\x00-\x1f\x7f]|\.\.|//|@\{", value):
        raise ValueError(f"{shown(value)} is not a ref pattern; it begins with refs/ and has at most one *")
    if value.startswith(("refs/mirrord/", "refs/replace/")):
        raise ValueError(f"{shown(value)} is ours or unsafe and never comes from upstream")
    return value


def _repo(value: str) -> str:
    try:
        return MirrorName.parse(value).repo
    except MirrordError as error:
        raise ValueError(error.message) from error


def _absolute(value: Path) -> Path:
    if not value.is_absolute():
        raise ValueError(f"{shown(str(value))} is not an absolute path")
    return value


Duration = Annotated[timedelta, BeforeValidator(parse_duration), PlainSerializer(format_duration)]
Period = Annotated[Duration, AfterValidator(_positive)]
Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Url = Annotated[str, AfterValidator(_url)]
UrlTemplate = Annotated[str, AfterValidator(_url_template)]
RefPattern = Annotated[str, AfterValidator(_ref_pattern)]
Restart = Field(json_schema_extra={"restart": True})
"""Marks a setting that a reload refuses: what was built from it at the start would have to be built again."""


# -- the table --------------------------------------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class UpstreamSettings(_Section):
    url: UrlTemplate = "https://github.com/{owner}/{name}.git"
    fallbacks: tuple[UrlTemplate, ...] = ()
    refs: Annotated[tuple[RefPattern, ...], Field(min_length=1)] = ("refs/heads/*", "refs/tags/*")
    timeout: Period = timedelta(minutes=10)


class SyncSettings(_Section):
    interval: Duration = timedelta(hours=6)
    jitter: Duration = timedelta(minutes=10)
    concurrency: Annotated[int, Field(ge=1, le=64)] = 4


class AuditSettings(_Section):
    interval: Duration = timedelta(hours=24)
    level: AuditLevel = AuditLevel.CLOSURE
    content_interval: Duration = timedelta(days=7)
    heal: bool = True


class MaintenanceSettings(_Section):
    interval: Duration = timedelta(hours=24)


class CheckoutSettings(_Section):
    backend: Annotated[Backend, Restart] = Backend.AUTO
    history: History = History.SEALED
    ttl: Period = timedelta(hours=2)
    max: Annotated[int, Field(ge=1, le=100_000)] = 1024
    prewarm: bool = True
    template_bytes: Size = 50 * 1024**3


class DatasetSettings(_Section):
    watch: Annotated[bool, Restart] = True


class AccessSettings(_Section):
    group: str = "mirrord"
    admins: tuple[str | int, ...] = ()


class LogSettings(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Annotated[Literal["auto", "json", "console"], Restart] = "auto"


class MirrorSettings(_Section):
    repo: Annotated[str, AfterValidator(_repo)]
    url: Url | None = None


def default_state_dir() -> Path:
    """Systemd's StateDirectory=, where it starts us; root's is /var/lib/mirrord; a user's is below XDG_STATE_HOME."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.partition(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/mirrord")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "mirrord"


def default_socket() -> Path:
    """Root's is /run/mirrord/mirrord.sock; a user's is below XDG_RUNTIME_DIR."""
    if os.geteuid() == 0:
        return Path("/run/mirrord/mirrord.sock")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}") / "mirrord/mirrord.sock"


class Settings(_Section):
    """All settings, checked. `[[mirror]]` tables are `mirror`."""

    state_dir: Annotated[AbsolutePath, Restart] = Field(default_factory=default_state_dir)
    socket: Annotated[AbsolutePath, Restart] = Field(default_factory=default_socket)
    upstream: UpstreamSettings = UpstreamSettings()
    sync: SyncSettings = SyncSettings()
    audit: AuditSettings = AuditSettings()
    maintenance: MaintenanceSettings = MaintenanceSettings()
    checkouts: CheckoutSettings = CheckoutSettings()
    datasets: DatasetSettings = DatasetSettings()
    access: AccessSettings = AccessSettings()
    log: LogSettings = LogSettings()
    mirror: tuple[MirrorSettings, ...] = ()


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong in a configuration file; `line` counts from 1."""

    key: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return f"{place}{self.key}: {self.message}" if self.key else f"{place}{self.message}"


def find_path() -> Path | None:
    """The file in use when nobody names one: MIRRORD_CONFIG, else the system's or the user's where it exists."""
    if named := os.environ.get("MIRRORD_CONFIG"):
        return Path(named)
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = Path("/etc/mirrord/config.toml") if os.geteuid() == 0 else home / "mirrord/config.toml"
    return path if path.exists() else None


def load(path: Path | None) -> Settings:
    """Read settings from a file, or the defaults for None. Raises InvalidConfigError with all `faults`."""
    if path is None:
        return Settings()
    text = _read_text(path)
    faults: list[Fault] = []
    try:
        return Settings.model_validate(toml.loads(text))
    except ValidationError as error:
        faults = [_fault(e["loc"], e["type"], e["msg"], text) for e in error.errors() if not _follows(e, error.errors())]
    except toml.TomlDecodeError as error:
        faults = [Fault("", f"not TOML: {_without_values(error.msg)}", error.lineno)]
    except (ValueError, IndexError, TypeError, KeyError, AttributeError) as error:  # toml 0.10.2 lets its own slips through
        faults = [Fault("", f"not TOML: {_without_values(str(error))}")]
    raise _refusal(path, faults)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _refusal(path, [Fault("", f"not readable: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise _refusal(path, [Fault("", "not UTF-8")]) from error


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
    return re.sub(r"\{.*", "", re.sub(r"\S*://\S*", "a URL", message), flags=re.DOTALL).strip()


def _follows(error: ErrorDetails, errors: list[ErrorDetails]) -> bool:
    """Whether a list is too short only because of faults in it, which are told."""
    return error["type"] == "too_short" and any(other["loc"][:-1] == error["loc"] for other in errors)


def _fault(loc: tuple[int | str, ...], kind: str, message: str, text: str) -> Fault:
    path = [part for part in loc if not isinstance(part, str) or part not in {"str", "int"}]
    key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    if kind == "extra_forbidden":
        message = "unknown key" + _suggestion([str(p) for p in path if isinstance(p, str)])
    elif kind == "missing":
        message = "is required"
    return Fault(key, message.removeprefix("Value error, "), _line_of(path, text))


def setting_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every setting's dotted key, and whether changing it needs a restart."""
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from setting_keys(inner, f"{prefix}{name}.")
        else:
            extra = info.json_schema_extra
            yield f"{prefix}{name}", bool(isinstance(extra, dict) and extra.get("restart"))


def _suggestion(path: list[str]) -> str:
    known = [key for key, _ in setting_keys()]
    sections = sorted({key.partition(".")[0] for key in known})
    mirror = [f"mirror.{name}" for name in MirrorSettings.model_fields]
    wrong = ".".join(path)
    close = difflib.get_close_matches(wrong, [*known, *mirror, *(sections if len(path) == 1 else ())], n=1, cutoff=0.6)
    same_leaf = [key for key in known if key.rpartition(".")[2] == path[-1]]
    guess = close or same_leaf
    return f"; did you mean {guess[0]}?" if guess else ""


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


# -- comparing --------------------------------------------------------------------------------------------------------


def compare(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """Which keys a reload from `old` to `new` applies, and which it refuses because they need a restart."""
    changed = [(key, restart) for key, restart in setting_keys() if _value(old, key) != _value(new, key)]
    return [key for key, restart in changed if not restart], [key for key, restart in changed if restart]


def merge_live(old: Settings, new: Settings) -> Settings:
    """`new`, with the settings that need a restart as they are in `old`."""
    result = new
    for key in compare(old, new)[1]:
        section, _, name = key.rpartition(".")
        if section:
            inner = getattr(result, section).model_copy(update={name: _value(old, key)})
            result = result.model_copy(update={section: inner})
        else:
            result = result.model_copy(update={name: _value(old, key)})
    return result


def _value(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value
