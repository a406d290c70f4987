"""The version of a project by the rule that fits it."""

from __future__ import annotations

import pytest

from mirrord.derive.versions import Version, cut, find_version

TAG = "4.6.0-72-g450d264"


def found(repo: str, files: dict[str, str], tag: str | None = None) -> Version | None:
    return find_version(repo, files.get, lambda: tag)


@pytest.mark.parametrize(
    ("repo", "files", "tag", "version", "rule"),
    [
        ("psf/requests", {"requests/__init__.py": "__version__ = '2.7.0'"}, None, "2.7", "requests/__init__.py"),
        ("PSF/Requests", {"requests/__version__.py": '__version__ = "2.1"'}, None, "2.1", "requests/__version__.py"),
        ("django/django", {"django/__init__.py": "VERSION = (1, 7, 0, 'alpha', 0)"}, None, "1.7", "django/__init__.py"),
        ("Qiskit/qiskit", {"qiskit/VERSION.txt": "0.25.1\n"}, None, "0.25", "qiskit/VERSION.txt"),
        ("pallets/flask", {"src/flask/__init__.py": '"""__version__ = \'9.9\'"""\n__version__ = "2.0.1.dev0"'}, None, "2.0", "src/flask/__init__.py"),
        ("pytest-dev/pytest", {"setup.py": "use_scm_version={}  # setuptools-scm"}, TAG, "4.6", "tag 4.6.0"),
        ("o/n", {"pyproject.toml": '[project]\nversion = "1.2.3"'}, TAG, "1.2", "pyproject.toml"),
        ("o/n", {"pyproject.toml": '[tool.poetry]\nversion = "1.2.3"'}, None, "1.2", "pyproject.toml"),
        ("o/n", {"pyproject.toml": "[[[", "setup.cfg": "[metadata]\nversion = 3.4.5"}, None, "3.4", "setup.cfg"),
        ("o/n", {"setup.cfg": "[metadata]\nversion = file: VERSION", "VERSION": "0.7.1"}, None, "0.7", "VERSION"),
        ("o/n", {"setup.cfg": "[metadata]\nversion = attr: n.v.__version__", "src/n/v.py": "__version__ = '5.6'"}, None, "5.6", "src/n/v.py"),
        ("o/n", {"setup.py": "setup(version='7.8.9')"}, None, "7.8", "setup.py"),
        ("o/python-my-n", {"my_n/__about__.py": "__version__: str = '1.0'"}, None, "1.0", "my_n/__about__.py"),
        ("o/n", {"pyproject.toml": "[build-system]\nrequires = ['setuptools_scm']", "n/__init__.py": "__version__ = '0.0'"}, "v1.9.2-0-gabc", "1.9", "tag v1.9.2"),
        ("o/n", {}, "release-1.3-5-gabc1", "1.4", "tag release-1.3"),
        ("o/n", {}, "6.0.0rc1-33-g7f7a364", "6.0", "tag 6.0.0rc1"),
    ],
)  # fmt: skip
def test_a_project_has_the_version_of_its_rule(
    repo: str, files: dict[str, str], tag: str | None, version: str, rule: str
) -> None:
    assert found(repo, files, tag) == Version(version, rule)


def test_nothing_is_guessed() -> None:
    assert found("o/n", {}) is None
    assert found("o/n", {"n/__init__.py": "__version__ = get()"}, "latest-3-gabc") is None
    assert found("o/n", {"setup.cfg": "no section"}) is None


@pytest.mark.parametrize(
    ("text", "version"), [("1,7,0", "1.7"), ("8.0.0.dev0", "8.0"), ("3", "3"), ("unknown", None)]
)
def test_versions_are_cut_to_two_parts(text: str, version: str | None) -> None:
    assert cut(text) == version
