"""Upstreams: their URLs without secrets, the limits of their hosts, the bisection of failures.

Accepts https, http, ssh, git, file, an absolute path, and the scp-like `user@host:path`. Refuses a
transport that names a program (`ext::`), a relative path, and a host that looks like an option.
"""

import math
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import anyio

from ... import errors
from ...config import Settings
from ...errors import (
    InvalidUrlError,
    MirrordError,
    UpstreamThrottledError,
    UpstreamUnavailableError,
)
from ...git.configuration import Remote
from ...model import FROM_IMAGE, MirrorName, shown
from ...telemetry import mask_url, without_userinfo
from ...units import Backoff

LOCAL = "local"  # the host of an upstream that is a directory


@dataclass(frozen=True, slots=True)
class Upstream:
    """An upstream whose URL was accepted. Limits are counted by `host`."""

    url: str = field(repr=False)
    remote: Remote
    host: str

    @property
    def is_local(self) -> bool:
        return self.host == LOCAL

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return mask_url(self.url)


def upstream_url(template: str, name: MirrorName) -> str:
    return template.replace("{owner}", name.path).replace("{name}", name.name)


def image_upstream(settings: Settings, name: MirrorName) -> Path:
    """Return where the repository of an image is, whose mirror has this name."""
    return settings.state_dir / "environments/repositories" / name.key


def default_url(settings: Settings, name: MirrorName) -> str:
    """Return the URL of the mirror's [[mirror]] table, or else the one that `url` makes."""
    if name.owner == FROM_IMAGE:
        return str(image_upstream(settings, name))
    own = (m.url for m in settings.mirror if m.url and MirrorName.parse(m.repo).key == name.key)
    return next(own, None) or upstream_url(settings.upstream.url, name)


def is_same_host(a: str, b: str) -> bool:
    """Compare hosts of two upstreams; a port of ssh may serve the same as one of https."""
    (name, _, port), (other, _, other_port) = a.lower().partition(":"), b.lower().partition(":")
    return name == other and (port == other_port or not port or not other_port)


def public_url(text: str) -> str | None:
    """Return a URL without user information; None where it may still hold a secret."""
    try:
        bare = parse_upstream(text).remote.url
    except InvalidUrlError:
        return None
    return bare if mask_url(bare) == bare else None


_NOT_SPLIT = (
    "its host and port cannot be told from its password; write / as %2F, @ as %40, : as %3A"
    " and % as %25 in a password, or keep it out of the URL with a [[credential]]"
)
_SCHEMES = {"https", "http", "ssh", "git", "file"}
# as git tells an scp-like name from a URL: no slashes right after the colon
_SCP = re.compile(r"(?:[A-Za-z0-9._-]+@)?([A-Za-z0-9][A-Za-z0-9.-]*):(?!/?/)([^\s].*)")
# `ext::COMMAND` runs a command: gitremote-helpers(7)
_HELPER = re.compile(r"[A-Za-z0-9+.-]*::")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f:.]+")


