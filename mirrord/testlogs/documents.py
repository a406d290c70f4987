"""Reports in XML in a log, where a command printed them: JUnit's, which most runners can write, and
doctest's of C++.
"""

import re
from collections.abc import Iterator
from functools import partial
from xml.etree import ElementTree

from .outcomes import Outcome, Outcomes, Parser

_BYTES_MAX = 64 * 1024**2
_KINDS = {
    "skipped": Outcome.SKIPPED,
    "failure": Outcome.FAILED,
    "error": Outcome.ERROR,
}


def _iter_documents(log: str, tags: str) -> Iterator[ElementTree.Element]:
    """Iterate the documents that can be read; expat bounds what entities expand to."""
    for match in re.finditer(rf"<({tags})[\s>].*?</\1>", log[:_BYTES_MAX], re.DOTALL):
        try:
            yield ElementTree.fromstring(match[0])  # noqa: S314
        except ElementTree.ParseError:
            continue


def _junit(log: str, between: str = " ") -> Outcomes:
    """Read `<testcase>`s, named `class name`, or `name` where they have no class."""
    outcomes: Outcomes = {}
    for document in _iter_documents(log, "testsuites|testsuite"):
        for case in document.iter("testcase"):
            name = between.join(filter(None, (case.get("classname"), case.get("name"))))
            kinds = [_KINDS[child.tag] for child in case if child.tag in _KINDS]
            outcomes[name] = kinds[0] if kinds else Outcome.PASSED
    return outcomes


def _doctest(log: str) -> Outcomes:
    """Read `-s -r=xml`: a test case and its subcases, which pass if all their expressions do."""
    outcomes: Outcomes = {}
    for document in _iter_documents(log, "doctest"):
        for case in document.iter("TestCase"):
            parts = [(case.get("name", ""), case)]
            parts += [
                (f"{case.get('name')} > {sub.get('name')}", sub) for sub in case.iter("SubCase")
            ]
            for name, part in parts:
                passed = all(
                    checked.get("success") == "true" for checked in part.iter("Expression")
                )
                outcomes[name] = Outcome.PASSED if passed else Outcome.FAILED
    return outcomes


_junit_of_rebench = partial(_junit, between="::")
PARSERS: dict[str, Parser] = {
    "junit": _junit,
    "doctest": _doctest,
    **dict.fromkeys(("combined_test_reports", "r_junit"), _junit_of_rebench),
}
