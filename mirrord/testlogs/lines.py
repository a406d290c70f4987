"""Logs of other languages' runners that name a test and its outcome on one line.

Ids are those of the published datasets where they have any (SWE-bench Multilingual, SWE-rebench):
jest's are without the suites around a test, vitest's and phpunit's with them. A test that is named
twice has its last outcome, as there.
"""

import re
from collections.abc import Iterator
from itertools import zip_longest

from . import documents
from .outcomes import Outcome, Outcomes, Parser

PASSED, FAILED, SKIPPED, ERROR = Outcome

# control sequences of ECMA-48, and the carriage returns of progress bars
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_DURATION = re.compile(r"\s*[(\[]?\d+(?:\.\d+)?\s?(?:ms|s|m|min)[)\]]?$")


def plain_lines(log: str) -> Iterator[str]:
    """Iterate the lines without colours and movements of the cursor."""
    for line in log.split("\n"):
        yield _COLOUR.sub("", line).rstrip()


def _by_line(pattern: str, outcomes: dict[str, Outcome]) -> Parser:
    """Return a parser of lines with a `name` and a `word` for its outcome."""
    compiled = re.compile(pattern)

    def parse(log: str) -> Outcomes:
        matches = (compiled.match(line.strip()) for line in plain_lines(log))
        return {
            match["name"].strip(): outcomes[match["word"]]
            for match in matches
            if match and match["word"] in outcomes
        }

    return parse


def _both(*parsers: Parser) -> Parser:
    """Return a parser of logs in one of several forms."""

    def parse(log: str) -> Outcomes:
        outcomes: Outcomes = {}
        for parser in parsers:
            outcomes |= parser(log)
        return outcomes

    return parse


def _tap(log: str) -> Outcomes:
    """Read the Test Anything Protocol, 12 to 14: bats, node --test, tape, mocha, busted, prove."""
    outcomes: Outcomes = {}
    for line in plain_lines(log):
        match = re.match(r"\s*(?P<not>not )?ok\b(?:\s+\d+)?(?:\s+-)?\s*(?P<rest>.*)$", line)
        if match is None:
            continue
        name, directive = match["rest"], ""
        if marked := re.search(r"(?:^|\s)#\s*(skip|todo)\b\S*\s*(.*)$", name, re.IGNORECASE):
            # busted writes the name behind the directive
            directive, name = marked[1].lower(), name[: marked.start()] or marked[2]
        # as node-tap ends its lines
        name = re.sub(r"\s+# time=\S+$", "", name).strip()
        if name:
            outcome = FAILED if match["not"] else PASSED
            # by the protocol a todo may fail, and the run passes all the same
            outcomes[name] = {"skip": SKIPPED, "todo": PASSED}.get(directive, outcome)
    return outcomes


def _indented(log: str, pattern: str, outcomes: dict[str, Outcome], joined: str) -> Outcomes:
    """Read lines below the suites that they are in, which are indented less."""
    compiled, read = re.compile(pattern), dict[str, Outcome]()
    suites: list[tuple[int, str]] = []
    for line in plain_lines(log):
        if not line.strip():
            continue
        indent, text = len(line) - len(line.lstrip()), line.strip()
        while suites and suites[-1][0] >= indent:
            suites.pop()
        if match := compiled.match(text):
            outcome = next(value for mark, value in outcomes.items() if re.match(mark, text))
            name = _DURATION.sub("", match["name"]).strip()
            read[joined.join([*(suite for _, suite in suites), name])] = outcome
        elif indent:  # what begins a line is no suite, but a command or a word of a reporter
            suites.append((indent, text))
    return read


def _mocha(log: str) -> Outcomes:
    """Read mocha's reporter `spec`, up to the list of failures, which names them again."""
    # `-` marks a pending test
    marks = {"[✔✓]": PASSED, r"\d+\)": FAILED, "-": SKIPPED}
    spec = re.split(r"\n\s*\d+ (?:passing|pending|failing)\b", "\n".join(plain_lines(log)))[0]
    return _indented(spec, r"(?:[✔✓]|\d+\)|-)\s+(?P<name>.+)$", marks, " ")


