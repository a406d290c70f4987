"""The two lock files: for users, and for developers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
RUNTIME, DEVELOPMENT = PROJECT / "requirements.lock", PROJECT / "requirements-dev.lock"
RELEASE = PROJECT / "packaging/release.lock"
SITE = PROJECT / "packaging/site/requirements.lock"
HARNESSES = sorted((PROJECT / "tests/integrations/requirements").glob("*.lock"))


def _locked(lock: Path) -> dict[str, str]:
    return dict(
        re.findall(r"^([a-z0-9][a-z0-9._-]*)(?:\[[a-z]+\])?==(\S+)", lock.read_text(), re.MULTILINE)
    )


def _names(requirements: list[Any]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", line)[0] for line in requirements}


def test_the_lock_of_users_has_what_runs_and_no_tools() -> None:
    """pytest, mypy and ruff are 200 MB that no daemon loads."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    runtime = _locked(RUNTIME)
    assert _names(project["project"]["dependencies"]) - {"mirrord-client"} <= set(runtime)
    assert not {
        "pytest",
        "mypy",
        "ruff",
        "hypothesis",
        "import-linter",
        "hatchling",
        "grimp",
    } & set(runtime)
    assert _names(project["dependency-groups"]["dev"]) <= set(_locked(DEVELOPMENT))


def test_both_locks_agree() -> None:
    """What was tested is what is installed."""
    development = _locked(DEVELOPMENT)
    assert {name: development[name] for name in _locked(RUNTIME)} == _locked(RUNTIME)


@pytest.mark.parametrize(
    "lock", [RUNTIME, DEVELOPMENT, RELEASE, SITE, *HARNESSES], ids=lambda lock: lock.name
)
def test_every_locked_file_has_its_hash_and_no_place(lock: Path) -> None:
    """pip checks the bytes; the package index is the machine's choice."""
    text = lock.read_text()
    assert "://" not in text
    entries = re.split(r"^(?=[a-z0-9][a-z0-9._\[\]-]*==)", text, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
