"""What this host lacks for a recipe: its Python, Debian packages, programs that its log names."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..presence import is_dir, matching
from ..protocol import Missing, Recipe

_FETCHING = "fetching Python "
_DPKG = Path("/var/lib/dpkg/info")
_PROGRAMS = (
    re.compile(r"(?:^|[\s:])([\w.+-]+): (?:command )?not found$"),  # bash, dash
    re.compile(r"error: command '([\w.+/-]+)' failed: No such file"),  # setuptools
    re.compile(r"fatal error: ([\w.+/-]+\.h(?:pp)?): No such file"),  # gcc
    re.compile(r"No such file or directory: '([\w.+-]+)'$"),  # subprocess, of a program
)


def lacks_of(recipe: Recipe, failure: str | None, tail: Iterable[str]) -> list[Missing]:
    """Return what a host lacks, as far as a recipe and the last lines of a failed build say."""
    if failure and failure.startswith(_FETCHING):
        return [Missing(kind="interpreter", name=f"Python {recipe.python}")]
    lacks = [
        Missing(kind="package", name=name)
        for name in recipe.host_packages
        if not _is_installed(name)
    ]
    if failure:
        programs = dict.fromkeys(_iter_programs(tail))
        lacks += [Missing(kind="program", name=name) for name in programs]
    return lacks


def _is_installed(package: str) -> bool:
    """Return whether Debian's package is on this host; true where that is not known."""
    if not is_dir(_DPKG):
        return True
    return any(matching(_DPKG, f"{package}.list")) or any(matching(_DPKG, f"{package}:*.list"))


def _iter_programs(tail: Iterable[str]) -> Iterator[str]:
    for line in tail:
        for pattern in _PROGRAMS:
            if match := pattern.search(line.strip()):
                yield match[1]
