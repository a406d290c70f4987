"""What installers leave in a root: files that lead elsewhere, and files of other projects.

They are read as text; nothing of them runs.
"""

import json
import os
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ..model import shown
from ..telemetry import masked

_LITERAL = re.compile(r"""["'](/[^"'\n]+)["']""")
_PATH_LINE = re.compile(r"(?!import[ \t]|#)\s*\S.*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_EDITABLE = "packages are imported from"


class Lead(NamedTuple):
    """A file points to a path, or says what was installed: `commit` of `project`, or of another."""

    kind: str
    fact: str
    target: str | None = None
    commit: str | None = None
    is_own: bool = False


def find_leads(path: str, text: bytes, project: str) -> Iterator[Lead]:
    """Where a file of a known name leads. `project` is the name of the mirrored repository."""
    name, content = path.rpartition("/")[2], text.decode("utf-8", "surrogateescape")
    if name == ".git":
        target = content.removeprefix("gitdir:").strip()
        yield Lead("repository", "its repository is at", target)
    elif name == "direct_url.json":
        yield from _direct_url(content, project)
    elif name.endswith(".py"):
        yield from (Lead("editable", _EDITABLE, target) for target in _LITERAL.findall(content))
    else:  # .pth, and .egg-link, whose second line leads from the first to setup.py
        lines = content.splitlines()[: 1 if name.endswith(".egg-link") else None]
        paths = (line.strip() for line in lines if _PATH_LINE.match(line))
        yield from (Lead("editable", _EDITABLE, target) for target in paths)


def _direct_url(content: str, project: str) -> Iterator[Lead]:
    """PEP 610: what pip and uv write of an installation that did not come from an index."""
    try:
        found = json.loads(content)
        url, facts = urlsplit(str(found["url"])), {**found.get("vcs_info", {})}
        is_editable = found.get("dir_info", {}).get("editable") is True
        is_archive = "archive_info" in found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield Lead("direct-url", "it cannot be read", is_own=True)
        return
    if is_editable:
        yield Lead("editable", _EDITABLE, unquote(url.path))
    elif facts or (is_archive and url.scheme != "file"):
        names = {part.removesuffix(".git").lower() for part in url.path.split("/")}
        commit = str(facts.get("commit_id", ""))
        fact = f"installed from {shown(masked(found['url']), 200)}"
        fact += f" at {commit}" if (known := _COMMIT.fullmatch(commit)) else ""
        yield Lead("direct-url", fact, None, commit if known else None, project.lower() in names)


def resolve(path: str, target: str, seen_at: str) -> str | None:
    """Where the file at `path` leads, from the top of the root; None where that is outside.

    The root is seen at `seen_at`, too.
    """
    if target.startswith("/"):
        inside = f"{target}/".startswith(f"{seen_at.rstrip('/')}/")
        found = os.path.relpath(target, seen_at) if inside else os.path.normpath(target)
        return found.lstrip("/").removeprefix(".")
    found = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return None if found.startswith("..") else found.removeprefix(".")


# -- whose file it is ------------------------------------------------------------------------------
#
# Branches hold copies of other projects: vendored packages, built documentation, environments that
# somebody committed. 467 of 10,400 files of a plain one are in some pull request of psf/requests.

_INSTALLED = re.compile(r"(?:^|.*/)(?:site-packages|dist-packages|node_modules)/")
_COPIED = re.compile(rf"{_INSTALLED.pattern}|(?:^|.*/)(?:bin|Scripts)/[Aa]ctivate")
_SHARED = {"test", "tests", "testing", "doc", "docs", "example", "examples", "setup", "conftest"}
_MODULE = re.compile(r"(?:(?:src|lib|python)/)?([^/]+)\.py")


def own_names(project: str, paths: Collection[str]) -> set[str]:
    """What code of the project is imported by, or what its directories are called.

    That is the project's name, packages that are in no package, modules at the top.
    """
    packages = {
        path.removesuffix("/__init__.py") for path in paths if path.endswith("/__init__.py")
    }
    outer = {path for path in packages if path.rpartition("/")[0] not in packages}
    names = {path.rpartition("/")[2] for path in outer if not _SHARED & {*path.split("/")}}
    names |= {found[1] for path in paths if (found := _MODULE.fullmatch(path))}
    return {project.lower(), project.lower().replace("-", "_"), *names} - _SHARED


def is_foreign(path: str, place: str, own: Collection[str]) -> bool:
    """Whether a file is another project's, of which the mirror has a copy at `place`.

    That is, no name on its way is the project's; and the mirror's is in an environment too, or is
    called the same as this one, which was installed or is in a wheel or an sdist.
    """
    *_, installed = _INSTALLED.split(path.rpartition("!")[2])
    if any(part.removesuffix(".py") in own for part in installed.split("/")):
        return False
    is_alike = installed.rpartition("/")[2] == place.rpartition("/")[2]
    return bool(_COPIED.match(place)) or (installed != path and is_alike)