def _karma(log: str) -> Outcomes:
    """Read the reporters `mocha` and `spec`, between the browser's start and the summary."""
    # ℹ marks a skipped test in the reporter `mocha`
    marks = {"[✔✓]": PASSED, "[✖✗]": FAILED, "ℹ": SKIPPED}
    lines = "\n".join(plain_lines(log)).partition("Starting browser")[2].partition("\n")[2]
    return _indented(lines.partition("\nSUMMARY:")[0], r"[✔✓✖✗ℹ]\s+(?P<name>.+)$", marks, " > ")


def _rspec(log: str) -> Outcomes:
    """Read rspec's `documentation`, and lines `full description - outcome`."""
    outcomes: Outcomes = {}
    groups: list[tuple[int, str]] = []
    body = re.split(r"\n(?:Pending:|Failures:|Finished in )", "\n".join(plain_lines(log)))[0]
    lines = [line for line in body.split("\n") if line.strip()]
    for line, after in zip_longest(lines, lines[1:], fillvalue=""):
        indent, text = len(line) - len(line.lstrip()), line.strip()
        if match := re.fullmatch(r"(.+) - (passed|failed|pending)", text):
            outcomes[match[1]] = {"passed": PASSED, "failed": FAILED}.get(match[2], SKIPPED)
            continue
        while groups and groups[-1][0] >= indent:
            groups.pop()
        if len(after) - len(after.lstrip()) > indent:
            groups.append((indent, text))
            continue
        mark = re.search(r" \((FAILED - \d+|PENDING: .*)\)$", text)
        outcome = PASSED if mark is None else FAILED if mark[1][0] == "F" else SKIPPED
        name = text if mark is None else text[: mark.start()]
        if groups:
            outcomes[" ".join([*(group for _, group in groups), name])] = outcome
    return outcomes


def _phpunit(log: str) -> Outcomes:
    """Read `--testdox`: the title of a class, and its tests with a mark."""
    outcomes: Outcomes = {}
    suite = None
    for line in plain_lines(log):
        # ↩ skipped, ∅ incomplete, ☢ risky, ⚠ passed with a warning
        if match := re.match(r"\s*([✔✘↩∅☢⚠])\s+(.+)$", line):
            outcome = {"✔": PASSED, "⚠": PASSED, "↩": SKIPPED, "∅": SKIPPED}.get(match[1], FAILED)
            name = re.sub(r" \[[\d.]+ m?s\]$", "", match[2])
            outcomes[f"{suite} > {name}" if suite else name] = outcome
        elif match := re.match(r"(\w.*?)(?: \(.+\))?$", line):
            suite = match[1]
    return outcomes


def _maven(log: str) -> Outcomes:
    """Read surefire's lines of tests and classes, and one BUILD for each `-Dtest=NAME` of `set -x`.

    Surefire names a test only if it failed; a class without failures has passed.
    """
    outcomes: Outcomes = {}
    asked: list[str] = []
    for line in plain_lines(log):
        text = re.sub(r"^\[(?:INFO|ERROR|WARNING)\]\s+", "", line.strip())
        if line.startswith("+") and (match := re.search(r"-Dtest=(\S+)", line)):
            asked.append(match[1].strip("'\""))
        elif (match := re.match(r"BUILD (SUCCESS|FAILURE)$", text)) and asked:
            outcomes[asked.pop(0)] = PASSED if match[1] == "SUCCESS" else FAILED
        elif match := re.match(
            # `- in` up to surefire 2, `-- in` since 3
            r"Tests run: (\d+), Failures: (\d+), Errors: (\d+), Skipped: (\d+).*?"
            r"(?:-- in|- in) ([\w.$]+)$", text,
        ):  # fmt: skip
            run, failures, errors, skipped = map(int, match.groups()[:4])
            outcome = FAILED if failures else ERROR if errors else PASSED
            outcomes[match[5]] = SKIPPED if run and run == skipped else outcome
        elif match := re.match(
            r"([\w.$]+?)[.#](\w+)(?:[({\[].*?)?\s+(?:--\s+)?Time elapsed: .*<<< (FAILURE|ERROR)!$",
            text,
        ):
            outcomes[f"{match[1]}#{match[2]}"] = FAILED if match[3] == "FAILURE" else ERROR
    return outcomes


