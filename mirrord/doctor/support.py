"""What a bug report says of this host, and what it may say of answers and logs."""

import hashlib
import json
import os
import platform
import re
import secrets
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .. import __version__, errors
from ..host.mount_tables import find_mount, mounts_below
from ..places import Layout
from ..telemetry import masked
from .checks import run
from .units import NAMES

# A report is attached to an issue: it has the newest of each.
_LINES_MAX = 3000
# an id as git abbreviates it, to seven digits or more
_HEX = re.compile(r"(?i)[0-9a-f]{7,}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_IDS = {"id", "boot", "operation", "checkout", "request_id", "after", "identity", "parent"}
_OPAQUE = re.compile(r"[0-9a-f]{8,32}(:\d+)?|\d+")
_NAMES = {
    *("name", "repo", "mirror", "dataset", "format", "kind", "state", "status", "code", "title"),
    *("backend", "history", "view", "level", "event", "unit", "note", "endpoint", "function"),
    *("version", "state_dir", "config_path", "at", "timestamp", "reasons", "default_branch"),
    *("fact", "remedy", "verdict", "last_error", "path", "directory", "applied", "refused"),
}
# prefixes of events whose `detail` quotes no row
_EVENTS_WITH_DETAIL = (
    *("mirror.", "config.", "daemon.", "disk.", "backend.", "overlay.", "removal.", "catalog."),
)
_FRAME = re.compile(r'\s*File "[^"\n]*", line \d+, in \S+|\s*Traceback \(most recent call last\):')
_RAISED = re.compile(r"(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Exit))\b")


class Scrubber:
    """Removes secrets and answers; each bundle has its own pseudonyms."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)

    def text(self, text: str) -> str:
        """Remove passwords and all but the host of URLs, and replace commit ids."""
        return _HEX.sub(self._pseudonym, _URL.sub(_host_of, masked(text)))

    def _pseudonym(self, match: re.Match[str]) -> str:
        if match[0].isdecimal() and len(match[0]) < 16:  # a size, a time
            return match[0]
        digest = hashlib.sha256(self._salt + match[0].lower().encode()).digest()
        # no hexadecimal letters: no reader takes it for a commit id, and no second scrubbing does
        return "#" + "".join("ghkmnpqrstuvwxyz"[byte >> 4] for byte in digest[:10])

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return value

    def facts(self, members: dict[str, Any], with_detail: bool = False) -> dict[str, Any]:
        """Keep numbers and members with known names, in nested objects too; `detail` on request."""
        kept: dict[str, Any] = {}
        for key, value in members.items():
            is_id = key in _IDS and isinstance(value, str) and _OPAQUE.fullmatch(value)
            if is_id or value is None or isinstance(value, (bool, int, float)):
                kept[key] = value
            elif isinstance(value, dict):
                kept[key] = self.facts(value, with_detail)
            elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
                kept[key] = [self.facts(item, with_detail) for item in value]
            elif key in _NAMES or key.endswith("_at") or (with_detail and key == "detail"):
                kept[key] = self.value(value)
            elif isinstance(value, list):
                kept[f"{key}_count"] = len(value)
        return kept

    def event(self, name: str, members: dict[str, Any]) -> dict[str, Any]:
        """Scrub the fields of an event or a log line; of a traceback the frames stay."""
        kept = self.facts(members, with_detail=name.startswith(_EVENTS_WITH_DETAIL))
        if isinstance(trace := members.get("exception"), str):
            kept["exception"] = self.frames(trace)
        return kept

    def operation(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Scrub an operation; its result, which names commits and instances, is left out."""
        about_mirror = str(operation.get("kind", "")).startswith(("mirror.", "refs."))
        members = {key: value for key, value in operation.items() if key != "result"}
        kept = self.facts(members, with_detail=about_mirror)
        if about_mirror:
            kept["subject"] = self.text(str(operation.get("subject")))
        return kept

    def log_line(self, message: str) -> Any:
        """Scrub a line of the journal: of other text than events only frames of tracebacks stay."""
        try:
            line = json.loads(message)
        except ValueError:
            return "\n".join(self.frames(message)) or None
        if not isinstance(line, dict):
            return None
        return self.event(str(line.get("event")), line)

    def frames(self, trace: str) -> list[str]:
        """Return the frames and the classes of exceptions, without source lines and messages."""
        kept = []
        for line in trace.splitlines():
            if match := _FRAME.match(line):
                kept.append(self.text(match[0]))
            elif match := _RAISED.match(line):
                kept.append(match["kind"])
        return kept


def _host_of(match: re.Match[str]) -> str:
    """Return a URL without its path: that of a package index may be its token."""
    try:
        parts = urlsplit(match[0])
        return f"{parts.scheme}://{parts.hostname or ''}{'/…' if parts.path.strip('/') else ''}"
    except ValueError:
        return "…"


def find_versions() -> dict[str, Any]:
    """Return the versions of mirrord, its packages, Python, git and the system."""
    versions = {
        "mirrord": __version__,
        "python": sys.version,
        "kernel": " ".join(os.uname()[2:]),
    }
    with suppress(OSError):
        versions["system"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    with suppress(errors.MirrordError):
        versions["git"] = run("git", "version").strip()
    with suppress(PackageNotFoundError):
        for line in requires("mirrord") or []:
            name = re.split(r"[^A-Za-z0-9._-]", line)[0]
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
    return versions


def find_places(root: Path) -> dict[str, Any]:
    """Describe the file system of a state directory, its mounts and its number of entries.

    Mounts are counted by directory: their paths name the checkouts of all users.
    """
    mount, layout = find_mount(root), Layout(root)
    disk = os.statvfs(mount.at)
    below = (Path(point).relative_to(root.resolve()).parts for point in mounts_below(str(root)))
    counts = {}
    for directory in layout.modes():
        with suppress(OSError):
            counts[str(directory)] = sum(1 for _ in os.scandir(directory))
    with suppress(OSError):
        counts["bytes of the catalog"] = layout.catalog.stat().st_size
    return {
        "file_system": {
            "kind": mount.kind, "source": mount.source, "point": mount.at,
            "options": sorted(mount.options),
            "bytes": disk.f_blocks * disk.f_frsize, "free_bytes": disk.f_bavail * disk.f_frsize,
            "inodes": disk.f_files, "free_inodes": disk.f_favail,
        },
        "mounts": Counter(parts[0] if parts else "." for parts in below),
        "entries": counts,
    }  # fmt: skip


def read_journal(scrub: Scrubber) -> Iterator[dict[str, Any]]:
    """Yield lines of the units' journal; only some users may read it."""
    # of a template unit, its instances
    units = [f"--unit={name.replace('@.', '@*.')}" for name in NAMES]
    text = run(
        "journalctl", "--quiet", "--no-pager", "--output=json", f"--lines={_LINES_MAX}", *units
    )
    lines = text.splitlines()
    if not lines:
        raise errors.NotFoundError(
            "cannot read the journal: this user may not see lines of mirrord"
        )
    for line in islice(lines, _LINES_MAX):
        with suppress(ValueError):
            entry = json.loads(line)
            # an array of numbers if it is not UTF-8 (journalctl --output=json)
            message = entry.get("MESSAGE")
            scrubbed = scrub.log_line(message) if isinstance(message, str) else None
            if scrubbed is None and entry.get("SYSLOG_IDENTIFIER") == "systemd":
                scrubbed = scrub.text(str(message))
            yield {
                "at": int(entry.get("__REALTIME_TIMESTAMP", 0)) / 1e6,
                "unit": entry.get("UNIT")
                or entry.get("_SYSTEMD_UNIT"),  # UNIT is in systemd's own lines
                "priority": entry.get("PRIORITY"),
                "message": scrubbed,
            }


def read_log(log: Path, scrub: Scrubber) -> Iterator[dict[str, Any]]:
    """Yield lines of the log of `serve --detach`."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in deque(lines, _LINES_MAX):
            if (scrubbed := scrub.log_line(line)) is not None:
                yield {"message": scrubbed}
