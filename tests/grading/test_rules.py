"""The rules: what each names and what it leaves alone, the policies, what is left of a change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from gitrepos import Upstream
from hypothesis import given
from hypothesis import strategies as st

from mirrord.errors import SteeringRefusedError
from mirrord.git.objects.repository import Objects, open_objects
from mirrord.git.objects.trees import BaseTree
from mirrord.grading.conditions import CONDITIONS, differing_part
from mirrord.grading.context import Context, InstanceTests, is_test
from mirrord.grading.rules import RULES, RuleBook, own_rule, runner_rule
from mirrord.grading.sifting import Policies, Sifted, sift
from mirrord.model import Policy, SteeringKind
from mirrord.patches.fit import Change

BASE = {
    "src/pkg/__init__.py": "",
    "src/pkg/core.py": "def add(a, b):\n    return a - b\n",
    "tests/test_core.py": "import responses\nfrom pkg.core import add\n\n\ndef test_add():\n    assert add(1, 1) == 2\n\n\ndef test_two():\n    assert add(2, 0) == 2\n",
    "tests/helpers.py": "def same(a, b):\n    return a == b\n",
    "tests/data/plain/notes.txt": "x\n",
    "setup.cfg": "[metadata]\nname = pkg\n\n[tool:pytest]\naddopts = -q\n",
    "pyproject.toml": '[project]\nname = "pkg"\n\n[tool.pytest.ini_options]\naddopts = "-q"\n',
    "package.json": '{"name": "pkg", "version": "1", "scripts": {"test": "jest"}}\n',
    "Cargo.toml": '[package]\nname = "pkg"\n',
    "go.mod": "module pkg\n\nrequire x v1.0.0\n",
    "pkg_test.go": "package pkg\n",
    "docs/conf.py": "",
    "conftest.py": "",
}
LINK, SUBMODULE = 0o120000, 0o160000


class Lab:
    """A base tree, and changes of it."""

    def __init__(self, objects: Objects, tree: str) -> None:
        self._objects = objects
        self._base = BaseTree(objects, tree)

    def change(self, path: str, content: str | None, mode: int = 0o100644) -> Change:
        old = self._base.find(path.encode())
        if content is None:
            return Change(path.encode(), None, b"", old)
        return Change(path.encode(), mode, content.encode(), old)

    def context(self, *changes: Change, tests: InstanceTests | None = None) -> Context:
        by_path = {change.path: change for change in changes}
        return Context(self._base, self._objects.read_blob, by_path, tests or InstanceTests(), 1000)

    def judge(
        self,
        *changes: Change,
        policies: Policies | None = None,
        tests: InstanceTests | None = None,
        book: RuleBook | None = None,
    ) -> Sifted:
        context = self.context(*changes, tests=tests)
        return sift(context, book or RuleBook(), policies or Policies(Policy.REPORT, {}))

    def rules(self, path: str, content: str | None, mode: int = 0o100644) -> set[str]:
        """The rules that name a change, with tests that import `responses` and newly `fresh`."""
        tests = InstanceTests([], frozenset({"responses", "pkg"}), frozenset({"fresh"}))
        judged = self.judge(self.change(path, content, mode), tests=tests)
        return {found.rule for found in judged.steering}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    upstream = Upstream(tmp_path_factory.mktemp("rules") / "upstream")
    upstream.commit(dict(BASE))
    tree = upstream.git("rev-parse", "HEAD^{tree}")
    with open_objects(upstream.path / ".git") as objects:
        yield Lab(objects, tree)


# what fires a rule, then what does not although it looks alike
CASES: dict[str, tuple[list[tuple[str, str | None]], list[tuple[str, str | None]]]] = {
    "pytest-conftest": (
        [("a/conftest.py", ""), ("conftest.py", None)],
        [("a/conftest.pyi", ""), ("conftest.py.txt", "")],
    ),
    "pytest-config": ([("pytest.ini", ""), ("sub/.pytest.ini", "")], [("pytest.ini.md", "")]),
    "tox-config": ([("tox.ini", "[pytest]\n")], [("docs/tox.md", "")]),
    "setup-cfg": (
        [
            ("setup.cfg", "[metadata]\nname = pkg\n[tool:pytest]\naddopts = -k nothing\n"),
            ("setup.cfg", BASE["setup.cfg"] + "[options.entry_points]\npytest11 =\n  x = x\n"),
            ("setup.cfg", "not an ini file"),
            ("setup.cfg", None),
        ],
        [("setup.cfg", BASE["setup.cfg"].replace("name = pkg", "name = other"))],
    ),
    "pyproject-runner": (
        [
            ("pyproject.toml", BASE["pyproject.toml"].replace("-q", "-k nothing")),
            ("pyproject.toml", "[tool.coverage.run]\nomit = ['*']\n"),
            ("pyproject.toml", "= broken"),
        ],
        [("pyproject.toml", BASE["pyproject.toml"].replace('"pkg"', '"other"'))],
    ),
    "python-runner-config": ([(".coveragerc", ""), ("noxfile.py", "")], [("nox.md", "")]),
    "package-marker": (
        [("__init__.py", ""), ("tests/__init__.py", ""), ("tests/data/__init__.py", "")],
        [("src/pkg/sub/__init__.py", ""), ("src/pkg/__init__.py", "x = 1\n")],
    ),
    "js-runner-config": (
        [("jest.config.js", ""), ("a/.mocharc.yml", ""), ("vitest.config.ts", "")],
        [("src/jest.js", "")],
    ),
    "cargo-runner": ([(".config/nextest.toml", "")], [("nextest.toml", "")]),
    "go-test-main": (
        [("pkg_test.go", "package pkg\nfunc TestMain(m *testing.M) {}\n")],
        [("pkg_test.go", "package pkg\nfunc TestOther(t *testing.T) {}\n")],
    ),
    "junit-config": (
        [("src/test/resources/junit-platform.properties", ""), ("a/META-INF/services/x.Y", "")],
        [("META-INF/MANIFEST.MF", "")],
    ),
    "ruby-runner": ([(".rspec", ""), ("spec/spec_helper.rb", "")], [("lib/helper.rb", "")]),
    "php-runner": ([("phpunit.xml", "")], [("phpunit.md", "")]),
    "dotnet-runner": ([("a/.runsettings", ""), ("xunit.runner.json", "")], [("xunit.json", "")]),
    "ctest-config": ([("CTestCustom.cmake", "")], [("ctest.md", "")]),
    "python-path-file": ([("evil.pth", ""), ("pyvenv.cfg", "")], [("model.pt", "")]),
    "python-startup": (
        [("sitecustomize.py", ""), ("src/usercustomize.py", ""), ("sitecustomize/__init__.py", "")],
        [("src/site_customize.py", "")],
    ),
    "python-distribution": (
        [("x.dist-info/entry_points.txt", ""), ("src/x.egg-info/PKG-INFO", ""), ("a.egg-link", "")],
        [("src/dist_info.py", "")],
    ),
    "shadowing-module": (
        [
            ("pytest.py", ""),
            ("_pytest/__init__.py", ""),
            ("src/unittest/__init__.py", ""),
            ("tests/difflib.py", ""),
            ("pytest_cov.py", ""),
            ("anyio/__init__.py", ""),
            ("json.pyc", ""),
            ("_hypothesis_pytestplugin.py", ""),
            ("docs/json/__init__.so", ""),
        ],
        [
            ("src/pkg/unittest.py", ""),
            ("tests/widgets.py", ""),
            ("json/notes.py", ""),  # no package: the standard library's comes first
        ],
    ),
    "shadowing-dependency": (
        [("responses.py", ""), ("src/responses/__init__.py", "")],
        [("src/pkg/responses.py", ""), ("src/pkg/more.py", ""), ("other.py", "")],
    ),
    "node-modules": ([("node_modules/jest/index.js", "")], [("modules/x.js", "")]),
    "go-vendor": ([("vendor/modules.txt", ""), ("vendor/x/y.go", "")], [("vendored/x.go", "")]),
    "setup-py": ([("setup.py", "")], [("setup.pyx", "")]),
    "pyproject-build": (
        [
            ("pyproject.toml", '[build-system]\nrequires = ["evil"]\n'),
            ("pyproject.toml", BASE["pyproject.toml"] + '[project.entry-points.pytest11]\nx = "x"'),
        ],
        [("pyproject.toml", BASE["pyproject.toml"] + "[tool.ruff]\n")],
    ),
    "python-build": ([("hatch_build.py", ""), ("uv.toml", "")], [("hatch.md", "")]),
    "package-json": (
        [("package.json", '{"scripts": {"test": "true"}}'), ("package.json", "{")],
        [("package.json", BASE["package.json"].replace('"1"', '"2"'))],
    ),
    "npm-config": ([(".npmrc", ""), ("pnpm-workspace.yaml", "")], [("npm.md", "")]),
    "js-build-config": ([("tsconfig.json", ""), ("rollup.config.mjs", "")], [("ts.json", "")]),
    "cargo-build": ([("crates/a/build.rs", "")], [("src/builder.rs", "")]),
    "cargo-config": ([(".cargo/config.toml", ""), ("rust-toolchain", "")], [("cargo.md", "")]),
    "cargo-manifest": (
        [("Cargo.toml", BASE["Cargo.toml"] + '[patch.crates-io]\nx = { path = "x" }\n')],
        [("Cargo.toml", BASE["Cargo.toml"] + '[dependencies]\nserde = "1"\n')],
    ),
    "go-module": (
        [("go.mod", BASE["go.mod"] + "replace x => ./x\n")],
        [("go.mod", BASE["go.mod"] + "require y v1.0.0\n")],
    ),
    "go-work": ([("go.work", "")], [("go.works", "")]),
    "maven": ([("pom.xml", ""), (".mvn/jvm.config", "")], [("docs/pom.md", "")]),
    "gradle": ([("build.gradle.kts", ""), ("buildSrc/x.kt", "")], [("gradle.md", "")]),
    "make": ([("Makefile", ""), ("rules.mk", "")], [("Makefile.md", "")]),
    "cmake": ([("a/CMakeLists.txt", ""), ("x.cmake", "")], [("cmake.md", "")]),
    "bazel": ([("BUILD", ""), ("x.bzl", "")], [("BUILDING", "")]),
    "ruby-build": ([("Gemfile", "")], [("Gem.md", "")]),
    "php-build": ([("composer.json", "")], [("composer.md", "")]),
    "dotnet-build": (
        [("Directory.Build.props", ""), ("a/x.csproj", "")],
        [("src/x.cs", ""), ("src/app.config", "")],
    ),
    "other-build": ([("build.sbt", ""), ("mix.exs", "")], [("lib/mix.ex", "")]),
    "dotenv": ([(".env", ""), (".env.test", "")], [("env", "")]),
    "tool-versions": ([(".python-version", "")], [("python-version", "")]),
    "git-attributes": ([("a/.gitattributes", "")], [("gitattributes", "")]),
    "git-modules": ([(".gitmodules", "")], [("gitmodules", "")]),
    "compiled-python": ([("a/__pycache__/b.cpython-311.pyc", "")], [("a/pycache.py", "")]),
    "compiled-code": ([("a.so", ""), ("lib/x.so.1", ""), ("x.jar", "")], [("a.sol", "")]),
    "large-file": ([("big.txt", "x" * 1001)], [("small.txt", "x" * 1000)]),
    "test-removed": ([("tests/test_core.py", None)], [("docs/conf.py", None)]),
    "test-weakened": (
        [
            ("tests/test_core.py", BASE["tests/test_core.py"].partition("\n\n\ndef test_two")[0]),
            ("tests/test_core.py", BASE["tests/test_core.py"].replace("assert add(1, 1) == 2", "pass")),
            (
                "tests/test_core.py",
                BASE["tests/test_core.py"].replace("def test_two", "@pytest.mark.skip\ndef test_two"),
            ),
        ],
        [("tests/test_core.py", BASE["tests/test_core.py"] + "\n\ndef test_x():\n    assert 1\n")],
    ),
    "test-edited": (
        [("tests/helpers.py", "def same(a, b):\n    return True\n"), ("tests/data/plain/notes.txt", "")],
        [("docs/conf.py", "x = 1\n"), ("tests/new.py", "")],
    ),
    "test-added": ([("tests/test_more.py", ""), ("a.spec.ts", ""), ("a/FooTest.java", "")], [("src/pkg/latest.py", "")]),
    "pytest-plugin": (
        [
            ("src/pkg/x.py", "def pytest_runtest_makereport(item):\n    pass\n"),
            ("tests/test_more.py", 'pytest_plugins = ["x"]\n'),
        ],
        [("src/pkg/x.py", "def pytestish():\n    pass\n")],
    ),
    "names-runner": (
        [
            ("src/pkg/core.py", 'import os\nif "PYTEST_CURRENT_TEST" in os.environ:\n    pass\n'),
            ("src/pkg/core.py", 'import sys\nif "pytest" in sys.modules and sys.modules["pytest"]:\n    1\n'),
            ("src/pkg/core.py", "import sys\ncaller = sys._getframe(1)\n"),
            ("src/a.js", "if (process.env.JEST_WORKER_ID) {}\n"),
        ],
        [("src/pkg/core.py", "import sys\nsys.modules[__name__]\n"), ("tests/test_y.py", "import pytest\n")],
    ),
    "always-equal": (
        [
            ("src/pkg/core.py", "class A:\n    def __eq__(self, other):\n        # so\n        return True\n"),
            ("src/pkg/core.py", 'class A(str):\n    def __ne__(self, other: object) -> bool:\n        """No."""\n        return False\n'),
            ("src/pkg/core.py", "A = type('A', (), {})\nA.__eq__ = lambda a, b: True\n"),
        ],
        [
            ("src/pkg/core.py", "class A:\n    def __eq__(self, other):\n        return self.x == other.x\n"),
            ("tests/test_y.py", "class Any:\n    def __eq__(self, other):\n        return True\n"),
        ],
    ),
    "module-of-tests": ([("fresh.py", ""), ("src/fresh/__init__.py", "")], [("stale.py", "")]),
}  # fmt: skip
ELSEWHERE = {  # judged by mode or place, in tests of their own
    "submodule", "symlink-outside", "git-directory", "special-file", "displaced", "test-patch-path",
    "name-of-tests", "runner-file",
    "loaded-config", "loaded-conftest", "loaded-plugin", "loaded-test", "loaded-module", "not-judged", "prepared-layer",
}  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == CASES.keys() | ELSEWHERE
    assert {rule.when[0] for rule in RULES if rule.when} == CONDITIONS.keys()
    assert {rule.kind for rule in RULES} == set(SteeringKind) - {SteeringKind.OWN}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_names_what_it_is_for_and_not_what_looks_alike(lab: Lab, name: str) -> None:
    named, alike = CASES[name]
    for path, content in named:
        assert name in lab.rules(path, content), (path, content)
    for path, content in alike:
        assert name not in lab.rules(path, content), (path, content)


def test_work_on_the_task_is_not_named(lab: Lab) -> None:
    """Most changes have nothing to say about."""
    assert lab.rules("src/pkg/core.py", "def add(a, b):\n    return a + b\n") == set()
    assert lab.rules("src/pkg/new.py", "import json\n") == set()
    assert lab.rules("README.md", "words\n") == set()


@pytest.mark.parametrize(
    ("path", "target", "leaves"),
    [
        ("link", "/etc/passwd", True),
        ("link", "../outside", True),
        ("a/b/link", "../../../outside", True),
        ("link", "src/../../outside", True),
        ("link", "src/pkg/../core.py", True),  # `pkg` may be a link
        ("a/b/link", "../../src/pkg/core.py", False),
        ("link", "src/pkg", False),
        ("link", "./src//pkg", False),
    ],
)
def test_links_that_leave_the_tree_are_named(
    lab: Lab, path: str, target: str, leaves: bool
) -> None:
    assert ("symlink-outside" in lab.rules(path, target, LINK)) is leaves


# what Python would load in place of a test, of a conftest, of a helper: by what the agent makes
TAKEN: list[tuple[str, dict[str, str], set[str]]] = [
    ("a package beside a test", {"test_top/__init__.py": ""}, {"test_top/__init__.py"}),
    ("a package of bytecode", {"test_top/__init__.pyc": ""}, {"test_top/__init__.pyc"}),
    ("an extension", {"test_top.cpython-311-x86_64-linux-gnu.so": ""}, {"test_top.cpython-311-x86_64-linux-gnu.so"}),
    ("bytecode alone", {"test_top.pyc": ""}, {"test_top.pyc"}),
    ("a link to a package", {"test_top": "@zz", "zz/__init__.py": ""}, {"test_top"}),
    ("a link by way of a link", {"test_top": "@yy", "yy": "@zz", "zz/__init__.py": ""}, {"test_top"}),
    ("a package beside a conftest", {"conftest/__init__.py": ""}, {"conftest/__init__.py"}),
    ("a package beside a helper", {"tests/helpers/__init__.py": ""}, {"tests/helpers/__init__.py"}),
    ("an extension of a package", {"tests/unit/__init__.abi3.so": ""}, {"tests/unit/__init__.abi3.so"}),
    ("data beside a test", {"test_top/data.json": "{}", "test_top.txt": ""}, set()),
    ("a package of another name", {"test_other/__init__.py": "", "src/pkg/test_top/__init__.py": ""}, set()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "named"), [each[1:] for each in TAKEN], ids=[e[0] for e in TAKEN]
)
def test_what_takes_the_name_of_a_test_is_named(
    lab: Lab, files: dict[str, str], named: set[str]
) -> None:
    """Python loads names, not paths."""
    tests = InstanceTests(
        [lab.change(path, "") for path in ("test_top.py", "tests/unit/__init__.py", "tests/test_core.py")],
        frozenset({"helpers", "pkg"}),
    )  # fmt: skip
    changes = [
        lab.change(path, text.removeprefix("@"), LINK if text.startswith("@") else 0o100644)
        for path, text in files.items()
    ]
    judged = lab.judge(*changes, tests=tests)
    assert {found.path for found in judged.steering if found.rule == "name-of-tests"} == named


@pytest.mark.parametrize(
    ("files", "rule", "path"),
    [
        ({"json": "@zz", "zz/__init__.py": ""}, "shadowing-module", "json"),
        ({"json": "@a/b", "a/b": "@../zz", "zz/__init__.py": ""}, "shadowing-module", "json"),
        ({"sitecustomize": "@zz", "zz/__init__.py": ""}, "python-startup", "sitecustomize"),
        ({"src/pkg/__pycache__": "@../../zz", "zz/a.cpython-311.pyc": ""}, "compiled-python", "src/pkg/__pycache__"),
        ({"x.egg-info": "@zz", "zz/entry_points.txt": ""}, "python-distribution", "x.egg-info"),
        ({"pytest.ini": "@zz", "zz": "[pytest]\n"}, "pytest-config", "pytest.ini"),
        ({"responses": "@src/pkg"}, "shadowing-dependency", "responses"),
        ({"__init__.py": "", "json.py": ""}, "shadowing-module", "json.py"),
        ({"src/pkg/__init__.py": None, "src/pkg/json.py": ""}, "shadowing-module", "src/pkg/json.py"),
        ({"loop": "@loop", "json.py": ""}, "shadowing-module", "json.py"),
    ],
)  # fmt: skip
def test_what_a_link_or_a_package_hides_is_named(
    lab: Lab, files: dict[str, str | None], rule: str, path: str
) -> None:
    """Links count as what they lead to, through other links; a new package hides no module of the top."""
    changes = [
        lab.change(name, text and text.removeprefix("@"), LINK if text and text[0] == "@" else 0o100644)
        for name, text in files.items()
    ]  # fmt: skip
    tests = InstanceTests([], frozenset({"responses"}))
    assert (rule, path) in actions(lab.judge(*changes, tests=tests))


@pytest.mark.parametrize(
    "text",
    [
        "[tool:pytest]\naddopts = -p evil\nADDOPTS = -q\n",
        "[tool:pytest] # ]\naddopts = -p evil\n[tool:pytest]\naddopts = -q\n",
        "[metadata]\x0c[tool:pytest]\naddopts = -p evil\n",
        "[metadata]\u2028[tool:pytest]\naddopts = -p evil\n",
        "[options.entry_points]\npytest11 = evil = evil\n" + BASE["setup.cfg"],
        "\ufeff[tool:pytest]\naddopts = -p evil\n",
    ],
)
def test_a_file_that_two_parsers_read_differently_is_named(lab: Lab, text: str) -> None:
    """pytest's own parser is asked, and setuptools'."""
    assert "setup-cfg" in lab.rules("setup.cfg", text)


def test_the_files_of_a_runner_are_named(lab: Lab) -> None:
    """By its recipe; what is not of it, is not."""
    book = RuleBook([runner_rule(["/bin/test", "/pkg/testing/**"])])
    changes = [lab.change(path, "x") for path in ("bin/test", "pkg/testing/a/b.py", "a/bin/test")]
    named = {
        found.path
        for found in lab.judge(*changes, book=book).steering
        if found.rule == "runner-file"
    }
    assert named == {"bin/test", "pkg/testing/a/b.py"}


def test_a_submodule_is_named(lab: Lab) -> None:
    assert lab.rules("vendor/x", "", SUBMODULE) >= {"submodule"}


@given(path=st.text(alphabet="ab./*-_\n é", min_size=1, max_size=30))
def test_patterns_take_any_path(path: str) -> None:
    """Nothing that an agent names a file breaks a rule or makes it slow."""
    RuleBook([own_rule("mine", ["a/**/b", "*.x", "c?"], None)]).matching(path.encode())
    is_test(path.encode())


_LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"a", b"\n", b"aa\n"]), max_size=8).map(b"".join)


@given(old=_LINES, new=_LINES)
def test_no_line_that_comes_is_overlooked(old: bytes, new: bytes) -> None:
    """Conditions context at the part that differs alone."""
    part = differing_part(old, new)
    assert part in new
    assert {*new.splitlines()} - {*old.splitlines()} <= {*part.splitlines()}


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*.snap", "a/b.snap", True),
        ("*.snap", "a.snap/b", False),
        ("golden/**", "golden/a/b", True),
        ("golden/**", "x/golden/a", False),
        ("**/golden/**", "golden/a", True),
        ("**/golden/**", "x/y/golden/a/b", True),
        ("/top.txt", "top.txt", True),
        ("/top.txt", "a/top.txt", False),
        ("a/*/c", "a/b/c", True),
        ("a/*/c", "a/b/b/c", False),
        ("a?c", "abc", True),
        ("a.c", "abc", False),
        ("**", "any/thing", True),
    ],
)
def test_patterns(pattern: str, path: str, matches: bool) -> None:
    found = {
        rule.name for rule in RuleBook([own_rule("own", [pattern], None)]).matching(path.encode())
    }
    assert ("own" in found) is matches


# -- policies ------------------------------------------------------------------------------------------


def actions(judged: Sifted) -> dict[tuple[str, str], str]:
    return {(found.rule, found.path): found.action for found in judged.steering}


def test_policies_by_kind_come_before_the_one_for_all(lab: Lab) -> None:
    conftest, work = lab.change("a/conftest.py", "x"), lab.change("src/pkg/core.py", "")
    link = lab.change("link", "/etc", LINK)
    kinds = {SteeringKind.RUNNER: Policy.DROP}
    judged = lab.judge(conftest, work, link, policies=Policies(Policy.REPORT, kinds))
    assert judged.dropped == [b"a/conftest.py"]
    assert judged.changes == [work, link]
    assert actions(judged) == {
        ("pytest-conftest", "a/conftest.py"): "dropped",
        ("symlink-outside", "link"): "applied",
    }
    asked = Policies(Policy.REPORT, kinds, Policy.DROP, {SteeringKind.RUNNER: Policy.REPORT})
    judged = lab.judge(conftest, work, link, policies=asked)
    assert judged.dropped == [b"link"]


def test_a_refusal_names_everything(lab: Lab) -> None:
    changes = [lab.change(f"{n}/conftest.py", "x") for n in range(7)]
    policies = Policies(Policy.REPORT, {SteeringKind.RUNNER: Policy.REFUSE})
    with pytest.raises(SteeringRefusedError) as caught:
        lab.judge(*changes, lab.change("a.pth", "x"), policies=policies)
    assert (caught.value.http_status, caught.value.exit_status) == (409, 5)
    assert "0/conftest.py (pytest-conftest)" in caught.value.message
    assert "and 2 more" in caught.value.message
    listed = caught.value.facts["steering"]
    assert sorted(each["action"] for each in listed) == ["applied"] + ["refused"] * 7


def test_findings_are_cut_and_counted(lab: Lab) -> None:
    """An agent that plants thousands of files makes no answer of megabytes."""
    changes = [lab.change(f"d{n:04}/conftest.py", "x") for n in range(1500)]
    judged = lab.judge(*changes, policies=Policies(Policy.DROP, {}))
    assert (len(judged.steering), len(judged.dropped)) == (100, 1500)
    assert judged.steering[-1].detail == "and 1,400 more"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("pyproject.toml", "a." * 60_000 + "b = 1\n"),
        ("pyproject.toml", "a = " + "[" * 50_000 + "\n"),
        ("pyproject.toml", "a = " + "9" * 100_000 + "\n"),
        ("package.json", "[" * 100_000),
        ("setup.cfg", "x" * 200_000),
        ("setup.cfg", "[DEFAULT]\n" + "".join(f"k{n}=\n" for n in range(9000)) + "".join(f"[s{n}]\n" for n in range(9000))),
        ("src/pkg/core.py", " " * 300_000 + "def x"),
        ("src/pkg/core.py", "\n" * 300_000 + "pytest_plugins" * 20_000),
        ("tests/test_core.py", "expect" * 50_000 + " " * 300_000),
    ],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_hostile_files_cost_little(lab: Lab, path: str, content: str) -> None:
    lab.rules(path, content)


def test_an_own_rule_has_its_policy_unless_the_request_says_another(lab: Lab) -> None:
    book = RuleBook([own_rule("docs", ["docs/**"], Policy.DROP)])
    change = lab.change("docs/conf.py", "x = 1\n")
    assert lab.judge(change, book=book).dropped == [b"docs/conf.py"]
    asked = Policies(Policy.REPORT, {}, Policy.REPORT)
    assert lab.judge(change, book=book, policies=asked).dropped == []


# -- what is left of a change ----------------------------------------------------------------------------


def test_paths_of_the_test_patch_go_back_whatever_the_policy(lab: Lab) -> None:
    """Edited, deleted, turned into a directory, or hidden by a link in a directory's place."""
    tests = InstanceTests(
        [lab.change("tests/test_core.py", "hidden"), lab.change("tests/x/test_n.py", "n")]
    )
    for change in (
        lab.change("tests/test_core.py", ""),
        lab.change("tests/test_core.py", None),
        lab.change("tests/x", "/tmp", LINK),
        lab.change("tests/x", "a file"),
        lab.change("tests/test_core.py/inside", ""),
        lab.change("tests/x/test_n.py", "cheat"),
    ):
        judged = lab.judge(change, tests=tests)
        assert judged.changes == []
        assert actions(judged) == {("test-patch-path", change.path.decode()): "restored"}


