"""The table of settings: every key with its type, bounds and default, and whether a reload applies it. Frozen."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt
from pydantic_core import PydanticCustomError

from ..model import AuditLevel, Backend, History
from ..places import default_socket, default_state_dir
from .values import (
    AbsolutePath,
    Acceptance,
    Duration,
    Group,
    Period,
    RefPattern,
    Repo,
    Restart,
    Size,
    Url,
    UrlTemplate,
    User,
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UpstreamSettings(_Section):
    url: UrlTemplate = "https://github.com/{owner}/{name}.git"
    fallbacks: tuple[UrlTemplate, ...] = ()
    refs: Annotated[tuple[RefPattern, ...], Field(min_length=1)] = ("refs/heads/*", "refs/tags/*")
    timeout: Period = timedelta(minutes=10)


class SyncSettings(_Section):
    interval: Duration = timedelta(hours=6)
    jitter: Duration = timedelta(minutes=10)
    concurrency: Annotated[StrictInt, Field(ge=1, le=64)] = 4


class AuditSettings(_Section):
    interval: Duration = timedelta(hours=24)
    level: AuditLevel = AuditLevel.CLOSURE
    content_interval: Duration = timedelta(days=7)
    heal: StrictBool = True
    accept: tuple[Acceptance, ...] = ()


class MaintenanceSettings(_Section):
    interval: Duration = timedelta(hours=24)


class CheckoutSettings(_Section):
    backend: Annotated[Backend, Restart] = Backend.AUTO
    history: History = History.SEALED
    ttl: Period = timedelta(hours=2)
    max: Annotated[StrictInt, Field(ge=1, le=100_000)] = 1024
    prewarm: StrictBool = True
    template_bytes: Size = 50 * 1024**3
    template_ttl: Period = timedelta(days=7)


class DatasetSettings(_Section):
    watch: Annotated[StrictBool, Restart] = True


class AccessSettings(_Section):
    group: Group = "mirrord"
    admins: tuple[User, ...] = ()
    commits: Literal["recorded", "any"] = "recorded"
    owners: Literal["none", "subuid"] = "subuid"
    max_per_user: Annotated[StrictInt, Field(ge=1, le=100_000)] = 256
    ttl_max: Period = timedelta(hours=24)


class LogSettings(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Annotated[Literal["auto", "json", "console"], Restart] = "auto"


class MirrorSettings(_Section):
    repo: Repo
    url: Url | None = None


def _distinct(mirrors: tuple[MirrorSettings, ...]) -> tuple[MirrorSettings, ...]:
    """Two spellings that differ in letter case are one mirror, which has one URL."""
    for number, mirror in enumerate(mirrors):
        if any(mirror.repo.lower() == other.repo.lower() for other in mirrors[:number]):
            raise PydanticCustomError(
                "twice", "{repo} is there twice", {"repo": mirror.repo, "place": (number, "repo")}
            )
    return mirrors


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
    mirror: Annotated[tuple[MirrorSettings, ...], AfterValidator(_distinct)] = ()


def setting_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every setting's dotted key, and whether changing it needs a restart."""
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from setting_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", Restart in info.metadata


def compare(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """Which keys a reload from `old` to `new` applies, and which it refuses because they need a restart."""
    changed = [
        (key, restart) for key, restart in setting_keys() if _value(old, key) != _value(new, key)
    ]
    return [key for key, restart in changed if not restart], [
        key for key, restart in changed if restart
    ]


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
