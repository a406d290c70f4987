"""Scripts of rows that run their tests: the command for them, and what of its output is their log.

`eval_script` is SWE-bench's, with marks around the output of the runner. `run_script` is called
with the files of tests, as in SWE-bench Pro, and `parsing_script` with what it wrote.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from .outcomes import Outcome, Outcomes, Parser

SCRIPTS = ("eval_script", "run_script", "parsing_script")
# a grade has a new /tmp, where nobody else writes
_BEGIN = "scripts=/tmp/mirrord-scripts; mkdir -p $scripts"
_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"
_PARSED = ">>>>> Output of parsing_script"


def command_of_scripts(row: Mapping[str, Any]) -> str | None:
    """Return the shell command that runs a row's script; None if it has none."""
    quoted = {name: shlex.quote(row[name]) for name in SCRIPTS if name in row}
    # printf is a builtin of sh: an argument of a program may have 128 KiB
    lines = [_BEGIN]
    lines += [f"""printf '%s\\n' {text} > "$scripts/{name}\"""" for name, text in quoted.items()]
    if "run_script" in row:
        files = shlex.quote(",".join(row.get("test_files") or ()))
        lines.append(f'bash "$scripts/run_script" {files} > "$scripts/out" 2> "$scripts/err"')
        lines += ["status=$?", 'cat "$scripts/out" "$scripts/err"']
        if "parsing_script" in row:
            arguments = '"$scripts/parsing_script" "$scripts/out" "$scripts/err" "$scripts/json"'
            lines.append(f'"$(command -v python3 || command -v python)" {arguments}')
            lines.append(f"""printf '\\n%s\\n' {shlex.quote(_PARSED)}; cat "$scripts/json\"""")
        lines.append('exit "$status"')
    elif "eval_script" in row:
        lines.append('bash "$scripts/eval_script"')
    else:
        return None
    return "\n".join(lines)


def is_scripted(command: str) -> bool:
    """Return whether a command runs a row's script, which names the files of tests itself."""
    return command.startswith(_BEGIN)


def tells_status(command: str) -> bool:
    """Return whether the exit status is the runner's; an eval_script ends with another command."""
    return not is_scripted(command) or "$scripts/run_script" in command


def cut_to_tests(log: str) -> str:
    """Return what is between SWE-bench's marks; all of a log without them."""
    _, start, after = log.partition(_START)
    return after.partition(_END)[0] if start else log


def _parsed(log: str) -> Outcomes:
    """Read what a parsing_script wrote: `tests` with a name and a status."""
    try:
        tests = json.loads(log.rpartition(_PARSED)[2])["tests"]
        told = [(str(test["name"]), str(test["status"]).upper()) for test in tests]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {name: Outcome.__members__.get(status, Outcome.FAILED) for name, status in told}


PARSERS: dict[str, Parser] = {"parsing_script": _parsed}
