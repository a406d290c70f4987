"""How values are shown: figures for people, and of names only what a stranger may know.

Whoever reaches the port is a stranger: a page shows the public id of an instance, the place of an
upstream, and of work the mirrors and datasets that it is about. It shows no text of errors,
upstreams, builds and rows: those quote commits, commands and paths.
"""

import pwd
import re
from functools import lru_cache
from urllib.parse import urlsplit

from ..units import readable_size

_COMMIT = re.compile(r"[0-9a-f]{7,}", re.IGNORECASE)


def upstream(url: str) -> str:
    """Where an upstream is, without user, query and what a path on this host would tell."""
    scheme, separator, _ = url.partition("://")
    if separator and scheme.lower() != "file":
        parts = urlsplit(url)
        return f"{parts.hostname or ''}{parts.path}"
    host, colon, path = url.rpartition("@")[2].partition(":")
    if separator or not colon or url.startswith("/"):
        return "a path on this host"
    return f"{host}/{path.lstrip('/')}"


def environment(key: str) -> str:
    """The name of an environment; some datasets name an image by the commit of the answer."""
    return _COMMIT.sub("…", key)


@lru_cache(maxsize=1024)
def owner(uid: int) -> str:
    """A user's name where there is one; blocks where names come from a network."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"uid {uid}"


def size(count: float | None) -> str:
    return "–" if count is None else readable_size(count)


def duration(seconds: float) -> str:
    """An age in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def seconds(value: float | None) -> str:
    """A latency with three digits."""
    if value is None:
        return "–"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
