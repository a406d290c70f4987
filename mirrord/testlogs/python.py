"""Logs of Python's runners, by the rules of SWE-bench's grading, with their quirks: the test ids in
datasets were read from logs by them. For example, an id ends at its first space, and a parameter
that is a path loses its directories.
"""

import re
from collections.abc import Iterator

from .outcomes import Outcome, Outcomes, Parser

_WORDS = {outcome.name: outcome for outcome in Outcome} | {"XFAIL": Outcome.PASSED}
_COUNT = re.compile(r"\[\d+\]")
_STATUSES = tuple(_WORDS)


def _summary(log: str) -> Iterator[tuple[Outcome, str]]:
    """Iterate pytest's -rA summary: an outcome, and an id that ends at its first space."""
    for line in log.split("\n"):
        if line.startswith(_STATUSES):
            # behind ` - ` stands the message
            if line.startswith("FAILED"):
                line = line.replace(" - ", " ")
            status, *rest = line.split()
            if rest and status in _WORDS and not _is_count(status, rest[0]):
                yield _WORDS[status], rest[0]


def _is_count(status: str, name: str) -> bool:
    """Return whether a line is `SKIPPED [1] path:3: reason`, which names no test."""
    return status == "SKIPPED" and _COUNT.fullmatch(name) is not None


def _pytest(log: str) -> Outcomes:
    return {name: outcome for outcome, name in _summary(log)}


def _pytest_paths(log: str) -> Outcomes:
    """Read a summary; a parameter that is an absolute path keeps only its last component."""
    return {_short(name): outcome for outcome, name in _summary(log)}


def _short(name: str) -> str:
    if match := re.search(r"(.*?)\[(.*)\]", name):
        main, option = match.groups()
        if option.startswith("/") and not option.startswith("//") and "*" not in option:
            option = "/" + option.rpartition("/")[2]
        return f"{main}[{option}]"
    return name


def _pytest_full_ids(log: str) -> Outcomes:
    """Read ids with spaces, without colours; older releases write the outcome last."""
    outcomes: Outcomes = {}
    for raw in log.split("\n"):
        line = re.sub(r"[\x01-\x1f]", "", re.sub(r"\[(\d+)m", "", raw))
        if line.startswith(_STATUSES):
            if line.startswith("FAILED"):
                line = line.partition(" - ")[0]
            status, *rest = line.split()
            if rest and status in _WORDS and not _is_count(status, rest[0]):
                outcomes[" ".join(rest)] = _WORDS[status]
        elif line.endswith(_STATUSES):
            *rest, status = line.split()
            if rest and status in _WORDS:
                outcomes[" ".join(rest)] = _WORDS[status]
    return outcomes


def _seaborn(log: str) -> Outcomes:
    outcomes: Outcomes = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) >= 2 and line.startswith(("FAILED", "PASSED")):
            outcomes[words[1]] = Outcome.FAILED if line.startswith("FAILED") else Outcome.PASSED
        elif len(words) >= 2 and words[1] == "PASSED":
            outcomes[words[0]] = Outcome.PASSED
    return outcomes


def _matplotlib(log: str) -> Outcomes:
    # as SWE-bench's parser, by which the ids of its rows have the numbers
    return _pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


_UNITTEST_ENDS = {
    **dict.fromkeys((" ... ok", " ... OK", " ...  OK"), Outcome.PASSED),
    " ... FAIL": Outcome.FAILED,
    " ... ERROR": Outcome.ERROR,
}
_INTERRUPTED = re.compile(  # the test's own output between `...` and `ok`
    r"^(.*?)\s\.\.\.\s(?:Testing against Django installed in (?s:.*?) silenced\)\."
    r"|Internal Server Error: \/(?:.*)\/|System check identified no issues \(0 silenced\))\nok$",
    re.MULTILINE,
)


def _unittest(log: str) -> Outcomes:
    """Read the output of unittest -v and of Django's runner."""
    outcomes: Outcomes = {}
    before = None
    for raw in log.split("\n"):
        line = raw.strip()
        if "--version is equivalent to version" in line:
            outcomes["--version is equivalent to version"] = Outcome.PASSED
        if " ... " in line:
            before = line.partition(" ... ")[0]
        for end, outcome in _UNITTEST_ENDS.items():
            if line.endswith(end):
                if line.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                    line = line.partition("...")[2].strip()  # django-7188: two lines in one
                outcomes[line.rpartition(end)[0]] = outcome
                break
        if " ... skipped" in line:
            outcomes[line.partition(" ... skipped")[0]] = Outcome.SKIPPED
        for start, outcome in (("FAIL:", Outcome.FAILED), ("ERROR:", Outcome.ERROR)):
            if line.startswith(start) and len(words := line.split()) > 1:
                outcomes[words[1]] = outcome
        if line.startswith("ok") and before is not None:
            outcomes[before] = Outcome.PASSED
    return outcomes | dict.fromkeys(_INTERRUPTED.findall(log), Outcome.PASSED)


_HEAD_MAX = 1000  # on a line of 100,000 characters the pattern below takes a minute


def _sympy(log: str) -> Outcomes:
    heads = [line for line in log.split("\n") if ".py:" in line and len(line) <= _HEAD_MAX]
    pairs = re.findall(r"_* (.*)\.py:(.*) _*", "\n".join(heads))
    outcomes: Outcomes = {f"{path}.py:{name}": Outcome.FAILED for path, name in pairs}
    ends = {" E": Outcome.ERROR, " F": Outcome.FAILED, " ok": Outcome.PASSED}
    for raw in log.split("\n"):
        line = raw.strip()
        for end, outcome in ends.items():
            if line.startswith("test_") and line.endswith(end):
                outcomes[line.split()[0]] = outcome
    return outcomes


_NEBO = re.compile(
    r"(?:\[gw\d+\] +\[[^\]]*\] +)?(?P<first>PASSED|FAILED|SKIPPED|ERROR) +(?P<named>\S.*)$"
    r"|(?P<name>\S.*?) +(?P<last>PASSED|FAILED|SKIPPED|ERROR) +\[[^\]]*\]"
)


def _nebo(log: str) -> Outcomes:
    """Read lines of `pytest -v`, also of xdist's workers, with their duration; for SWE-rebench."""
    outcomes: Outcomes = {}
    for line in log.split("\n"):
        if match := _NEBO.match(line.strip()):
            named = (match["name"] or match["named"]).partition(" in ")[0].partition(" - ")[0]
            outcomes[named.strip()] = Outcome[match["first"] or match["last"]]
    return outcomes


PARSERS: dict[str, Parser] = {
    "pytest": _pytest,
    "pytest_options": _pytest_paths,
    "pytest_v2": _pytest_full_ids,
    "pytest_nebo": _nebo,
    "pydantic": _pytest,
    "dvc": _pytest,
    "unittest": _unittest,
    "django": _unittest,
    "matplotlib": _matplotlib,
    "seaborn": _seaborn,
    "sympy": _sympy,
    **dict.fromkeys(("astroid", "flask", "marshmallow", "pvlib", "pyvista"), _pytest),
    **dict.fromkeys(("sqlfluff", "xarray"), _pytest),
    **dict.fromkeys(("pydicom", "pylint", "requests"), _pytest_paths),
    **dict.fromkeys(("astropy", "scikit", "sphinx"), _pytest_full_ids),
}