def parse_upstream(text: str) -> Upstream:
    """Read an upstream URL or path; raises InvalidUrlError."""
    if not text or len(text) > 4000 or re.search(r"[\x00-\x20\x7f]", text):
        raise _refused(text, "it is empty, too long, or has spaces or control characters")
    if text.startswith("-") or _HELPER.match(text):
        raise _refused(text, "it names an option or a program")
    if text.startswith("/"):
        return Upstream(text, Remote(text), LOCAL)
    if "://" not in text:
        match = _SCP.fullmatch(text)
        if not match or match[2].startswith("-") or match[1].lower() in _SCHEMES:
            raise _refused(text, "it is neither a URL, nor an absolute path, nor user@host:path")
        return Upstream(text, Remote(text), match[1].lower())
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _refused(text, _NOT_SPLIT) from error  # which quotes what may be a password
    scheme = parts.scheme.lower()
    if scheme not in _SCHEMES:
        accepted = ", ".join(sorted(_SCHEMES))
        raise _refused(text, f"the scheme {shown(scheme)} is not one of {accepted}")
    if scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise _refused(text, "a file URL needs an absolute path: file:///srv/git/name.git")
        is_plain = not parts.query and not parts.fragment
        return Upstream(text, Remote(f"file://{parts.path}" if is_plain else text), LOCAL)
    if not parts.hostname or not _HOST.fullmatch(parts.hostname):
        raise _refused(text, "its host is not a host name")
    host = parts.hostname if port is None else f"{parts.hostname}:{port}"
    server, user = parts.netloc.rpartition("@")[2], parts.username
    if scheme == "ssh":  # its user is no secret and must stay; a password has no use there
        if user is not None and (not user or user.startswith("-")):
            raise _refused(text, "its user looks like an option")
        netloc = f"{user}@{server}" if user else server
        return Upstream(text, Remote(urlunsplit(parts._replace(netloc=netloc))), host)
    username = unquote(user) if user is not None else None
    password = unquote(parts.password) if parts.password is not None else None
    bare = urlunsplit(parts._replace(netloc=server))
    if without_userinfo(bare) != bare:  # it would be an argument of git
        raise _refused(text, _NOT_SPLIT)
    return Upstream(text, Remote(bare, username, password), host)


def _refused(text: str, why: str) -> InvalidUrlError:
    return InvalidUrlError(
        f"cannot use upstream {shown(mask_url(text), 200)}: {why}",
        hint="give https://host/owner/name.git, ssh://, git://, file:///path, /path or"
        " user@host:path",
    )


@dataclass(slots=True)
class _Host:
    limiter: anyio.CapacityLimiter
    throttling: Backoff
    illness: Backoff
    blocked_until: float = -math.inf
    cause: UpstreamThrottledError | UpstreamUnavailableError | None = None


# so that the mirrors of a host do not all come back at the same moment
_SPREAD = 0.2  # of pauses
_PATIENCE_S = 90.0
# of a request that answers no operation
REQUEST_PATIENCE_S = 10.0


class HostLimits:
    """The limits of upstream hosts: concurrent connections, and a pause where one is unwell.

    A host that throttles is left alone until its Retry-After, or for a pause that doubles with each
    refusal; one that does not answer or cuts connections, for a shorter pause that doubles too. In
    a pause its mirrors fail at once instead of queueing; after it they try one at a time until one
    succeeds. `concurrency` is read at each use, so that a reload applies.
    """

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
        """Hold one connection to a host; raises UpstreamThrottledError during its pause."""
        if name not in self._hosts:
            self._hosts[name] = _Host(
                anyio.CapacityLimiter(1),
                self._backoff(timedelta(seconds=30), timedelta(hours=1)),
                self._backoff(timedelta(seconds=2), timedelta(minutes=15)),
            )
        host = self._hosts[name]
        host.limiter.total_tokens = 1 if host.cause else self._concurrency()
        async with host.limiter:
            if host.cause and (wait_s := self.pause_s(name)) > 0:
                is_throttled = isinstance(host.cause, UpstreamThrottledError)
                fact = "rate-limited" if is_throttled else "it is unwell, and left alone"
                raise type(host.cause)(
                    f"cannot ask upstream host {name}: {fact} for another {wait_s:.0f} s",
                    hint=f"the next scheduled sync tries again; it said: {host.cause.message}",
                    retry_after_s=round(wait_s, 1),
                    host=name,
                )
            try:
                yield
            except (UpstreamThrottledError, UpstreamUnavailableError) as error:
                # all directories share this name: one that fails must not pause the others
                if name != LOCAL:
                    self._pause(host, error)
                raise
            host.throttling.reset()
            host.illness.reset()
            host.cause = None

    def pause_s(self, name: str) -> float:
        """Return how long a host is still left alone."""
        host = self._hosts.get(name)
        return max(0.0, host.blocked_until - self._clock()) if host else 0.0

    async def wait(self, name: str, *, patience_s: float = _PATIENCE_S) -> None:
        """Wait for the end of a short pause. The caller holds no lock."""
        if self.pause_s(name) <= patience_s:
            await anyio.sleep(self.pause_s(name))

    def _backoff(self, first: timedelta, longest: timedelta) -> Backoff:
        return Backoff(first, longest, spread=_SPREAD, chance=self._chance)

    def _pause(self, host: _Host, error: UpstreamThrottledError | UpstreamUnavailableError) -> None:
        is_throttled = isinstance(error, UpstreamThrottledError)
        pause = (host.throttling if is_throttled else host.illness).next().total_seconds()
        if (asked := error.facts.get("retry_after_s")) is not None:
            # only ever later: a request before the named moment is refused again
            pause = float(asked) * (1 + _SPREAD * self._chance())
        host.blocked_until = max(host.blocked_until, self._clock() + pause)
        host.cause = error


