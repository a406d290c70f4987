"""Parsers of logs that a file of others defines, such as SWE-rebench V2's `log_parsers.py`.

The file is code of the operator's choice: it runs in the process that judges the tests.
"""

import importlib.machinery
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ProofFailedError, UsageError
from .outcomes import Outcomes, Parser, outcome_named


def read_parsers(path: Path) -> dict[str, Parser]:
    """Return the parsers that a file defines: its NAME_TO_PARSER, or its functions `parse_…`.

    Raises UsageError.
    """
    loader = importlib.machinery.SourceFileLoader("mirrord_log_parsers", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None  # it is given a loader
    module = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"cannot read the parsers of {path}: {type(error).__name__}: {error}",
            hint="name a file of Python; what it imports beside it is found by PYTHONPATH",
        ) from error
    names = getattr(module, "NAME_TO_PARSER", vars(module))
    if not isinstance(names, Mapping):
        raise UsageError(f"cannot read the parsers of {path}: its NAME_TO_PARSER is no mapping")
    parsers = {
        name: _guarded(name, function) for name, function in names.items()
        if str(name).startswith("parse_") and callable(function)
    }  # fmt: skip
    if not parsers:
        raise UsageError(
            f"cannot read the parsers of {path}: it has no parser",
            hint="parsers are functions `parse_NAME(log)` that return a status for each test",
        )
    return parsers


def _guarded(name: str, function: Callable[[str], Any]) -> Parser:
    """Return a parser whose bugs are errors: a log that was not read proves nothing."""

    def parse(log: str) -> Outcomes:
        try:
            statuses = function(log).items()
            return {
                str(test): outcome_named(str(getattr(status, "value", status)))
                for test, status in statuses
            }
        except Exception as error:
            raise ProofFailedError(
                f"cannot read the log of the tests: {name} failed: {type(error).__name__}: {error}"
            ) from error

    return parse
