"""The table of settings, with bounds, and which of them a reload changes."""

from collections.abc import Iterator
from datetime import timedelta
from operator import attrgetter
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictBool, StrictInt
from pydantic_core import PydanticCustomError

from ..model import AuditLevel, Backend, History, ObjectSource, Policy, SteeringKind
from ..places import default_socket, default_state_dir
from . import values
from .credentials import CredentialSettings, one_each
from .values import AbsolutePath, Count, Duration, Period, Restart, Section, Size, UrlTemplate


class UpstreamSettings(Section):
    url: UrlTemplate = "https://github.com/{owner}/{name}.git"
    fallbacks: tuple[UrlTemplate, ...] = ()
    refs: Annotated[
        tuple[Annotated[str, AfterValidator(values.ref_pattern)], ...], Field(min_length=1)
    ] = ("refs/heads/*", "refs/tags/*")
    timeout: Period = timedelta(minutes=10)


class ServiceSettings(Section):
    namespace: Annotated[Literal["auto", "never"], Restart] = "auto"


class SyncSettings(Section):
    interval: Duration = timedelta(hours=6)
    # forges answer bursts with 429, also to git
    jitter: Duration = timedelta(minutes=10)
    concurrency: Annotated[StrictInt, Field(ge=1, le=64)] = 4


class AuditSettings(Section):
    """`accept` names known findings: kind, mirror, and the commit, file or ref."""

    interval: Duration = timedelta(hours=24)
    level: AuditLevel = AuditLevel.CLOSURE
    # reading all content takes ten times as long as level closure (29 s for 419,000 objects)
    content_interval: Duration = timedelta(days=7)
    heal: StrictBool = True
    accept: tuple[Annotated[str, AfterValidator(values.acceptance)], ...] = ()


class MaintenanceSettings(Section):
    interval: Duration = timedelta(hours=24)


class CheckoutSettings(Section):
    backend: Backend = Backend.AUTO
    objects: ObjectSource = ObjectSource.AUTO
    history: History = History.SEALED
    # so long a killed harness keeps checkouts that are bound to no process
    ttl: Period = timedelta(hours=2)
    # each is a mount: beside 3,000 a mount takes 0.32 ms instead of 0.18
    max: Count = 1024
    prewarm: StrictBool = True
    template_bytes: Size = 50 * 1024**3
    template_ttl: Period = timedelta(days=7)
    disk_reserve: Size = 1024**3
    # with room for a node_modules: a fork with 210,000 ignored files was once refused
    copy_files: Annotated[StrictInt, Field(ge=1, le=10_000_000)] = 1_000_000
    copy_bytes: Size = 16 * 1024**3
    copy_timeout: Period = timedelta(minutes=10)
    # a hostile .gitignore can hold a worker for as long
    diff_timeout: Period = timedelta(minutes=1)


class DatasetSettings(Section):
    watch: StrictBool = True
    submodules: StrictBool = True
    lfs: StrictBool = False


class AccessSettings(Section):
    group: Annotated[str, AfterValidator(values.account)] = "mirrord"
    admins: tuple[Annotated[str | int, BeforeValidator(values.user)], ...] = ()
    commits: Literal["recorded", "any"] = "recorded"
    owners: Literal["none", "subuid"] = "subuid"
    # a quarter of all: one member leaves room for others
    max_per_user: Count = 256
    requests_per_user: Count = 512
    bytes_per_user: Size = 100 * 1024**3
    # two requests for each of 1,000 checkouts: what one event loop answers in all (docs/limits.md)
    rate_per_user: Annotated[StrictInt, Field(ge=0, le=100_000)] = 2000
    ttl_max: Period = timedelta(hours=24)


class RuleSettings(Section):
    """A configured rule about what could steer tests. docs/grading.md describes the patterns."""

    name: Annotated[str, AfterValidator(values.rule_name)]
    paths: Annotated[
        tuple[Annotated[str, AfterValidator(values.path_pattern)], ...], Field(min_length=1)
    ]
    policy: Policy | None = None


class GradingSettings(Section):
    """`policies` are by kind. A configured rule's own policy takes precedence."""

    policy: Policy = Policy.REPORT
    policies: dict[SteeringKind, Policy] = Field(default_factory=dict)
    file_bytes: Size = 1024**2
    rule: tuple[RuleSettings, ...] = ()


class EnvironmentSettings(Section):
    """A change applies to new builds, and has failed ones retried; of `leaks` to new checkouts."""

    index: Annotated[str, AfterValidator(values.index)] = ""
    network: StrictBool = True
    leaks: Literal["report", "hide", "refuse"] = "report"
    auth_file: Annotated[str, AfterValidator(values.path_or_nothing)] = ""
    # images with CUDA have 5 to 10 GiB
    image_bytes: Size = 20 * 1024**3


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class WebSettings(Section):
    """`hosts` are names, besides the listening address, that a request's Host may have."""

    listen: Annotated[str, AfterValidator(values.listen)] = ""
    hosts: tuple[Annotated[str, AfterValidator(values.host), AfterValidator(str.lower)], ...] = ()


class DockerSettings(Section):
    volumes: StrictBool = False


class CatalogSettings(Section):
    url: Annotated[str, AfterValidator(values.catalog), Restart] = ""


class StoreSettings(Section):
    url: Annotated[
        str, AfterValidator(values.store), AfterValidator(lambda url: url.rstrip("/")), Restart
    ] = ""


class MirrorSettings(Section):
    repo: Annotated[str, AfterValidator(values.repo)]
    url: Annotated[str, AfterValidator(values.url)] | None = None


def _distinct(mirrors: tuple[MirrorSettings, ...]) -> tuple[MirrorSettings, ...]:
    """Refuse a second table of the same mirror, in any letter case."""
    seen: set[str] = set()
    for number, mirror in enumerate(mirrors):
        if mirror.repo.lower() in seen:
            context = {"repo": mirror.repo, "place": (number, "repo")}
            raise PydanticCustomError("twice", "{repo} occurs twice", context)
        seen.add(mirror.repo.lower())
    return mirrors


class Settings(Section):
    """All settings. `mirror` has the `[[mirror]]` tables, `credential` the `[[credential]]`."""

    state_dir: Annotated[AbsolutePath, Restart] = Field(default_factory=default_state_dir)
    socket: Annotated[AbsolutePath, Restart] = Field(
        default_factory=lambda given: default_socket(given["state_dir"])
    )
    upstream: UpstreamSettings = UpstreamSettings()
    service: ServiceSettings = ServiceSettings()
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
    credential: Annotated[tuple[CredentialSettings, ...], AfterValidator(one_each)] = ()


def setting_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Iterate over the dotted keys of settings, each with whether a change needs a restart."""
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from setting_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", Restart in info.metadata


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
