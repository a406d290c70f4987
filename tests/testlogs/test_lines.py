"""Logs that runners of other languages wrote: each test of them, with its outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirrord.errors import ProofFailedError, UsageError
from mirrord.testlogs import Outcome, find_parser, parser_names, read_parsers

PASSED, FAILED, SKIPPED, ERROR = Outcome

GO = """
=== RUN   TestOk
=== RUN   TestOk/sub_one
    a_test.go:3: no
--- FAIL: TestOk (0.00s)
    --- PASS: TestOk/sub_one (0.00s)
    --- FAIL: TestOk/bad (0.00s)
--- SKIP: TestSkip (0.00s)
FAIL	x	0.008s
"""
CARGO = """
     Running unittests src/lib.rs (target/debug/deps/x-b885370c02d1f6ea)
running 4 tests
test tests::ign ... ignored
test tests::ok ... ok
test tests::bad ... FAILED
test tests::sp - should panic ... ok
failures:
    tests::bad
test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out
   Doc-tests x
test src/lib.rs - f (line 1) ... ok
"""
ELIXIR = """
  * test adds two (2) (0.01ms) [L#4]
  * test is skipped (skipped) [L#9]
  * test raises (12.3ms) [L#14]
  * test slow [L#20]

  1) test raises (AppTest)
     test/app_test.exs:14
"""
SWIFT = """
Test Case 'AppTests.testOk' started at 2025-01-01 00:00:00.000
Test Case 'AppTests.testOk' passed (0.001 seconds)
Test Case 'AppTests.testBad' failed (0.02 seconds)
"""
R_JUNIT = """
<?xml version="1.0" encoding="UTF-8"?>
<testsuites><testsuite name="adds"><testcase classname="adds" name="works"/>
<testcase classname="adds" name="breaks"><failure>no</failure></testcase></testsuite></testsuites>
"""
NEBO = """
[gw1] [ 25%] PASSED t.py::a
t.py::b[x y] FAILED [ 50%] in 0.12s
SKIPPED t.py::c in 0.01s
ERROR t.py::d - ValueError: x
"""
JEST = """
FAIL t/a.test.js
  outer
    ✓ passes (a) thing (1 ms)
    inner
      \x1b[31m✕\x1b[39m fails here (1 ms)
      ○ skipped is skipped
  ● outer › inner › fails here
Tests:       1 failed, 1 skipped, 2 passed, 4 total
"""
NODE = """
▶ suite
  ✔ ok one (0.937117ms)
  ✖ bad one (1.496722ms)
    AssertionError [ERR_ASSERTION]: 1 == 2
  ﹣ skip one (0.233878ms) # SKIP
✔ todo one (0.130737ms) # TODO
ℹ tests 4
"""
MOCHA = """
> x@1.0.0 test
> mocha t/m.js


  outer
    ✔ slow one (121ms)
    inner
      ✔ passes (a) thing
      1) fails here
      - is skipped
  after
    ✔ it all


  2 passing (130ms)
  1 failing

  1) outer
       inner
         fails here:
     Error: no
"""
VITEST = """
 ✓ v/b.test.mjs > outer > inner > passes (a) thing
 × v/b.test.mjs > outer > inner > fails here
   → expected 1 to be 2 // Object.is equality
 ✓ v/b.test.mjs > outer > slow 413ms
 ↓ v/b.test.mjs > outer > not now [skipped]
 FAIL  v/b.test.mjs > outer > inner > fails here
"""
KARMA = """
START:
Starting browser ChromeHeadless
  render()
    ✔ should render
    replace
      ✖ should set value
  other
    ✔ is whole

SUMMARY:
✔ 2 tests completed
✖ 1 test failed
"""
TAP = """
TAP version 13
    # Subtest: ok one
    ok 1 - ok one
    not ok 2 - bad one
      failureType: 'testCodeFailure'
    ok 3 - skip one # SKIP
ok 4 adds two # skip why
not ok 5 later # TODO
ok 6 - # SKIP outer later
okay 7 no test
1..6
"""
MAVEN = """
+ mvn test -B -pl core -Dtest=org.a.ATest#testPow
[INFO] Tests run: 3, Failures: 0, Errors: 0, Skipped: 0, Time elapsed: 0.1 s - in org.a.ATest
[INFO] BUILD SUCCESS
+ mvn test -B -pl core '-Dtest=org.a.BTest#testDiv'
[ERROR] Tests run: 2, Failures: 1, Errors: 0, Skipped: 0, Time elapsed: 1 s <<< FAILURE! -- in org.a.BTest
[ERROR] org.a.BTest.testDiv -- Time elapsed: 0.01 s <<< FAILURE!
[INFO] Tests run: 1, Failures: 0, Errors: 0, Skipped: 1, Time elapsed: 0 s - in org.a.CTest
[INFO] BUILD FAILURE
"""
GRADLE = """
> Task :core:test
org.a.TestA > testOne PASSED
org.a.TestA > testTwo
warning: something between
FAILED
org.a.TestB > it is skipped SKIPPED
BUILD FAILED
"""
CTEST = """
    Start 1: ok_one
1/5 Test #1: ok_one ...........................   Passed    0.01 sec
2/5 Test #2: bad ..............................***Not Run   0.00 sec
3/5 Test #3: skipped ..........................***Skipped   0.01 sec
4/5 Test #4: dis ..............................***Not Run (Disabled)   0.00 sec
5/5 Test #5: slow .............................***Timeout   1.01 sec
50% tests passed, 2 tests failed out of 4
"""
GTEST = """
[ RUN      ] Suite.Ok
[       OK ] Suite.Ok (0 ms)
[  FAILED  ] Suite.Bad (0 ms)
[  SKIPPED ] Suite.Skip (0 ms)
[       OK ] I/P.x/0 (0 ms)
[  FAILED  ] I/P.x/1, where GetParam() = 2 (0 ms)
[  PASSED  ] 3 tests.
[  FAILED  ] 1 test, listed below:
"""
RSPEC = """
Run options: include {:focus=>true}

Outer
  passes
  fails (FAILED - 1)
  pends (PENDING: Not yet implemented)
  inner
    ok

Failures:

  1) Outer fails
     Failure/Error: it("fails") { expect(1).to eq 2 }
"""
RSPEC_JSON = """
makes a zip - ./fastlane/spec/zip_spec.rb[1:1:1:8] - passed
fails - ./fastlane/spec/zip_spec.rb[1:2] - failed
"""
MINITEST = """
TestA#test_skip = 0.00 s = S
TestA#test_bad = 0.00 s = F
TestA#test_: filters with operators = 0.01 s = .
TestA#test_err = 0.00 s = E
"""
RUBY_UNIT = """
  test: adds: .: (0.000402)
  test_password:	.: (0.001)
  test_bad:	F
"""
PHPUNIT = """
PHPUnit 9.6.7 by Sebastian Bergmann and contributors.

Round (Tests\\Carbon\\Round)
 ✔ Floor year
 ✘ Bad one
   │ Failed asserting that false is true.
 ↩ Skip
 ✔ Data with data set #0 [0.02 ms]
"""
BUSTED = """
[ RUN      ] spec/a_spec.lua @ 1: outer ok
[       OK ] spec/a_spec.lua @ 1: outer ok (0.08 ms)
[  FAILED  ] spec/a_spec.lua @ 1: outer bad (0.44 ms)
[ SKIPPED  ] spec/a_spec.lua @ 1: outer later (0.02 ms)
"""
DOTNET = """
  Passed A.B.Works [12 ms]
  Failed A.B.Theory(x: 1, y: "a b") [< 1 ms]
  Skipped A.B.Later
Passed!  - Failed:     0, Passed:     3
"""
SBT = """
[info] StackSpec:
[info] A Stack
[info] - should pop values
[info] - should throw *** FAILED *** (3 milliseconds)
[info] - should wait !!! IGNORED !!!
[info] a.b.MunitSuite:
[info]   + adds 0.01s
[info] ==> X a.b.MunitSuite.fails  0.02s munit.FailException: x
"""
JUNIT = """
+ cat target/report.xml
<?xml version="1.0"?><testsuites><testsuite name="s">
<testcase classname="a.B" name="ok"/>
<testcase classname="a.B" name="bad"><failure message="no"/></testcase>
<testcase name="err"><error/></testcase>
<testcase classname="a.B" name="out"><skipped/></testcase>
</testsuite></testsuites>
<testsuite name="cut"><testcase name="lost">
"""
DOCTEST = """
<doctest binary="t"><TestSuite><TestCase name="basic">
<SubCase name="free"><Expression success="true"/></SubCase>
<SubCase name="via get"><Expression success="false"/></SubCase>
</TestCase></TestSuite></doctest>
"""


@pytest.mark.parametrize(
    ("name", "log", "outcomes"),
    [
        (
            "gotest", GO,
            {"TestOk": FAILED, "TestOk/sub_one": PASSED, "TestOk/bad": FAILED, "TestSkip": SKIPPED},
        ),
        (
            "parse_log_cargo", CARGO,
            {"tests::ign": SKIPPED, "tests::ok": PASSED, "tests::bad": FAILED}
            | {"tests::sp": PASSED, "src/lib.rs - f (line 1)": PASSED},
        ),
        (
            "parse_log_elixir", ELIXIR,
            {"adds two (2)": PASSED, "is skipped": SKIPPED, "raises": FAILED, "slow": PASSED},
        ),
        (
            "parse_log_swift", SWIFT,
            {"AppTests.testOk": PASSED, "AppTests.testBad": FAILED},
        ),
        ("parse_log_sbt", R_JUNIT, {"adds works": PASSED, "adds breaks": FAILED}),
        ("parse_logs_r_junit", R_JUNIT, {"adds::works": PASSED, "adds::breaks": FAILED}),
        ("parse_combined_test_reports", R_JUNIT, {"adds::works": PASSED, "adds::breaks": FAILED}),
        (
            "parse_log_pytest_nebo", NEBO,
            {"t.py::a": PASSED, "t.py::b[x y]": FAILED, "t.py::c": SKIPPED, "t.py::d": ERROR},
        ),
        ("jest", JEST, {"passes (a) thing": PASSED, "fails here": FAILED, "is skipped": SKIPPED}),
        (
            "node", NODE,
            {"ok one": PASSED, "bad one": FAILED, "skip one": SKIPPED, "todo one": PASSED},
        ),
        (
            "mocha", MOCHA,
            {"outer slow one": PASSED, "outer inner passes (a) thing": PASSED}
            | {"outer inner fails here": FAILED, "outer inner is skipped": SKIPPED}
            | {"after it all": PASSED},
        ),
        (
            "vitest", VITEST,
            {
                "v/b.test.mjs > outer > inner > passes (a) thing": PASSED,
                "v/b.test.mjs > outer > inner > fails here": FAILED,
                "v/b.test.mjs > outer > slow": PASSED,
                "v/b.test.mjs > outer > not now": SKIPPED,
            },
        ),
        (
            "karma", KARMA,
            {"render() > should render": PASSED, "render() > replace > should set value": FAILED}
            | {"other > is whole": PASSED},
        ),
        (
            "tap", TAP,
            {"ok one": PASSED, "bad one": FAILED, "skip one": SKIPPED, "adds two": SKIPPED}
            | {"later": PASSED, "outer later": SKIPPED},
        ),
        (
            "maven", MAVEN,
            {"org.a.ATest#testPow": PASSED, "org.a.ATest": PASSED, "org.a.BTest#testDiv": FAILED}
            | {"org.a.BTest": FAILED, "org.a.CTest": SKIPPED},
        ),
        (
            "gradle_custom", GRADLE,
            {"org.a.TestA > testOne": PASSED, "org.a.TestA > testTwo": FAILED}
            | {"org.a.TestB > it is skipped": SKIPPED},
        ),
        ("ant", "    [junit] [PASS] x.java(a.B)\n [junit] [ERR] y", {"x.java(a.B)": PASSED, "y": ERROR}),
        (
            "ctest", CTEST,
            {"ok_one": PASSED, "bad": FAILED, "skipped": SKIPPED, "dis": SKIPPED, "slow": FAILED},
        ),
        (
            "googletest", GTEST,
            {"Suite.Ok": PASSED, "Suite.Bad": FAILED, "Suite.Skip": SKIPPED, "I/P.x/0": PASSED}
            | {"I/P.x/1": FAILED},
        ),
        (
            "rspec", RSPEC,
            {"Outer passes": PASSED, "Outer fails": FAILED, "Outer pends": SKIPPED}
            | {"Outer inner ok": PASSED},
        ),
        (
            "rspec_transformed_json", RSPEC_JSON,
            {"makes a zip - ./fastlane/spec/zip_spec.rb[1:1:1:8]": PASSED}
            | {"fails - ./fastlane/spec/zip_spec.rb[1:2]": FAILED},
        ),
        (
            "minitest", MINITEST,
            {"TestA#test_skip": SKIPPED, "TestA#test_bad": FAILED, "TestA#test_err": ERROR}
            | {"TestA#test_: filters with operators": PASSED},
        ),
        ("ruby_unit", RUBY_UNIT, {"adds": PASSED, "test_password": PASSED, "test_bad": FAILED}),
        (
            "phpunit", PHPUNIT,
            {"Round > Floor year": PASSED, "Round > Bad one": FAILED, "Round > Skip": SKIPPED}
            | {"Round > Data with data set #0": PASSED},
        ),
        ("busted", BUSTED, {"outer ok": PASSED, "outer bad": FAILED, "outer later": SKIPPED}),
        (
            "dotnet", DOTNET,
            {"A.B.Works": PASSED, 'A.B.Theory(x: 1, y: "a b")': FAILED, "A.B.Later": SKIPPED},
        ),
        (
            "sbt", SBT,
            {"StackSpec > should pop values": PASSED, "StackSpec > should throw": FAILED}
            | {"StackSpec > should wait": SKIPPED, "a.b.MunitSuite > adds": PASSED}
            | {"a.b.MunitSuite > fails": FAILED},
        ),
        (
            "junit", JUNIT,
            {"a.B ok": PASSED, "a.B bad": FAILED, "err": ERROR, "a.B out": SKIPPED},
        ),
        ("doctest", DOCTEST, {"basic": FAILED, "basic > free": PASSED, "basic > via get": FAILED}),
        ("redis", "[ok]: XTRIM with MINID (12 ms)\n[err]: BLPOP in tests/a.tcl", {"XTRIM with MINID": PASSED, "BLPOP": FAILED}),
        ("jq", "PASS: tests/jqtest\nFAIL: tests/shtest", {"tests/jqtest": PASSED, "tests/shtest": FAILED}),
        ("micropython_test", "pass  basics/a.py\nFAIL  basics/b.py", {"basics/a.py": PASSED, "basics/b.py": FAILED}),
        ("jest_json", "[PASSED] OrderedSet > x\n[FAILED] y", {"OrderedSet > x": PASSED, "y": FAILED}),
    ],
)  # fmt: skip
def test_a_log_is_read(name: str, log: str, outcomes: dict[str, Outcome]) -> None:
    parser = find_parser(name)
    assert parser is not None
    assert parser(log) == outcomes


def test_all_names_of_swe_bench_multilingual_are_known() -> None:
    names = (
        *("cargo", "phpunit", "gotest", "rspec_transformed_json", "karma", "ant", "maven"),
        *("redis", "ruby_unit", "googletest", "gradle_custom", "jest", "tap", "jq", "jekyll"),
        *("micropython_test", "vitest", "immutable_js", "doctest"),
    )
    assert {
        f"parse_log_{name}" for name in names if find_parser(f"parse_log_{name}") is None
    } == set()
    assert set(names) <= set(parser_names())


@pytest.mark.parametrize("name", parser_names())
@pytest.mark.parametrize(
    "log", ["", "\n" * 3, "x" * 100_000, "<testsuite>" * 1000, " (" * 50_000, " a.py:b" * 20_000]
)
def test_any_log_is_read_in_bounded_time(name: str, log: str) -> None:
    parser = find_parser(name)
    assert parser is not None
    assert len(parser(log)) <= 1


def test_parsers_of_a_file_come_first_and_their_bugs_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "parsers.txt"
    file.write_text(
        "def parse_log_tap(log):\n    return {'a': 'PASSED', 'b': 'XFAIL', 'c': 'what'}\n"
        "def parse_log_bad(log):\n    return log[99]\nNAME_TO_PARSER = dict(globals(), no=len)\n"
    )
    parsers = read_parsers(file)
    assert parsers.keys() == {"parse_log_tap", "parse_log_bad"}
    tap = find_parser("parse_log_tap", parsers)
    assert tap and tap("") == {"a": PASSED, "b": PASSED, "c": FAILED}
    assert find_parser("parse_log_cargo", parsers) is find_parser("cargo")
    with pytest.raises(ProofFailedError, match="parse_log_bad failed: IndexError"):
        parsers["parse_log_bad"]("")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (None, "FileNotFoundError"),
        ("x = ", "SyntaxError"),
        ("import absent_module", "No module named"),
        ("NAME_TO_PARSER = 1", "its NAME_TO_PARSER is no mapping"),
        ("parse_log_x = 1\nx = len", "it has no parser"),
    ],
)
def test_a_file_without_parsers_is_refused(tmp_path: Path, text: str | None, fact: str) -> None:
    file = tmp_path / "parsers.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=fact):
        read_parsers(file)
