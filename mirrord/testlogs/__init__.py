"""Test logs: the outcome of each test. Reads no files but a given one with parsers of others."""

import re
from collections.abc import Mapping

from . import documents, lines, python, scripts
from .files import read_parsers
from .outcomes import (
    Miss,
    Outcome,
    Outcomes,
    Parser,
    Want,
    arguments_of,
    iter_misses,
    lines_about,
    outcome_of,
)
from .scripts import (
    PARSING,
    SCRIPTS,
    after_before,
    command_of_scripts,
    cut_to_tests,
    is_scripted,
    tells_status,
    with_parsed,
)

__all__ = [
    "PARSING",
    "SCRIPTS",
    "Miss",
    "Outcome",
    "Outcomes",
    "Parser",
    "Want",
    "after_before",
    "arguments_of",
    "command_of_scripts",
    "cut_to_tests",
    "find_parser",
    "is_scripted",
    "iter_misses",
    "lines_about",
    "outcome_of",
    "parser_names",
    "parser_of_repo",
    "read_parsers",
    "takes_files",
    "tells_status",
    "with_parsed",
]

_PARSERS: dict[str, Parser] = {
    **python.PARSERS, **lines.PARSERS, **documents.PARSERS, **scripts.PARSERS,
}  # fmt: skip
_REPOSITORIES = {"pvlib-python": "pvlib", "scikit-learn": "scikit"}


def find_parser(name: str, others: Mapping[str, Parser] | None = None) -> Parser | None:
    """Find a parser by name, with or without a prefix of SWE-bench or SWE-rebench.

    One of `others`, which have whole names, comes before the own of that name.
    """
    return (others or {}).get(name) or _PARSERS.get(_without_prefix(name))


def _without_prefix(name: str) -> str:
    return re.sub(r"^parse_(?:logs?_)?", "", name)


def parser_names() -> list[str]:
    """Return the names that `find_parser` knows, sorted."""
    return sorted(_PARSERS)


def takes_files(name: str) -> bool:
    """Return whether a parser's runner gets the files of the tests as arguments."""
    return _without_prefix(name) in python.PARSERS


def parser_of_repo(repo: str) -> str:
    """Return the name of the parser that SWE-bench uses for a repository."""
    name = repo.lower().rpartition("/")[2]
    name = _REPOSITORIES.get(name, name)
    return name if name in python.PARSERS else "pytest"
