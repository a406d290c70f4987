"""git's stderr: read line by line while git runs, and turned into our errors.

Tables of pattern, error class and hint; the first match wins. Secrets are masked in all that leaves
this module, and HTTP traces are dropped. Upstreams choose much of the text, and it is read on the
event loop: every pattern takes linear time.
"""

import re
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .. import errors
from ..model import utc_now
from ..protocol import Progress
from ..quoting import decode_name, legible
from ..telemetry import masked
from . import ssh


class _StderrRule(NamedTuple):
    pattern: str
    error: type[errors.MirrordError]
    hint: str


# what git says where our disk takes nothing more, in whatever it does
_DISK_RULES = (
    _StderrRule(
        # EFBIG: of RLIMIT_FSIZE; git's checksummed files are told without the system's words
        r"no space left on device|disk quota exceeded|out of diskspace|file too large",
        errors.DiskFullError,
        "free space below the state directory; nothing was changed",
    ),
    _StderrRule(
        r"read-only file system",
        errors.DiskFailedError,
        "see the kernel's log, then audit and heal",
    ),
)


class _UpstreamRule(NamedTuple):
    """Matches the status of the last HTTP response, or stderr."""

    statuses: Collection[int]
    pattern: str
    error: type[errors.MirrordError]
    hint: str


