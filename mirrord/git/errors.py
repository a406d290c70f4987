"""git's stderr, told apart line by line while it runs, and as our errors; URLs without secrets.

One table holds a pattern, a class and a hint; the first row that matches wins. Whatever leaves here
went through `masked_url`; HTTP traces are never kept.
"""

import re
import signal
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .. import errors
from ..model import printable, utc_now
from ..protocol import Progress

# Upstreams choose this text, on the event loop's thread: each pattern takes linear time.
_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20})(://)([^/\s'\"]+)@")
_QUERY = re.compile(
    r"([?&;](?=[^=\s?&;'\"]*(?:token|key|secret|passw|pwd|sig|auth|credential))[^=\s?&;'\"]*=)"
    r"[^&;#\s'\"]+",
    re.IGNORECASE,
)


def masked_url(text: str, secrets: Iterable[str] = ()) -> str:
    """Hide the secrets of URLs: user information, query values that look like tokens."""
    text = _QUERY.sub(r"\1***", _USERINFO.sub(_mask_userinfo, text))
    for secret in secrets:
        if len(secret) > 3:  # a shorter one guards nothing, and would blank half the sentence
            text = text.replace(secret, "***")
    return text


def _mask_userinfo(match: re.Match[str]) -> str:
    scheme, separator, userinfo = match.groups()
    if scheme.lower() in {"ssh", "git+ssh", "ssh+git"}:
        user, colon, _ = userinfo.partition(":")
        return f"{scheme}{separator}{user}{':***' if colon else ''}@"
    return f"{scheme}{separator}***@"


class _Rule(NamedTuple):
    pattern: str
    error: type[errors.MirrordError]
    hint: str


_DISK_FULL = _Rule(
    r"no space left on device|disk quota exceeded",
    errors.DiskFullError,
    "free space below the state directory; nothing was changed",
)
_UPSTREAM_RULES = (
    _Rule(
        r"returned error: 429|too many requests",
        errors.UpstreamThrottledError,
        "the next scheduled sync waits as long as upstream asked",
    ),
    _Rule(
        r"authentication failed|could not read (username|password)|terminal prompts disabled"
        r"|returned error: 40[13]|permission denied \(|host key verification failed|access denied"
        r"|no supported authentication",
        errors.UpstreamAuthError,
        "the repository may be private or absent: give a URL with credentials, or a key to the "
        "daemon's user; nobody is asked",
    ),
    _Rule(
        r"repository '[^']*' not found|returned error: (404|410)|repository not found"
        r"|repository '[^']*' does not exist|not appear to be a git repository"
        r"|repository not exported|not a git repository|no such file or directory",
        errors.UpstreamNotFoundError,
        "check the repository's name and the upstream URL",
    ),
    _Rule(
        r"timed out|connection timeout|operation too slow|less than \d+ bytes/sec",
        errors.UpstreamTimeoutError,
        "upstream is slow; try again later",
    ),
)
_LOCAL_RULES = (
    _Rule(
        r"not a git repository|bad config (line|file)|bad numeric config value"
        r"|unknown repository extension|expected git repo version"
        r"|invalid value for 'extensions\.",
        errors.DamagedMirrorError,
        "`mirrord heal NAME` repairs a mirror",
    ),
    _Rule(
        r"is corrupt|corrupt (loose|patch|delta|pack)|bad object|inflate|hash mismatch"
        r"|sha1 collision|unable to read [0-9a-f]{7,}|could not read [0-9a-f]{40}"
        r"|missing (blob|tree|commit|tag)|failed to read object|packed object"
        r"|does not match index|unable to (parse|find|read) |bad tree object|not a valid object",
        errors.CorruptObjectError,
        "audit the mirror; a heal brings damaged objects back",
    ),
)
# How git dies of what it reads: index-pack (2.39) aborts at some damaged packs.
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
# Of a git that git started; a hostile pack can make it die of other signals.
_INNER_DEATH = re.compile(r"^error: (\S.* died of signal (?:9|15))$", re.MULTILINE)
# git fetch (2.39), when its index-pack ended; one that refused a pack has said why before.
_SILENT_INDEX_PACK = "fatal: fetch-pack: invalid index-pack output"
# Of the repository that git was started in; an upstream's name is in quotes.
_NO_REPOSITORY = re.compile(r"^fatal: not a git repository: ", re.MULTILINE)
_NOISE = re.compile(r"^(remote: *$|hint:|warning: |Cloning into|From |POST |To )")
_LEADING = re.compile(r"^(fatal|error|remote): ")
_COMPLAINT = re.compile(r"^(?:remote: )?(?:fatal|error): ")
_OID = re.compile(r"\b[0-9a-f]{40}\b")
# The named objects are whole: another tree, which is not named, has one of them under a wrong mode.
_MISNAMED = re.compile(r"is a (?:blob|tree|commit|tag), not a |mode, but is not a ")
_MOST_OBJECTS = 20

_PROGRESS = re.compile(
    r"(?:remote: )?([A-Z][A-Za-z -]+):\s+(?:\d+% \((\d+)/(\d+)\)|(\d+))(?:,.*)?\s*"
)
_TRACE = re.compile(r"\d\d:\d\d:\d\d\.\d+ \S+\.c:\d+\s+(.*)")
_HEADER = re.compile(r"<= Recv header:\s*(.*)")
_MAX_LINE = 4096
_MAX_LINES = 400
_MOST_TEXT = 1 << 15


class HttpAnswer(NamedTuple):
    """The last HTTP answer that git got, as GIT_TRACE_CURL showed it."""

    status: int = 0
    retry_after: str | None = None
    content_type: str | None = None

    @property
    def is_garbage(self) -> bool:
        """A page, which git would take for an empty repository of the old, dumb protocol."""
        return self.status == 200 and not (self.content_type or "").startswith("application/x-git-")


class StderrReader:
    """Feed it chunks; ask it for the messages at the end. Keeps the first and the last lines."""

    def __init__(self, progress: Callable[[Progress], None] | None = None) -> None:
        self._progress = progress
        self._tail = b""
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=_MAX_LINES)
        self.http = HttpAnswer()

    def feed(self, chunk: bytes) -> None:
        *lines, tail = re.split(rb"[\r\n]", self._tail + chunk)
        self._tail = tail[-_MAX_LINE:]
        for line in lines:
            self._take(line)

    def text(self) -> str:
        """The messages that were kept."""
        tail, self._tail = self._tail, b""
        self._take(tail)
        return "\n".join([*self._first, *self._last])

    def _take(self, raw: bytes) -> None:
        line = raw[:_MAX_LINE].decode("utf-8", "replace").removesuffix("\x1b[K").rstrip()
        if not line:
            return
        if trace := _TRACE.fullmatch(line):
            if header := _HEADER.match(trace[1]):
                self._take_header(header[1])
        elif found := _PROGRESS.fullmatch(line):
            if self._progress is not None:
                title, done, total, count = found.groups()
                unit = title.split()[-1].lower()
                whole = int(total) if total else None
                self._progress(
                    Progress(done=int(done or count), total=whole, unit=unit, note=title)
                )
        elif len(self._first) < _MAX_LINES:
            self._first.append(printable(line))
        else:
            self._last.append(printable(line))

    def _take_header(self, text: str) -> None:
        name, _, value = text.partition(":")
        if status := re.match(r"HTTP/\S+ (\d{3})", text):
            self.http = HttpAnswer(int(status[1]))
        elif name.strip().lower() == "retry-after":
            self.http = self.http._replace(retry_after=value.strip())
        elif name.strip().lower() == "content-type":
            self.http = self.http._replace(content_type=value.strip().lower())


