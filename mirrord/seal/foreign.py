"""Files of other projects, of which a branch has copies.

They are vendored packages, built documentation and committed environments: 467 of the 10,400 files
of a plain environment are in pull requests of psf/requests.
"""

import re
from collections.abc import Collection

_INSTALLED = re.compile(r"(?:^|.*/)(?:site-packages|dist-packages|node_modules)/")

# venv and conda copy their scripts of activation into each environment
_COPIED = re.compile(rf"{_INSTALLED.pattern}|(?:^|.*/)(?:bin|Scripts)/[Aa]ctivate")

# names of directories and modules that many projects have
_SHARED = {"test", "tests", "testing", "doc", "docs", "example", "examples", "setup", "conftest"}

_MODULE = re.compile(r"(?:(?:src|lib|python)/)?([^/]+)\.py")


def own_names(project: str, paths: Collection[str]) -> set[str]:
    """Return the names by which a project is imported or its directories are called.

    They are the project's name, its top-level packages and modules.
    """
    packages = {
        path.removesuffix("/__init__.py") for path in paths if path.endswith("/__init__.py")
    }
    outer = {path for path in packages if path.rpartition("/")[0] not in packages}
    names = {path.rpartition("/")[2] for path in outer if not _SHARED & {*path.split("/")}}
    names |= {match[1] for path in paths if (match := _MODULE.fullmatch(path))}
    return {project.lower(), project.lower().replace("-", "_"), *names} - _SHARED


def is_foreign(path: str, place: str, own: Collection[str]) -> bool:
    """Return whether a file is another project's, of which the mirror has a copy at `place`.

    No component of its path may be a name of the project. The mirror's copy must be in an
    environment too, or have the same file name while this file is installed or in an archive.
    """
    *_, installed = _INSTALLED.split(path.rpartition("!")[2])
    if any(part.removesuffix(".py") in own for part in installed.split("/")):
        return False
    is_alike = installed.rpartition("/")[2] == place.rpartition("/")[2]
    return bool(_COPIED.match(place)) or (installed != path and is_alike)