# The first that matches. A forge's own words are in lines `remote: ` (a text/plain body, or the
# sideband) and `fatal: remote error: `; elsewhere they could be the name of a repository.
_UPSTREAM_RULES = (
    _UpstreamRule(
        (),
        r"from promisor remote|lazy fetching disabled",
        errors.UpstreamIncompleteError,
        "upstream is a partial clone, and does not have what was asked for: mirror the repository"
        " that it was cloned from, or run `git fetch --refetch --no-filter` there",
    ),
    _UpstreamRule(
        (),
        r"did not receive expected object",
        errors.UpstreamIncompleteError,
        "upstream hides a part of its history with grafts, or lost the object: look for info/grafts"
        " there, and run `git fsck`",
    ),
    _UpstreamRule(
        (),
        r"certificate verification failed|SSL certificate problem|certificate has expired"
        r"|does not match target host",
        errors.CertificateRefusedError,
        "upstream's certificate has expired, is for another name, or is of a CA that is not known"
        " here: renew it there, or name its CA in the ca_file of a [[credential]]",
    ),
    _UpstreamRule(
        (),
        r"detected dubious ownership",
        errors.UpstreamAuthError,
        "the repository belongs to another user than the one that serves it: add it to"
        " safe.directory in that user's git configuration, on upstream's host",
    ),
    _UpstreamRule(
        (),
        r"refstorage",
        errors.UpstreamIncompleteError,
        "upstream keeps its refs as a reftable, which this git cannot read from a path: serve it by"
        " ssh or https, or install git 2.45 or newer here",
    ),
    _UpstreamRule(
        {429},
        r"returned error: 429|too many requests|\brate limit\b|abuse detection",
        errors.UpstreamThrottledError,
        "the next sync waits that long; fewer mirrors per host, or credentials, raise the limit",
    ),
    _UpstreamRule(
        {451},
        r"returned error: 451|(?m:^(?:remote|fatal: remote error): .*(?:\bDMCA\b|legal reasons))",
        errors.UpstreamNotFoundError,
        "upstream withdrew the repository; the mirror still serves what it has, and asks again"
        " rarely",
    ),
    _UpstreamRule(
        {500},
        r"returned error: 500",
        errors.UpstreamUnavailableError,
        # git http-backend tells its own log alone why it cannot open a repository
        "nothing was changed; the host is asked again after a pause. If only this repository is"
        " answered so, git cannot open it there: it belongs to another user than the server's"
        " (safe.directory), has a format that this git does not know (reftable), or is damaged; the"
        " web server's log says which",
    ),
    _UpstreamRule(
        {502, 503, 504},
        r"returned error: 5\d\d|unable to handle this request|due to load|service unavailable"
        r"|temporarily unavailable|could not resolve|failed to connect|couldn't connect"
        r"|unable to connect|connection (?:refused|reset|closed)|no route to host"
        r"|network is unreachable",
        errors.UpstreamUnavailableError,
        "nothing was changed; the host is asked again after a pause",
    ),
    _UpstreamRule(
        (),
        r"authentication failed|could not read (?:username|password)|terminal prompts disabled"
        r"|returned error: 40[13]|permission denied \(|host key verification failed|access denied"
        # git 2.53, where credential.interactive is false
        r"|no supported authentication|unable to get password from user",
        errors.UpstreamAuthError,
        "the repository may be private or absent: give a URL with credentials, or a key to the "
        "daemon's user; the daemon never prompts",
    ),
    _UpstreamRule(
        {410},
        r"repository '[^']*' not found|returned error: (?:404|410)|repository not found"
        r"|repository '[^']*' does not exist|not appear to be a git repository"
        r"|repository not exported|not a git repository|no such file or directory",
        errors.UpstreamNotFoundError,
        "check the repository's name and the upstream URL",
    ),
    _UpstreamRule(
        (),
        r"timed out|connection timeout|operation too slow|less than \d+ bytes/sec",
        errors.UpstreamTimeoutError,
        "upstream is slow; try again later",
    ),
)
# The connection ended before the pack did (git 2.39, curl).
_CUT = re.compile(
    r"unexpected disconnect|early EOF|hung up unexpectedly|transfer closed|RPC failed"
    r"|bytes of body|HTTP/2 (?:stream|framing)|expected flush|premature end",
    re.IGNORECASE,
)
_LOCAL_RULES = (
    _StderrRule(
        r"not a git repository|bad config (line|file)|bad numeric config value"
        r"|unknown repository extension|expected git repo version"
        r"|invalid value for 'extensions\.",
        errors.DamagedMirrorError,
        "`mirrord heal NAME` repairs a mirror",
    ),
    _StderrRule(
        r"is corrupt|corrupt (loose|patch|delta|pack)|bad object|inflate|hash mismatch"
        r"|sha1 collision|unable to read [0-9a-f]{7,}|could not read [0-9a-f]{40}"
        r"|missing (blob|tree|commit|tag)|failed to read object|packed object"
        r"|does not match index|unable to (parse|find|read) |bad tree object|not a valid object",
        errors.CorruptObjectError,
        "audit the mirror; a heal restores damaged objects",
    ),
)
# git crashes on some damaged input: index-pack (2.39) aborts on some damaged packs.
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
# A git that git started was killed. A hostile pack can cause other signals.
_INNER_DEATH = re.compile(r"^error: (\S.* died of signal (?:9|15))$", re.MULTILINE)
# git fetch (2.39) says this when its index-pack died. One that refused a pack gave a reason first.
_SILENT_INDEX_PACK = "fatal: fetch-pack: invalid index-pack output"
# The repository that git was started in. Upstream's name would be in quotes.
_NO_REPOSITORY = re.compile(r"^fatal: not a git repository: ", re.MULTILINE)
# What git (2.39) says of a pack that was changed on its way. An upstream that cannot make one says
# why, in a line of its own.
_BROKEN_TRANSFER = re.compile(
    r"bad pack header|bad band|bad line length|pack signature mismatch|pack is corrupted"
    r"|pack has bad object|pack has \d+ unresolved|inflate|unknown object type"
    # an answer that ended before its first section, or lost one (protocol v2)
    r"|expected '[a-z-]+'(?:$|, received)|error processing acks|unexpected acknowledgment",
    re.IGNORECASE | re.MULTILINE,
)
# Less arrived than HTTP announced. What git then says of objects is of lines that broke off: half
# an `ACK` names an object that nobody has.
_SHORT = re.compile(
    r"bytes of body|transfer closed|HTTP/2 (?:stream|framing)"
    r"|(?m:^error: Could not read [0-9a-f]{40}$)",
    re.IGNORECASE,
)
_REMOTE_FAILED = re.compile(r"(?m)^remote: .*(?:fatal|error|abort)|died with error|upload-pack: ")
_NOISE = re.compile(r"^(remote: *$|hint:|warning: |Cloning into|From |POST |To )")
_LEADING = re.compile(r"^(fatal|error|remote): ")
_COMPLAINT = re.compile(r"^(?:remote: )?(?:fatal|error): ")
_OID = re.compile(r"\b[0-9a-f]{40}\b")
# The named objects are intact: some unnamed tree has one of them under a wrong mode.
_MISNAMED = re.compile(r"is a (?:blob|tree|commit|tag), not a |mode, but is not a ")
# a damaged pack may make git name thousands
_OBJECTS_MAX = 20
# a server's Retry-After is not trusted: it holds a mirror back for a day at most
_WAIT_MAX_S = 86400.0

# `Receiving objects:  45% (9/20), 1.20 MiB`; without a total the count alone
_PROGRESS = re.compile(
    r"(?:remote: )?([A-Z][A-Za-z -]+):\s+(?:\d+% \((\d+)/(\d+)\)|(\d+))(?:,.*)?\s*"
)
# as git traces: the time, a line of git's source, the text
_TRACE = re.compile(r"\d\d:\d\d:\d\d\.\d+ \S+\.c:\d+\s+(.*)")
_HEADER = re.compile(r"<= Recv header:\s*(.*)")
# stderr is what an upstream sends ("remote: …"): its first and last lines are kept
_LINE_MAX = 4096
_LINES_MAX = 400
# of each end of what is searched on the event loop
_TEXT_MAX = 1 << 15