# -- bisection: everything arrives but what a damaged upstream cannot give -------------------------
#
# One damaged object upstream makes a fetch of everything fail. Where a failure shows which items
# share its cause, `find_bad` leaves those out and tries the others, one step for each cause. Where
# it shows nothing, groups are halved, and small ones tried item by item.

T = TypeVar("T")


async def find_bad(
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Awaitable[None]],
    *,
    is_item_error: Callable[[MirrordError], bool],
    max_failures: int,
    max_first_failures: int,
    blame: Callable[[MirrordError, Sequence[T]], Awaitable[Collection[T]]] | None = None,
    sort: Callable[[Sequence[T]], Sequence[T] | None] = lambda _: None,
) -> dict[T, MirrordError]:
    """Call `attempt` on `items`, then on ever smaller groups; return the items that failed.

    Raises an error that is not about items. `blame` returns all items that certainly fail for the
    cause of a group's failure. `sort` puts those first that make others fail, or returns None where
    that is unknown. Gives up on the remaining items after `max_failures`, or after
    `max_first_failures` of single items before any success.
    """
    bad: dict[T, MirrordError] = {}
    pending: list[Sequence[T]] = [items]
    failures = single_failures = 0
    has_succeeded = False
    while pending:
        if not (group := [item for item in pending.pop() if item not in bad]):
            continue
        try:
            await attempt(group)
            has_succeeded = True
            continue
        except MirrordError as raised:
            if not is_item_error(raised):
                raise
            error = raised
        failures, single_failures = failures + 1, single_failures + (len(group) == 1)
        blamed = set(group) if len(group) == 1 else set[T]()
        blamed.update(await blame(error, group) if blame else ())
        bad.update({item: error for item in items if item in blamed and item not in bad})
        left = [item for item in group if item not in bad]
        ordered = sort(left)
        if failures > max_failures or (not has_succeeded and single_failures >= max_first_failures):
            untried = "cannot ask for it by itself: too many others failed"
            bad |= dict.fromkeys(left, type(error)(untried, hint=error.hint))
        elif len(left) < len(group) and failures <= 3:  # later, they are halved even so
            pending.append(left)
        elif ordered is None and len(left) <= 8:
            pending += [[item] for item in reversed(left)]
        else:
            # in unknown order the first is the likeliest to succeed, and makes the others cheaper
            middle = 1 if failures == 1 and ordered is None else len(left) // 2
            ordered = ordered or left
            pending += [ordered[middle:], ordered[:middle]]
    return bad


_WHOLE_UPSTREAM = (
    errors.UpstreamAuthError, errors.UpstreamNotFoundError, errors.UpstreamThrottledError,
    errors.UpstreamUnavailableError, errors.UpstreamEmptyError, errors.DiskFullError,
    errors.GitKilledError,
)  # fmt: skip
_CONNECTION = re.compile(
    r"unable to access|SSL (certificate|connect|routines)|redirects to another host",
    re.IGNORECASE,
)


def blames_objects(error: MirrordError) -> bool:
    """True if some of the wanted objects may be the cause, so that others could be fetched."""
    return not isinstance(error, _WHOLE_UPSTREAM) and not _CONNECTION.search(error.message)
