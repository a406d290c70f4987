"""Where a mirror comes from: URLs read, checked, and split from their secrets.

Owns which URLs are acceptable: https, http, ssh, git, file, an absolute path, and the scp-like `user@host:path`. Never contacts
anybody. A transport that names a program (`ext::`), a relative path and a host that looks like an option are refused.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import anyio

from ..errors import InvalidUrlError, UpstreamThrottledError
from ..git.environment import Remote
from ..git.errors import masked_url
from ..model import MirrorName, shown

_SCHEMES = {"https", "http", "ssh", "git", "file"}
_SCP = re.compile(r"(?:[A-Za-z0-9._-]+@)?([A-Za-z0-9][A-Za-z0-9.-]*):(?!/?/)([^\s].*)")
_HELPER = re.compile(r"[A-Za-z0-9+.-]*::")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f:.]+")
_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Upstream:
    """An upstream that may be contacted. `host` is what its limits are counted by."""

    url: str = field(repr=False)
    remote: Remote
    host: str

    @property
    def is_local(self) -> bool:
        return self.host == _LOCAL

    @property
    def shown(self) -> str:
        """The URL as it may appear anywhere."""
        return masked_url(self.url)


def upstream_url(template: str, name: MirrorName) -> str:
    """Fill `{owner}` and `{name}` in."""
    return template.replace("{owner}", name.owner).replace("{name}", name.name)


def parse_upstream(text: str) -> Upstream:
    """Read an upstream URL or path; raises InvalidUrlError."""
    if not text or len(text) > 4000 or _CONTROL.search(text):
        raise _refused(text, "it is empty, too long, or holds blanks or control characters")
    if text.startswith("-") or _HELPER.match(text):
        raise _refused(text, "it names an option or a program")
    if text.startswith("/"):
        return Upstream(text, Remote(text), _LOCAL)
    if "://" not in text:
        return _scp_like(text)
    return _url(text)


def _scp_like(text: str) -> Upstream:
    found = _SCP.fullmatch(text)
    if not found or found[2].startswith("-") or found[1].lower() in _SCHEMES:
        raise _refused(text, "it is neither a URL, nor an absolute path, nor user@host:path")
    return Upstream(text, Remote(text), found[1].lower())


def _url(text: str) -> Upstream:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _refused(text, str(error)) from error
    scheme = parts.scheme.lower()
    if scheme not in _SCHEMES:
        raise _refused(
            text, f"the scheme {shown(scheme)} is not one of {', '.join(sorted(_SCHEMES))}"
        )
    if scheme == "file":
        return _file(text, parts)
    if not parts.hostname or not _HOST.fullmatch(parts.hostname):
        raise _refused(text, "its host is not a host name")
    host = parts.hostname if port is None else f"{parts.hostname}:{port}"
    return Upstream(text, _remote(scheme, parts), host)


def _file(text: str, parts: SplitResult) -> Upstream:
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise _refused(text, "a file URL needs an absolute path: file:///srv/git/name.git")
    return Upstream(
        text,
        Remote(f"file://{parts.path}" if not parts.query and not parts.fragment else text),
        _LOCAL,
    )


def _remote(scheme: str, parts: SplitResult) -> Remote:
    """The URL for the command line. An ssh user is no secret and must stay; a password has no use there."""
    server = parts.netloc.rpartition("@")[2]
    if scheme == "ssh":
        user = parts.username
        if user is not None and (not user or user.startswith("-")):
            raise _refused(urlunsplit(parts), "its user looks like an option")
        return Remote(urlunsplit(parts._replace(netloc=f"{user}@{server}" if user else server)))
    username = unquote(parts.username) if parts.username is not None else None
    password = unquote(parts.password) if parts.password is not None else None
    return Remote(urlunsplit(parts._replace(netloc=server)), username, password)


def _refused(text: str, why: str) -> InvalidUrlError:
    return InvalidUrlError(
        f"cannot use upstream {shown(masked_url(text), 200)}: {why}",
        hint="give https://host/owner/name.git, ssh://, git://, file:///path, /path or user@host:path",
    )


_FIRST_S = 30.0
_LONGEST_S = 3600.0
_LONGEST_ASKED_S = 86400.0
_SPREAD = 0.2


@dataclass(slots=True)
class _Host:
    limiter: anyio.CapacityLimiter
    refusals: int = 0
    blocked_until: float = field(default=-math.inf)


class Hosts:
    """The upstream hosts. `concurrency` is read at each use, so that a reload applies."""

    def __init__(
        self,
        *,
        concurrency: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._concurrency = concurrency
        self._clock = clock
        self._chance = chance
        self._hosts: dict[str, _Host] = {}

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """One connection to a host. Raises UpstreamThrottledError while the host wants to be left alone."""
        host = self._host(name)
        async with host.limiter:
            self._refuse_while_blocked(name, host)
            try:
                yield
            except UpstreamThrottledError as error:
                self._block(host, error.facts.get("retry_after_s"))
                raise
            host.refusals = 0

    def _host(self, name: str) -> _Host:
        host = self._hosts.setdefault(name, _Host(anyio.CapacityLimiter(self._concurrency())))
        host.limiter.total_tokens = self._concurrency()
        return host

    def _refuse_while_blocked(self, name: str, host: _Host) -> None:
        left = host.blocked_until - self._clock()
        if left > 0:
            raise UpstreamThrottledError(
                f"cannot ask upstream host {name}: it wants no requests for another {left:.0f} s",
                hint="the next scheduled sync comes back to it",
                retry_after_s=round(left, 1),
                host=name,
            )

    def _block(self, host: _Host, asked_s: float | None) -> None:
        host.refusals += 1
        own = min(_FIRST_S * 2 ** (host.refusals - 1), _LONGEST_S) * (
            1 + _SPREAD * (2 * self._chance() - 1)
        )
        wait = (
            own
            if asked_s is None
            else min(float(asked_s), _LONGEST_ASKED_S) * (1 + _SPREAD * self._chance())
        )
        host.blocked_until = max(host.blocked_until, self._clock() + wait)