def _gradle(log: str) -> Outcomes:
    """Read `Class > test OUTCOME`; a name and its outcome may be apart where tasks run at once."""
    outcomes: Outcomes = {}
    waiting = None
    words = {"PASSED": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED}
    for raw in plain_lines(log):
        line = raw.strip()
        if match := re.match(r"([^>].*?\S)\s+(PASSED|FAILED|SKIPPED)$", line):
            if " > " in match[1]:
                outcomes[match[1]] = words[match[2]]
                waiting = None
        elif re.match(r"\S+ > \S+$", line):
            waiting = line
        elif waiting is not None and line in words:
            outcomes[waiting], waiting = words[line], None
    return outcomes


def _ctest(log: str) -> Outcomes:
    outcomes: Outcomes = {}
    for line in plain_lines(log):
        match = re.match(
            r"\s*\d+/\d+ Test\s+#\d+: (.+?) \.*\s*(?:\*\*\*)?(.+?)\s+[\d.]+ sec\b", line
        )
        if match is None:
            continue
        word = match[2].strip()
        skipped = word in ("Skipped", "Not Run (Disabled)")
        outcomes[match[1]] = PASSED if word == "Passed" else SKIPPED if skipped else FAILED
    return outcomes


_WORD = {"ok": PASSED, "FAILED": FAILED, "ignored": SKIPPED}
# ScalaTest has `-`, munit `+` and `==> X`, specs2 `+`, `x`, `!` and `o`
_SCALA = {"+": PASSED, "-": PASSED, "==> X": FAILED, "x": FAILED, "!": ERROR, "o": SKIPPED}


def _sbt(log: str) -> Outcomes:
    """Read ScalaTest's, munit's and specs2's lines: below a suite, marked when they failed."""
    outcomes: Outcomes = {}
    suite = None
    for line in plain_lines(log):
        text = re.sub(r"^\[(?:info|error|warn)\] ?", "", line)
        if match := re.match(r"(\w[\w.$]*):(?: [\d.]+s)?$", text):
            suite = match[1]
        elif match := re.match(r"\s*(\+|-|==> X|x|!|o) (.+?)(?: +[\d.]+s(?: .*)?)?$", text):
            name, outcome = match[2], _SCALA[match[1]]
            if mark := re.search(
                r" \*\*\* (FAILED|IGNORED|CANCELED) \*\*\*.*$|!!! IGNORED !!!$", name
            ):
                name = name[: mark.start()].strip()
                outcome = FAILED if mark[1] == "FAILED" else SKIPPED
            name = name.removeprefix(f"{suite}.")
            outcomes[f"{suite} > {name}" if suite else name] = outcome
    return outcomes


# ○ and ✎ are jest's for skipped and todo, ﹣ node's for skipped
_JS = _by_line(
    r"(?P<word>[✓✔✕✖✗×○✎﹣])\s+(?:(?<=○ )skipped |(?<=✎ )todo )?(?P<name>.+?)"
    r"(?:\s+\(?[\d.]+\s?m?s\)?)?(?:\s+# (?:SKIP|TODO)\b.*)?$",
    {"✓": PASSED, "✔": PASSED, "✕": FAILED, "✖": FAILED, "✗": FAILED, "×": FAILED}
    | {"○": SKIPPED, "✎": SKIPPED, "﹣": SKIPPED},
)
_JEST_JSON = _by_line(
    r"\[(?P<word>PASSED|FAILED|SKIPPED)\]\s+(?P<name>.+)$",
    {"PASSED": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED},
)
# an XPASS fails the run
_AUTOMAKE = _by_line(
    r"(?P<word>PASS|FAIL|SKIP|XFAIL|XPASS|ERROR):\s+(?P<name>.+)$",
    {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED, "XFAIL": PASSED, "XPASS": FAILED}
    | {"ERROR": ERROR},
)
# as `-v` of minitest prints them
_MINITEST = _by_line(
    r"(?P<name>\S+#.+?) = [\d.]+ s = (?P<word>[.FES])$",
    {".": PASSED, "F": FAILED, "E": ERROR, "S": SKIPPED},
)
# of test-unit's `--verbose`: an omission, a pending test, a notification
_RUBY_UNIT = _by_line(
    r"(?:test: )?(?P<name>.+?):\s+(?P<word>\.|[EFOPN]\b)(?::.*)?",
    {".": PASSED, "F": FAILED, "E": ERROR, "O": SKIPPED, "P": SKIPPED, "N": SKIPPED},
)