class HttpAnswer(NamedTuple):
    """The last HTTP response that git received, from GIT_TRACE_CURL."""

    status: int = 0
    retry_after: str | None = None
    content_type: str | None = None
    remaining: str | None = None  # requests that a rate limit leaves

    @property
    def is_garbage(self) -> bool:
        """A web page, which git takes for an empty repository of the dumb protocol."""
        return self.status == 200 and not (self.content_type or "").startswith("application/x-git-")


class StderrReader:
    """Collects the messages in git's stderr, of many the first and last; reports its progress.

    `packets` receives each line of GIT_TRACE_PACKET.
    """

    def __init__(
        self,
        progress: Callable[[Progress], None] | None = None,
        packets: Callable[[str], None] | None = None,
    ) -> None:
        self._progress = progress
        self._packets = packets
        self._tail = b""
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=_LINES_MAX)
        self.http = HttpAnswer()
        self.host_key: str | None = None  # of ssh

    def feed(self, chunk: bytes) -> None:
        parts = re.split(rb"([\r\n])", self._tail + chunk)
        self._tail = parts[-1][-_LINE_MAX:]
        for line, end, after in zip(parts[::2], parts[1::2], parts[2::2], strict=False):
            # git prints each percent: of those that come together the last tells as much
            if not (end == b"\r" and b"% (" in line and b"% (" in after):
                self._take(line)

    def text(self) -> str:
        tail, self._tail = self._tail, b""
        self._take(tail)
        return "\n".join([*self._first, *self._last])

    def _take(self, raw: bytes) -> None:
        # git ends a server's line by a code that clears the rest, or by eight blanks (sideband.c)
        line = decode_name(raw[:_LINE_MAX]).removesuffix("\x1b[K").rstrip()
        if not line:
            return
        if ssh.TRACE.match(line):
            self.host_key = ssh.find_host_key(line) or self.host_key
        elif trace := _TRACE.fullmatch(line):
            if trace[1].startswith("packet: "):
                if self._packets is not None:
                    self._packets(trace[1].removeprefix("packet: ").lstrip())
            elif header := _HEADER.match(trace[1]):
                self._take_header(header[1])
        elif match := _PROGRESS.fullmatch(line):
            if self._progress is not None:
                title, done, total, count = match.groups()
                self._progress(
                    Progress(
                        done=int(done or count),
                        total=int(total) if total else None,
                        unit=title.split()[-1].lower(),
                        note=title,
                    )
                )
        elif len(self._first) < _LINES_MAX:
            self._first.append(legible(line))
        else:
            self._last.append(legible(line))

    def _take_header(self, text: str) -> None:
        name, _, value = text.partition(":")
        if status := re.match(r"HTTP/\S+ (\d{3})", text):
            self.http = HttpAnswer(int(status[1]))
        elif name.strip().lower() == "retry-after":
            self.http = self.http._replace(retry_after=value.strip())
        elif name.strip().lower() in {"x-ratelimit-remaining", "ratelimit-remaining"}:
            self.http = self.http._replace(remaining=value.strip())
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
    """Return the error for a git that ended with `status`.

    `upstream` says that it talked to another repository.
    """
    if len(stderr) > 2 * _TEXT_MAX:  # searching all of it would block the event loop
        stderr = f"{stderr[:_TEXT_MAX]}\n{stderr[-_TEXT_MAX:]}"
    death = f"git was killed by signal {-status}" if status < 0 else None
    no_message = death or f"git ended with status {status} and no message"
    fact = masked(_fact(stderr) or no_message, secrets)
    complaints = [line for line in stderr.splitlines() if line.startswith(("fatal: ", "error: "))]
    if -status in _CRASHES:
        death = None
    if not death and (inner := _INNER_DEATH.search(stderr)):
        death = inner[1]
    elif not death and complaints == [_SILENT_INDEX_PACK]:
        death = "index-pack died without a message"
    if death:
        return errors.GitKilledError(
            f"cannot {doing}: {death}",
            hint="possibly out of memory; check dmesg for the OOM killer",
            git_status=status,
        )
    if _NO_REPOSITORY.search(stderr):
        fact = "its HEAD, refs, objects or configuration are damaged"
    fields: dict[str, Any] = {"git_status": status}
    # only ids in errors: those in warnings are not damaged
    named = dict.fromkeys(
        oid for line in stderr.splitlines() if _COMPLAINT.match(line) for oid in _OID.findall(line)
    )
    if named and not _MISNAMED.search(stderr):
        fields["objects"] = list(named)[:_OBJECTS_MAX]
    if "filtering not recognized by server" in stderr:
        fields["filter_ignored"] = True
    if upstream:
        return _upstream_failure(doing, stderr, fact, http, tuple(secrets), fields)
    for rule in (*_DISK_RULES, *_LOCAL_RULES):
        if re.search(rule.pattern, stderr, re.IGNORECASE):
            return rule.error(f"cannot {doing}: {fact}", hint=rule.hint, **fields)
    hint = "see the daemon's log; audit the mirror"
    return errors.GitFailedError(f"cannot {doing}: {fact}", hint=hint, **fields)


