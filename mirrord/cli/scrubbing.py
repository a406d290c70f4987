"""What of answers and logs may leave the host: names, numbers, times, codes; nothing of a task.

Texts that may quote rows are left out. Commits become names that mean nothing outside of one
bundle, the same for the same commit; a gold commit could be looked up by its id.
"""

import hashlib
import json
import re
import secrets
from typing import Any
from urllib.parse import urlsplit

from ..telemetry import masked

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
_TOLD = ("mirror.", "config.", "daemon.", "disk.", "backend.", "overlay.", "removal.", "catalog.")
"""Events whose `detail` quotes no row."""
_FRAME = re.compile(r'\s*File "[^"\n]*", line \d+, in \S+|\s*Traceback \(most recent call last\):')
_RAISED = re.compile(r"(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Exit))\b")


class Scrubber:
    """One for each bundle."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)

    def text(self, text: str) -> str:
        """Without passwords, what follows the host of a URL, and ids of commits."""
        return _HEX.sub(self._renamed, _URL.sub(_host_of, masked(text)))

    def _renamed(self, found: re.Match[str]) -> str:
        if found[0].isdecimal() and len(found[0]) < 16:  # a size, a time
            return found[0]
        digest = hashlib.sha256(self._salt + found[0].lower().encode()).digest()
        return "#" + "".join("ghkmnpqrstuvwxyz"[byte >> 4] for byte in digest[:10])

    def value(self, value: Any) -> Any:
        """Every text of a JSON value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(each) for each in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(each) for key, each in value.items()}
        return value

    def facts(self, facts: dict[str, Any], told: bool = False) -> dict[str, Any]:
        """Numbers, and texts of known names; of lists of objects the same. `told`: `detail` too."""
        kept: dict[str, Any] = {}
        for key, value in facts.items():
            is_id = key in _IDS and isinstance(value, str) and _OPAQUE.fullmatch(value)
            if is_id or value is None or isinstance(value, (bool, int, float)):
                kept[key] = value
            elif isinstance(value, dict):
                kept[key] = self.facts(value, told)
            elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
                kept[key] = [self.facts(each, told) for each in value]
            elif key in _NAMES or key.endswith("_at") or (told and key == "detail"):
                kept[key] = self.value(value)
            elif isinstance(value, list):
                kept[f"{key}_count"] = len(value)
        return kept

    def event(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Of an event, or of a line of the log; a traceback keeps its frames."""
        kept = self.facts(facts, told=name.startswith(_TOLD))
        if isinstance(trace := facts.get("exception"), str):
            kept["exception"] = self.frames(trace)
        return kept

    def operation(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Without its result, which names commits and instances."""
        about_mirror = str(operation.get("kind", "")).startswith(("mirror.", "refs."))
        kept = self.facts({k: v for k, v in operation.items() if k != "result"}, told=about_mirror)
        if about_mirror:
            kept["subject"] = self.text(str(operation.get("subject")))
        return kept

    def log_line(self, message: str) -> Any:
        """A line of a journal: an event's facts; of other text only a traceback's frames."""
        try:
            line = json.loads(message)
        except ValueError:
            return "\n".join(self.frames(message)) or None
        if not isinstance(line, dict):
            return None
        return self.event(str(line.get("event")), line)

    def frames(self, trace: str) -> list[str]:
        """Where, and of which class; neither source lines nor messages."""
        kept = []
        for line in trace.splitlines():
            if found := _FRAME.match(line):
                kept.append(self.text(found[0]))
            elif found := _RAISED.match(line):
                kept.append(found["kind"])
        return kept


def _host_of(found: re.Match[str]) -> str:
    """An index's path may be its token."""
    try:
        parts = urlsplit(found[0])
        return f"{parts.scheme}://{parts.hostname or ''}{'/…' if parts.path.strip('/') else ''}"
    except ValueError:
        return "…"
