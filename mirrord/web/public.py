"""What a stranger may read of names, addresses and people: whoever reaches the port is one.

A page shows the public id of an instance, the place of an upstream, and of work the mirrors and
datasets that it is about. It shows no text of errors, upstreams, builds and rows: those quote
commits, commands and paths.
"""

from __future__ import annotations

import pwd
import re
from functools import lru_cache
from urllib.parse import urlsplit

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
