"""What git says on stderr, as our errors; and URLs without their secrets.

Owns one table: a pattern, a class, a hint. The first row that matches wins. Never shows a secret: everything that leaves here
went through `masked_url`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from ..errors import (
    CorruptObjectError,
    DamagedMirrorError,
    DiskFullError,
    GitFailedError,
    GitKilledError,
    MirrordError,
    UpstreamAuthError,
    UpstreamError,
    UpstreamNotFoundError,
    UpstreamThrottledError,
    UpstreamTimeoutError,
)
from ..model import utc_now

_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://)([^/\s'\"]+)@")
_QUERY = re.compile(
    r"([?&;][^=\s&;'\"]*(?:token|key|secret|passw|pwd|sig|auth|credential)[^=\s&;'\"]*=)[^&;#\s'\"]+",
    re.IGNORECASE,
)


def masked_url(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` with the secrets of all URLs in it hidden: user information, and query values that look like tokens."""
    text = _USERINFO.sub(_mask_userinfo, text)
    text = _QUERY.sub(r"\1***", text)
    for secret in secrets:
        if (
            len(secret) > 3
        ):  # hiding a shorter one would blank half the sentence, and guards nothing
            text = text.replace(secret, "***")
    return text


def _mask_userinfo(match: re.Match[str]) -> str:
    scheme, separator, userinfo = match.groups()
    if scheme.lower() in {"ssh", "git+ssh", "ssh+git"}:
        user, colon, _ = userinfo.partition(":")
        return f"{scheme}{separator}{user}{':***' if colon else ''}@"
    return f"{scheme}{separator}***@"


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    error: type[MirrordError]
    hint: str


def _rule(pattern: str, error: type[MirrordError], hint: str) -> _Rule:
    return _Rule(re.compile(pattern, re.IGNORECASE), error, hint)


_DISK_FULL = _rule(
    r"no space left on device|disk quota exceeded",
    DiskFullError,
    "free space below the state directory; nothing was changed",
)
_UPSTREAM_RULES = (
    _rule(
        r"returned error: 429|too many requests",
        UpstreamThrottledError,
        "the next scheduled sync waits as long as upstream asked",
    ),
    _rule(
        r"authentication failed|could not read (username|password)|terminal prompts disabled|returned error: 40[13]"
        r"|permission denied \(|host key verification failed|access denied|no supported authentication",
        UpstreamAuthError,
        "the repository may be private or absent: give a URL with credentials, or a key to the daemon's user; nobody is asked",
    ),
    _rule(
        r"repository '.*' not found|returned error: (404|410)|repository not found|not appear to be a git repository"
        r"|repository not exported|repository '.*' does not exist|not a git repository|no such file or directory",
        UpstreamNotFoundError,
        "check the repository's name and the upstream URL",
    ),
    _rule(
        r"timed out|connection timeout|operation too slow|less than \d+ bytes/sec",
        UpstreamTimeoutError,
        "upstream is slow; try again later",
    ),
)
_LOCAL_RULES = (
    _rule(
        r"not a git repository|bad config (line|file)|bad numeric config value|unknown repository extension"
        r"|expected git repo version|invalid value for 'extensions\.",
        DamagedMirrorError,
        "`mirrord heal NAME` repairs a mirror",
    ),
    _rule(
        r"is corrupt|corrupt (loose|patch|delta|pack)|bad object|inflate|hash mismatch|sha1 collision|unable to read [0-9a-f]{7,}"
        r"|could not read [0-9a-f]{40}|missing (blob|tree|commit|tag)|failed to read object|packed object|does not match index"
        r"|unable to (parse|find|read) |bad tree object|not a valid object",
        CorruptObjectError,
        "audit the mirror; a heal brings damaged objects back",
    ),
)
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""How git dies of what it reads: `index-pack` (2.39) aborts at some damaged packs. Whoever kills it takes another signal."""
_INNER_DEATH = re.compile(r"^error: (\S.* died of signal (?:9|15))$", re.MULTILINE)
"""What git says of a git of its own; other signals are what a hostile pack can make of one."""
_SILENT_INDEX_PACK = "fatal: fetch-pack: invalid index-pack output"
"""What git fetch (2.39) says when its index-pack ended; one that refused a pack has said why before."""
_NO_REPOSITORY = re.compile(r"^fatal: not a git repository: ", re.MULTILINE)
"""Said of the repository that git was started in, not of an upstream: that is in quotes."""
_NOISE = re.compile(r"^(remote: *$|hint:|warning: |Cloning into|From |POST |To )")
_LEADING = re.compile(r"^(fatal|error|remote): ")
_COMPLAINT = re.compile(r"^(?:remote: )?(?:fatal|error): ")
_OID = re.compile(r"\b[0-9a-f]{40}\b")
_MOST_OBJECTS = 20


class HttpAnswer(NamedTuple):
    """The last HTTP answer that git got, as GIT_TRACE_CURL showed it."""

    status: int = 0
    retry_after: str | None = None
    content_type: str | None = None

    @property
    def is_garbage(self) -> bool:
        """A page where git's answer should be. git would take it for an empty repository of the old, dumb protocol."""
        return self.status == 200 and not (self.content_type or "").startswith("application/x-git-")