def failure(
    doing: str,
    status: int,
    stderr: str,
    *,
    upstream: bool = False,
    http: HttpAnswer = HttpAnswer(),
    secrets: Iterable[str] = (),
) -> errors.MirrordError:
    """The error for a git that ended with `status`; `upstream`: it talked to another repository."""
    if len(stderr) > 2 * _MOST_TEXT:  # to look through all of it would hold up the event loop
        stderr = f"{stderr[:_MOST_TEXT]}\n{stderr[-_MOST_TEXT:]}"
    death = f"git was killed by signal {-status}" if status < 0 else None
    silence = death or f"git ended with status {status} and said nothing"
    fact = masked_url(_fact(stderr) or silence, secrets)
    complaints = [line for line in stderr.splitlines() if line.startswith(("fatal: ", "error: "))]
    if -status in _CRASHES:
        death = None
    if not death and (inner := _INNER_DEATH.search(stderr)):
        death = inner[1]
    elif not death and complaints == [_SILENT_INDEX_PACK]:
        death = "index-pack died and said nothing"
    if death:
        return errors.GitKilledError(
            f"cannot {doing}: {death}",
            hint="possibly out of memory; check dmesg for the OOM killer",
            git_status=status,
        )
    if http.status == 429 or (http.status == 503 and http.retry_after):
        seconds = retry_after_seconds(http.retry_after, now=utc_now())
        asked = "" if seconds is None else f"; it asks us to wait {seconds:g} s"
        return errors.UpstreamThrottledError(
            f"cannot {doing}: upstream answers {http.status}{asked}",
            hint="the next sync waits that long; fewer mirrors per host, or credentials, "
            "raise the limit",
            retry_after_s=seconds,
            fact=fact,
        )
    if _NO_REPOSITORY.search(stderr):
        fact = "its HEAD, refs, objects or configuration are damaged"
    facts: dict[str, Any] = {"git_status": status}
    # objects that git or upstream complains of: an id in a warning says nothing
    named = dict.fromkeys(
        oid for line in stderr.splitlines() if _COMPLAINT.match(line) for oid in _OID.findall(line)
    )
    if named and not _MISNAMED.search(stderr):
        facts["objects"] = list(named)[:_MOST_OBJECTS]
    if "filtering not recognized by server" in stderr:
        facts["filter_ignored"] = True
    error: type[errors.MirrordError] = errors.GitFailedError
    hint = "see the daemon's log; audit the mirror"
    if upstream:
        error, hint = errors.UpstreamError, "try again later; check the upstream URL"
    for rule in (_DISK_FULL, *(_UPSTREAM_RULES if upstream else _LOCAL_RULES)):
        if re.search(rule.pattern, stderr, re.IGNORECASE):
            error, hint = rule.error, rule.hint
            break
    return error(f"cannot {doing}: {fact}", hint=hint, **facts)


