"""docs/installation.md: its ways for an ordinary user, each run as one; test_package.py has root's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyone
import installed
import pytest

import mirrord

PROJECT = Path(__file__).parents[2]
WHEELS = PROJECT / ".venv/wheels"
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```",
    (PROJECT / "docs/installation.md").read_text().partition("\n## A first use\n")[0],
    re.DOTALL | re.MULTILINE,
)
PIPX, UV, SERVE = next(block for _, block in BLOCKS if "pipx" in block).splitlines()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """With all wheels in the place of a package index."""
    if not (WHEELS / "lock").exists():
        pytest.skip("no wheels here: `make wheels` downloads them")
    made = Path(tempfile.mkdtemp(prefix="mirrord-user-"))
    made.chmod(0o755)
    shutil.copytree(WHEELS, made / "wheels")
    installed.wheels(made / "wheels")
    shutil.copy2(Path(sys.prefix, "bin/uv"), made)  # where others can run it
    yield made / "wheels"
    shutil.rmtree(made)


@pytest.fixture
def home(directory: Path) -> Iterator[Path]:
    made = directory.parent / "home"
    made.mkdir()
    (made / "run").mkdir(mode=0o700)
    for each in (made, made / "run"):
        os.chown(each, anyone.NOBODY, anyone.NOBODY)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_each_way_has_at_most_five_lines() -> None:
    assert [block for _, block in BLOCKS if len(block.splitlines()) > 5] == []
    assert len(BLOCKS) == 5


@pytest.mark.release
@pytest.mark.root
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [PIPX, UV], ids=["pipx", "uv"])
def test_an_ordinary_user_installs_and_serves(command: str, directory: Path, home: Path) -> None:
    """The daemon that they start answers the `mirrord` that they got."""
    if command == PIPX and not Path("/usr/bin/pipx").exists():
        pytest.skip("no pipx on this machine")
    script = f"""
        set -e
        {command}
        pid=$({SERVE}
            ) && pid=$(echo "$pid" | sed -n 's/^pid  *//p')
        kill "$pid"; while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
        mirrord --version
        mirrord service install --dry-run || echo $?
    """
    environment = {
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home / "run"),
        "LC_ALL": "C.UTF-8",
        "PATH": f"{home}/.local/bin:{directory.parent}:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_COMPILE": "1",
        "UV_OFFLINE": "1",
        "UV_NO_INDEX": "1",
        "UV_PYTHON": installed.PYTHON,
    }
    done = subprocess.run(
        ["sh", "-c", script], cwd=directory, env=environment, user=anyone.NOBODY,
        group=anyone.NOBODY, extra_groups=[], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == [f"mirrord {mirrord.__version__}", "7"]
    assert "others than root may change" in done.stderr
