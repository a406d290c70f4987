"""A release: one version, what it holds, and the same bytes from the same commit."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mirrord

PROJECT = Path(__file__).parents[2]
CYCLONEDX = PROJECT / ".venv/release/bin/cyclonedx-py"


def test_there_is_one_version() -> None:
    """The wheel of the daemon needs its own client, and the CHANGELOG has a section for it."""
    script = (
        "import sys, release; from pathlib import Path; print(release.find_version(Path.cwd()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, 'packaging'); {script}"],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == mirrord.__version__, done.stderr


def test_the_changelog_keeps_to_its_form() -> None:
    """Keep a Changelog: versions with a date, perhaps what is next above them, six kinds of changes."""
    text = (PROJECT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    versions = sections[1:] if sections[0] == "[Unreleased]" else sections
    assert versions
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", each) for each in versions)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This commit with what is not committed yet, committed."""
    if not (PROJECT / ".git").exists():
        pytest.skip("a release is made of a commit, and this is no clone")
    if not CYCLONEDX.exists():
        pytest.skip("`make release-tools` installs what writes the SBOM")
    place = tmp_path_factory.mktemp("release") / "clone"
    _run("git", "clone", "--quiet", str(PROJECT), str(place))
    changed = _run("git", "ls-files", "--modified", "--others", "--exclude-standard", cwd=PROJECT)
    for name in changed.splitlines():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, place / name, follow_symlinks=False)
    _run("git", "add", "--all", cwd=place)
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty"]
    _run("git", *commit, "--message", "work", cwd=place)
    (place / ".git/info/exclude").write_text(".venv\n")
    (place / ".venv").symlink_to(PROJECT / ".venv")
    return place


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _release(clone: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "packaging/release.py", "--without-deb", *options]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)


@pytest.mark.release
def test_two_builds_are_equal_and_have_sums_and_a_bill_of_materials(
    clone: Path, tmp_path: Path
) -> None:
    """At other places, with another umask, time zone and hash seed."""
    done = _release(clone, "--check", str(tmp_path))
    assert done.returncode == 0, done.stderr
    version = mirrord.__version__
    assert done.stdout == f"mirrord {version}: two builds are equal\n"
    lines = [line.split() for line in (tmp_path / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tmp_path.iterdir()
        if path.name != "SHA256SUMS"
    }
    assert set(sums) == {
        f"{name}-{version}{end}"
        for name in ("mirrord", "mirrord_client")
        for end in (".tar.gz", "-py3-none-any.whl")
    } | {f"mirrord-{version}.cdx.json"}
    bom = json.loads((tmp_path / f"mirrord-{version}.cdx.json").read_text())
    assert bom["metadata"]["component"]["version"] == version
    lock = (PROJECT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)(?:\[[a-z]+\])?==(\S+)", lock, re.MULTILINE))
    assert {each["name"]: each["version"] for each in bom["components"]} == locked
    with tarfile.open(tmp_path / f"mirrord-{version}.tar.gz") as sdist:
        assert f"mirrord-{version}/mirrord/engine/engine.py" in sdist.getnames()
    with zipfile.ZipFile(tmp_path / f"mirrord-{version}-py3-none-any.whl") as wheel:
        assert {each.date_time for each in wheel.infolist()} != {(1980, 1, 1, 0, 0, 0)}


@pytest.mark.release
def test_what_is_not_committed_or_not_described_is_no_release(clone: Path) -> None:
    (clone / "mirrord" / "stray.py").touch()
    done = _release(clone, "none")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no release: the work tree differs from its commit" in done.stderr
    (clone / "mirrord" / "stray.py").unlink()
    package = clone / "mirrord" / "__init__.py"
    text = package.read_text()
    package.write_text(text.replace(f'"{mirrord.__version__}"', '"77.0"'))
    assert "does not depend on mirrord-client==77.0" in _release(clone, "none").stderr
    project = (clone / "pyproject.toml").read_text()
    project = project.replace(f"client=={mirrord.__version__}", "client==77.0")
    (clone / "pyproject.toml").write_text(project)
    assert "CHANGELOG.md has no section '## [77.0]" in _release(clone, "none").stderr
    _run("git", "checkout", "--quiet", ".", cwd=clone)