def failure(
    *,
    doing: str,
    status: int,
    stderr: str,
    upstream: bool,
    http: HttpAnswer,
    secrets: Iterable[str] = (),
) -> MirrordError:
    """The error for a git that ended with `status`. `upstream` says that it talked to another repository."""
    fact = masked_url(_fact(stderr) or _death(status), secrets)
    how = _death(status) if status < 0 and -status not in _CRASHES else _inner_death(stderr)
    if how:
        return GitKilledError(
            f"cannot {doing}: {how}",
            hint="was memory short? see the kernel's log",
            git_status=status,
        )
    if http.status == 429 or (http.status == 503 and http.retry_after):
        return _throttled(doing, fact, http)
    if _NO_REPOSITORY.search(stderr):
        fact = "its HEAD, refs, objects or configuration are damaged"
    rules = (_DISK_FULL, *(_UPSTREAM_RULES if upstream else _LOCAL_RULES))
    facts: dict[str, Any] = {"git_status": status, **_named_objects(stderr)}
    if "filtering not recognized by server" in stderr:
        facts["filter_ignored"] = True
    for rule in rules:
        if rule.pattern.search(stderr):
            found: MirrordError = rule.error(f"cannot {doing}: {fact}", hint=rule.hint, **facts)
            return found
    if upstream:
        return UpstreamError(
            f"cannot {doing}: {fact}", hint="try again later; check the upstream URL", **facts
        )
    return GitFailedError(
        f"cannot {doing}: {fact}", hint="see the daemon's log; audit the mirror", **facts
    )


def _inner_death(stderr: str) -> str | None:
    """How a git of git's own was killed; None where none was."""
    if said := _INNER_DEATH.search(stderr):
        return said[1]
    complaints = [line for line in stderr.splitlines() if line.startswith(("fatal: ", "error: "))]
    return "index-pack died and said nothing" if complaints == [_SILENT_INDEX_PACK] else None


def _throttled(doing: str, fact: str, http: HttpAnswer) -> UpstreamThrottledError:
    seconds = retry_after_seconds(http.retry_after, now=utc_now())
    asked = "" if seconds is None else f"; it asks us to wait {seconds:g} s"
    return UpstreamThrottledError(
        f"cannot {doing}: upstream answers {http.status}{asked}",
        hint="the next sync waits that long; fewer mirrors per host, or credentials, raise the limit",
        retry_after_s=seconds,
        fact=fact,
    )


def retry_after_seconds(value: str | None, *, now: datetime) -> float | None:
    """Read a Retry-After header: seconds, or an HTTP date."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (at - now).total_seconds()) if at.tzinfo else None


def _named_objects(stderr: str) -> dict[str, list[str]]:
    """The objects that git or upstream complains of: an id in a warning says nothing."""
    complaints = (line for line in stderr.splitlines() if _COMPLAINT.match(line))
    found = dict.fromkeys(oid for line in complaints for oid in _OID.findall(line))
    return {"objects": list(found)[:_MOST_OBJECTS]} if found else {}


def _fact(stderr: str) -> str:
    """The line that says most: the first that names an object, git's first `fatal:` or `error:`, else upstream's last words."""
    lines = [
        line.strip() for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)
    ]
    if naming := [line for line in lines if _COMPLAINT.match(line) and _OID.search(line)]:
        return _COMPLAINT.sub("", naming[0])[:400]
    for prefix in ("fatal: ", "error: "):
        if found := [line for line in lines if line.startswith(prefix)]:
            return _LEADING.sub("", found[0])[:400]
    return _LEADING.sub("", lines[-1])[:400] if lines else ""


def _death(status: int) -> str:
    return (
        f"git was killed by signal {-status}"
        if status < 0
        else f"git ended with status {status} and said nothing"
    )