def test_what_obstructs_a_restored_path_is_dropped_too(lab: Lab) -> None:
    """Of a directory of tests that became a file the tests come back, so the file goes."""
    changes = [
        lab.change("tests/test_core.py", None),
        lab.change("tests/helpers.py", None),
        lab.change("tests/data/plain/notes.txt", None),
        lab.change("tests", "a file"),
        lab.change("src/pkg/core.py", None),
        lab.change("src/pkg/core.py/inside.txt", ""),
    ]
    policies = Policies(Policy.REPORT, {SteeringKind.TESTS: Policy.DROP})
    judged = lab.judge(*changes, policies=policies)
    assert [change.path for change in judged.changes] == [
        b"src/pkg/core.py",
        b"src/pkg/core.py/inside.txt",
    ]
    assert actions(judged)["displaced", "tests"] == "dropped"


def test_names_that_are_not_text_are_reported(lab: Lab) -> None:
    change = Change(b"caf\xe9/conftest.py", 0o100644, b"", None)
    assert [found.path for found in lab.judge(change).steering] == ["caf\udce9/conftest.py"]


def test_the_documented_rules_are_the_table() -> None:
    """docs/grading-rules.md has every rule: its kind, paths, condition, and the programs that load such files."""
    text = (Path(__file__).parents[2] / "docs" / "grading-rules.md").read_text()
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `")]
    documented = {}
    for name, kind, *cells, loads in (row for row in rows if len(row) == 5):
        paths, when = (tuple(cell.replace("`", "").replace(r"\|", "|").split()) for cell in cells)
        documented[name.strip("`")] = kind, paths, when, loads
    assert documented == {r.name: (str(r.kind), r.paths, r.when, r.loads) for r in RULES}
    named = {name for row in rows if len(row) == 2 for name in re.findall(r"`([a-z-]+)`", row[0])}
    assert named >= CONDITIONS.keys()


def test_policies_read_as_a_request_spells_them() -> None:
    """By kind only where that makes a difference."""
    kinds = {SteeringKind.RUNNER: Policy.REFUSE}
    for policies, text in (
        (Policies(Policy.REPORT, {}), "report"),
        (Policies(Policy.REPORT, kinds), "report,runner=refuse"),
        (Policies(Policy.REPORT, kinds, Policy.DROP), "drop"),
        (Policies(Policy.REPORT, kinds, None, {SteeringKind.RUNNER: Policy.REPORT}), "report"),
        (Policies(Policy.DROP, {}, None, kinds), "drop,runner=refuse"),
    ):
        assert policies.text == text
