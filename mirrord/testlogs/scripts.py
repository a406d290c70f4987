"""Scripts of rows that run their tests: the command for them, and what of its output is their
log.

`eval_script` is SWE-bench's, with marks around the output of the runner. `run_script` is called
with the files of tests, as in SWE-bench Pro, after `before_script` in the same shell, and
`parsing_script` with what it wrote, after it and elsewhere: the code under test never sees it.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from .outcomes import Outcomes, Parser, outcome_named

SCRIPTS = ("eval_script", "before_script", "run_script", "parsing_script")
_BEGUN = b">>>>> before_script ended\n"
# printed by success, not by failure: the code under test runs after it, and cannot take it back
_BEFORE = f"""\
set -e; . "$MIRRORD_FILES/before_script" >&2; set +e
echo "{_BEGUN.decode().strip()}" >&2
"""
_RUN = 'bash "$MIRRORD_FILES/run_script"'
_EVAL = 'bash "$MIRRORD_FILES/eval_script"'
# prints what the row's parsing_script makes of the files `stdout` and `stderr`
PARSING = """\
json=/tmp/parsed && cd "$MIRRORD_FILES" || exit
"$(command -v python3 || command -v python)" -E -s parsing_script stdout stderr "$json" >&2 &&
  cat "$json"
"""
_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"
_PARSED = ">>>>> Output of parsing_script"


def command_of_scripts(row: Mapping[str, Any]) -> str | None:
    """Return the shell command that runs a row's script; None if it has none."""
    if "run_script" in row:
        run = f"{_RUN} {shlex.quote(','.join(row.get('test_files') or ()))}"
        return _BEFORE + run if "before_script" in row else run
    return _EVAL if "eval_script" in row else None


def is_scripted(command: str) -> bool:
    """Return whether a command runs a row's script, which names the files of tests itself."""
    return command.removeprefix(_BEFORE).startswith((_RUN, _EVAL))


def tells_status(command: str) -> bool:
    """Return whether the exit status is the runner's; an eval_script ends with another command."""
    return command != _EVAL


def after_before(command: str, stderr: bytes) -> tuple[bytes, bool]:
    """Return what a command's scripts wrote to stderr, and whether the row's run_script began."""
    if not command.startswith(_BEFORE):
        return stderr, True
    before, mark, after = stderr.partition(_BEGUN)
    return before + after, bool(mark)


def with_parsed(log: str, parsed: str) -> str:
    """Return a log that ends with what a parsing_script made of it."""
    return f"{log}\n{_PARSED}\n{parsed}"


def cut_to_tests(log: str) -> str:
    """Return what is between SWE-bench's marks; all of a log without them."""
    _, start, after = log.partition(_START)
    return after.partition(_END)[0] if start else log


def _parsed(log: str) -> Outcomes:
    """Read what a parsing_script wrote: `tests` with a name and a status."""
    try:
        tests = json.loads(log.rpartition(_PARSED)[2])["tests"]
        return {str(test["name"]): outcome_named(str(test["status"])) for test in tests}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


PARSERS: dict[str, Parser] = {"parsing_script": _parsed}
