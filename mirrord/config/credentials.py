"""The tables `[[credential]]`: what upstreams are asked with, and what fits together in one."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import AfterValidator, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from . import values
from .values import AbsolutePath, Section

SECRET_SOURCES = ("password_file", "command", "bearer_file", "github_app", "systemd")
_SSH_ONLY = ("ssh_key", "known_hosts", "accept_new")
_HTTP_ONLY = ("ca_file", "client_cert", "client_key", "proxy")


class AppSettings(Section):
    """A GitHub App. Its installation is named, or found by the owner of the repositories."""

    id: Annotated[str | StrictInt, AfterValidator(values.one_line)]
    key_file: AbsolutePath
    installation: Annotated[StrictInt, Field(ge=1)] | None = None
    owner: Annotated[str, AfterValidator(values.one_line)] | None = None
    api: Annotated[str, AfterValidator(values.web_url)] | None = None

    @model_validator(mode="after")
    def _names_one_installation(self) -> Self:
        if (self.installation is None) == (self.owner is None):
            raise ValueError("needs one of installation and owner")
        return self


class CredentialSettings(Section):
    """What URLs below `url` are asked with. `proxy` may have a password: see `config show`."""

    url: Annotated[str, AfterValidator(values.credential_url)]
    username: Annotated[str, AfterValidator(values.one_line)] | None = None
    password_file: AbsolutePath | None = None
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    bearer_file: AbsolutePath | None = None
    github_app: AppSettings | None = None
    systemd: Annotated[str, AfterValidator(values.systemd_name)] | None = None
    ssh_key: AbsolutePath | None = None
    known_hosts: AbsolutePath | None = None
    accept_new: StrictBool = False
    ca_file: AbsolutePath | None = None
    client_cert: AbsolutePath | None = None
    client_key: AbsolutePath | None = None
    proxy: Annotated[str, AfterValidator(values.proxy)] | None = None

    @property
    def sources(self) -> list[str]:
        """The keys that say where its secret comes from."""
        return [name for name in SECRET_SOURCES if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if faults := list(self._iter_faults()):
            raise ValueError("; ".join(faults))
        return self

    def _iter_faults(self) -> Iterator[str]:
        is_http = self.url.lower().startswith(("http://", "https://"))
        if len(self.sources) > 1:
            yield f"has {' and '.join(self.sources)}, and may have one"
        if self.username is not None and not self.sources:
            yield f"has username without one of {', '.join(SECRET_SOURCES)}"
        if self.username is not None and {"bearer_file", "github_app"} & {*self.sources}:
            yield f"has username, which {self.sources[0]} does not use"
        if self.client_key and not self.client_cert:
            yield "has client_key without client_cert"
        if self.accept_new and not self.known_hosts:
            yield "has accept_new without known_hosts, the file that new keys are added to"
        foreign = _SSH_ONLY if is_http else (*SECRET_SOURCES, *_HTTP_ONLY)
        if wrong := [name for name in foreign if getattr(self, name) not in (None, False)]:
            yield f"has {', '.join(wrong)}, which a URL of {'HTTP' if is_http else 'ssh'} lacks"
        used = {*type(self).model_fields} - {"url", "accept_new", "username"}
        if all(getattr(self, name) is None for name in used):
            yield "has nothing but a URL"


def one_each(entries: tuple[CredentialSettings, ...]) -> tuple[CredentialSettings, ...]:
    """Refuse a second table for the same URL."""
    urls: set[str] = set()
    for number, entry in enumerate(entries):
        if (url := entry.url.rstrip("/")) in urls:
            context = {"url": entry.url, "place": (number, "url")}
            raise PydanticCustomError("twice", "{url} occurs twice", context)
        urls.add(url)
    return entries
