"""Files of installers that lead elsewhere; they are read as text and never executed."""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ..jsontext import loads
from ..model import shown
from ..quoting import decode_name
from ..telemetry import masked

_LITERAL = re.compile(r"""["'](/[^"'\n]+)["']""")

# as site.py reads a .pth: `import` and a blank begin code, `#` a comment
_PATH_LINE = re.compile(r"(?!import[ \t]|#)\s*\S.*")

_COMMIT = re.compile(r"[0-9a-f]{40}")

_EDITABLE = "packages are imported from"


class Lead(NamedTuple):
    """A path that a file leads to, or the commit that was installed; `is_own`: of this project."""

    kind: str
    fact: str
    target: str | None = None
    commit: str | None = None
    is_own: bool = False


def find_leads(path: str, text: bytes, project: str) -> Iterator[Lead]:
    """Iterate where a file of a known name leads. `project` is the mirrored repository's name."""
    name, content = path.rpartition("/")[2], decode_name(text)
    if name == ".git":
        target = content.removeprefix("gitdir:").strip()
        yield Lead("repository", "its repository is at", target)
    elif name == "direct_url.json":
        yield from _direct_url(content, project)
    elif name.endswith(".py"):
        yield from (Lead("editable", _EDITABLE, target) for target in _LITERAL.findall(content))
    else:  # .pth, or .egg-link, whose second line is the path from the first to setup.py
        lines = content.splitlines()[: 1 if name.endswith(".egg-link") else None]
        paths = (line.strip() for line in lines if _PATH_LINE.match(line))
        yield from (Lead("editable", _EDITABLE, target) for target in paths)


def _direct_url(content: str, project: str) -> Iterator[Lead]:
    """PEP 610: pip and uv record an installation that is not from an index."""
    try:
        record = loads(content)
        url, vcs = urlsplit(str(record["url"])), {**record.get("vcs_info", {})}
        is_editable = record.get("dir_info", {}).get("editable") is True
        is_archive = "archive_info" in record
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield Lead("direct-url", "it cannot be read", is_own=True)
        return
    if is_editable:
        yield Lead("editable", _EDITABLE, unquote(url.path))
    elif vcs or (is_archive and url.scheme != "file"):
        names = {part.removesuffix(".git").lower() for part in url.path.split("/")}
        commit = str(vcs.get("commit_id", ""))
        fact = f"installed from {shown(masked(record['url']), 200)}"
        fact += f" at {commit}" if (is_id := _COMMIT.fullmatch(commit)) else ""
        yield Lead("direct-url", fact, None, commit if is_id else None, project.lower() in names)


def resolve(path: str, target: str, seen_at: str) -> str | None:
    """Resolve a target in the file at `path`, relative to the root; None if it is outside.

    `seen_at` is the path of the root itself.
    """
    if target.startswith("/"):
        inside = f"{target}/".startswith(f"{seen_at.rstrip('/')}/")
        resolved = os.path.relpath(target, seen_at) if inside else os.path.normpath(target)
        return resolved.lstrip("/").removeprefix(".")
    resolved = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return None if resolved.startswith("..") else resolved.removeprefix(".")