_DOTNET = _by_line(
    r"(?P<word>Passed|Failed|Skipped)\s+(?P<name>\S.*?)"
    r"(?:\s+\[(?:< )?[\d.]+ ?(?:ms|s|m)[^\]]*\])?$",
    {"Passed": PASSED, "Failed": FAILED, "Skipped": SKIPPED},
)


# parsers by name, without a prefix such as SWE-bench's `parse_log_`
PARSERS: dict[str, Parser] = {
    "gotest": _by_line(
        r"--- (?P<word>PASS|FAIL|SKIP): (?P<name>.+) \([\d.]+s\)$",
        {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED},
    ),
    "cargo": _by_line(
        # `- should panic` is libtest's remark, no part of a name
        r"test (?P<name>.+?)(?: - should panic)? \.\.\. (?P<word>ok|FAILED|ignored)\b",
        _WORD,
    ),
    "jest": _JS,
    "node": _JS,
    "jest_json": _JEST_JSON,
    "immutable_js": _both(_JS, _JEST_JSON),
    "mocha": _mocha,
    "vitest": _by_line(
        r"(?P<word>[✓×↓])\s+(?P<name>.+?)(?:\s+(?:\d+\s*m?s|\[skipped\]))?$",
        {"✓": PASSED, "×": FAILED, "↓": SKIPPED},
    ),
    "karma": _karma,
    "tap": _tap,
    "bats": _tap,
    "maven": _maven,
    "ant": _by_line(
        r"\[junit\]\s+\[(?P<word>PASS|FAIL|ERR|SKIP)\]\s+(?P<name>.*)$",
        {"PASS": PASSED, "FAIL": FAILED, "ERR": ERROR, "SKIP": SKIPPED},
    ),
    "gradle": _gradle,
    "gradle_custom": _gradle,
    "ctest": _ctest,
    "googletest": _by_line(
        # `where` tells the parameter or the type of a failed test
        r".*?\[\s*(?P<word>OK|FAILED|SKIPPED)\s*\]\s(?P<name>.*?)(?:, where .*)? \([\d.]+ ms\)$",
        {"OK": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED},
    ),
    "automake": _AUTOMAKE,
    "jq": _AUTOMAKE,
    "redis": _by_line(
        r"\[(?P<word>ok|err|skip|ignore)\]:?\s+(?P<name>.+?)(?:\s+\([\d.]+ m?s\)|\s+in\s+\S+)?$",
        {"ok": PASSED, "err": FAILED, "skip": SKIPPED, "ignore": SKIPPED},
    ),
    "micropython_test": _by_line(
        r"(?P<word>pass|FAIL|skip)\s+(?P<name>.+)$",
        {"pass": PASSED, "FAIL": FAILED, "skip": SKIPPED},
    ),
    "rspec": _rspec,
    "rspec_transformed_json": _rspec,
    "minitest": _MINITEST,
    "ruby_unit": _RUBY_UNIT,
    "jekyll": _both(_MINITEST, _RUBY_UNIT),
    "phpunit": _phpunit,
    "busted": _both(
        _tap,
        _by_line(
            r"\[\s*(?P<word>OK|FAILED|SKIPPED|ERROR)\s*\] \S+ @ \d+: (?P<name>.+) \([\d.]+ ms\)$",
            {"OK": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED, "ERROR": ERROR},
        ),
    ),
    "dotnet": _DOTNET,
    "csharp": _DOTNET,
    # ExUnit's --trace; the list of failures, with their modules, comes last
    "elixir": _both(
        _by_line(
            r"\* test (?P<name>.+?) (?:\([\d.]+ms\) )?(?<!\(skipped\) )(?P<word>\[)L#\d+\]$",
            {"[": PASSED},
        ),
        _by_line(r"\* test (?P<name>.+?) \((?P<word>skipped)\) \[L#\d+\]$", {"skipped": SKIPPED}),
        _by_line(r"\d+(?P<word>\)) +test (?P<name>.+) \([^()]+\)$", {")": FAILED}),
    ),
    "swift": _by_line(
        r"Test Case '(?P<name>[^']+)' (?P<word>passed|failed|skipped) \([\d.]+ seconds\)",
        {"passed": PASSED, "failed": FAILED, "skipped": SKIPPED},
    ),
    "sbt": _both(_sbt, documents.PARSERS["junit"]),
}