def foreign_redirect(url: str, stderr: str) -> str | None:
    """The URL, without secrets, that git was redirected to, if it is of another host.

    https that became http counts as another host.
    """
    for target in re.findall(r"(?m)^warning: redirecting to (\S+)", stderr):
        asked, answered = urlsplit(url), urlsplit(target)
        is_weaker = (asked.scheme, answered.scheme) == ("https", "http")
        if asked.hostname != answered.hostname or is_weaker:
            return masked_url(target)
    return None


def retry_after_seconds(value: str | None, *, now: datetime) -> float | None:
    """Read a Retry-After header: seconds, or an HTTP date."""
    if value is None:
        return None
    if re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII):
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (at - now).total_seconds()) if at.tzinfo else None


def _fact(stderr: str) -> str:
    """The line that says most: the first that names an object, git's first `fatal:` or `error:`,
    else upstream's last words.
    """
    lines = [
        line.strip() for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)
    ]
    if naming := [line for line in lines if _COMPLAINT.match(line) and _OID.search(line)]:
        return _COMPLAINT.sub("", naming[0])[:400]
    for prefix in ("fatal: ", "error: "):
        if found := [line for line in lines if line.startswith(prefix)]:
            return _LEADING.sub("", found[0])[:400]
    return _LEADING.sub("", lines[-1])[:400] if lines else ""