def _upstream_failure(
    doing: str,
    stderr: str,
    fact: str,
    http: HttpAnswer,
    secrets: Sequence[str],
    fields: dict[str, Any],
) -> errors.MirrordError:
    for disk in _DISK_RULES:
        if re.search(disk.pattern, stderr, re.IGNORECASE):
            return disk.error(f"cannot {doing}: {fact}", hint=disk.hint, **fields)
    for rule in _UPSTREAM_RULES:
        # GitHub's rate limits are a 403, which is otherwise a matter of credentials
        asks_to_wait = rule.error is errors.UpstreamThrottledError and (
            http.status in {403, 503} and (http.retry_after or http.remaining == "0")
        )
        is_named = re.search(rule.pattern, stderr, re.IGNORECASE)
        if asks_to_wait or http.status in rule.statuses or is_named:
            seconds = retry_after_seconds(http.retry_after, now=utc_now())
            if seconds is not None:
                fields["retry_after_s"] = seconds
                fact += f"; it asks for a wait of {seconds:g} s"
            if words := _upstream_words(stderr, fact, secrets):
                fact += f"; upstream says: {words}"
            return rule.error(f"cannot {doing}: {fact}", hint=rule.hint, **fields)
    hint = "the next sync asks again; if it goes on, look at the network and proxies on the way"
    is_line = not _REMOTE_FAILED.search(stderr)
    was_cut = is_line and _CUT.search(stderr)
    if was_cut and http.status and _SHORT.search(stderr):
        fields.pop("objects", None)
    is_line &= not fields.get("objects")
    if is_line and was_cut:
        fact = f"the connection was cut: {fact}"
        return errors.UpstreamUnavailableError(
            f"cannot {doing}: {fact}", hint=hint, was_cut=True, **fields
        )
    if is_line and _BROKEN_TRANSFER.search(stderr):
        fact = f"the transfer broke: {fact}"
        return errors.TransferBrokenError(f"cannot {doing}: {fact}", hint=hint, **fields)
    hint = "try again later; check the upstream URL"
    return errors.UpstreamError(f"cannot {doing}: {fact}", hint=hint, **fields)


def _upstream_words(stderr: str, fact: str, secrets: Sequence[str]) -> str:
    """Return what the forge itself said in `remote:` lines, where `fact` does not have it."""
    lines = (
        line.removeprefix("remote: ").strip()
        for line in stderr.splitlines()
        if line.startswith("remote: ")
    )
    words = masked(" ".join(line for line in lines if line)[:300], secrets)
    return "" if words in fact else words


def foreign_redirect(url: str, stderr: str) -> str | None:
    """Return the masked URL of a redirect to another host, or from https to http."""
    before = urlsplit(url)
    for target in re.findall(r"(?m)^warning: redirecting to (\S+)", stderr):
        try:
            after = urlsplit(target)
        except ValueError:  # as `http://[`
            return masked(target)
        is_weaker = (before.scheme, after.scheme) == ("https", "http")
        if before.hostname != after.hostname or is_weaker:
            return masked(target)
    return None


def retry_after_seconds(value: str | None, *, now: datetime) -> float | None:
    """Parse a Retry-After header, seconds or an HTTP date; at most a day."""
    if value is None:
        return None
    if re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII):
        return min(float(value), _WAIT_MAX_S)
    try:
        when = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # OverflowError: an offset of 20 digits
        return None
    return min(max(0.0, (when - now).total_seconds()), _WAIT_MAX_S) if when.tzinfo else None


def _fact(stderr: str) -> str:
    """Choose a line: the first error with an object id, else git's first error, else the last."""
    lines = [
        line.strip() for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)
    ]
    if naming := [line for line in lines if _COMPLAINT.match(line) and _OID.search(line)]:
        return _COMPLAINT.sub("", naming[0])[:400]
    for prefix in ("fatal: ", "error: "):
        if matching := [line for line in lines if line.startswith(prefix)]:
            return _LEADING.sub("", matching[0])[:400]
    return _LEADING.sub("", lines[-1])[:400] if lines else ""
