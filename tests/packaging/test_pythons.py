"""The main job on each supported Python that is here; `make test-pythons` runs more of the tests on each."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from daemons import Daemon, unmount_below
from gitrepos import Upstream

PROJECT = Path(__file__).parents[2]
CLASSIFIER = "Programming Language :: Python :: "
with (PROJECT / "pyproject.toml").open("rb") as file:
    METADATA = tomllib.load(file)["project"]
with (PROJECT / "packaging/client/pyproject.toml").open("rb") as file:
    CLIENT = tomllib.load(file)["project"]
SUPPORTED = [
    each.removeprefix(CLASSIFIER) for each in METADATA["classifiers"] if each.startswith(CLASSIFIER)
]
(_LINE,) = re.findall(r"^PYTHONS \?= (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
LISTED = _LINE.split()

MAIN_JOB = """
import sys, mirrord
with mirrord.Client(sys.argv[1]) as client:
    client.wait(client.add_mirror("o/r"))
    client.wait(client.import_dataset(sys.argv[2]))
    for backend in client.status().backend, "pool":
        with client.checkout("o__r-1", backend=backend) as checkout:
            (checkout.path / "a").write_text("changed")
            assert b"+changed" in checkout.diff()
            checkout.reset()
            assert checkout.diff() == b""
            checkout.apply(b"diff --git a/n b/n\\nnew file mode 100644\\n--- /dev/null\\n+++ b/n\\n@@ -0,0 +1 @@\\n+n\\n")
            assert (checkout.path / "n").read_text() == "n\\n"
print(*sys.version_info[:2], sep=".")
"""


class _DaemonOn(Daemon):
    """A daemon on another Python."""

    def __init__(self, root: Path, text: str, python: Path) -> None:
        super().__init__(root, text)
        self._python = str(python)

    @property
    def command(self) -> list[str]:
        return [self._python, *super().command[1:]]


def test_the_makefile_and_the_metadata_agree() -> None:
    """It also looks for the next version, which becomes supported once it was tested."""
    assert LISTED[: len(SUPPORTED)] == SUPPORTED
    assert len(LISTED) <= len(SUPPORTED) + 1
    assert METADATA["requires-python"] == f">={SUPPORTED[0]}"
    assert all(CLIENT[key] == METADATA[key] for key in ("classifiers", "requires-python"))


@pytest.mark.release
@pytest.mark.parametrize("version", LISTED)
def test_the_main_job(version: str, path: Path, make_upstream: Callable[[str], Upstream]) -> None:
    python = PROJECT / f".venv/python{version}/bin/python"
    if not python.exists():
        pytest.skip(f"no Python {version} here: `make pythons` looks for it")
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        pytest.skip("all tests run on it")
    upstream = make_upstream("r")
    commit = upstream.commit({"a": "first\n"})
    rows = path.with_name("rows.jsonl")
    rows.write_text(f'{{"instance_id": "o__r-1", "repo": "o/r", "base_commit": "{commit}"}}\n')
    text = f'[upstream]\nurl = "file://{upstream.path.parent}/{{name}}"\n'
    running = _DaemonOn(path.parent, text, python)
    running.start()
    try:
        command = [str(python), "-W", "error", "-c", MAIN_JOB, str(running.socket), str(rows)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        assert (done.returncode, done.stdout) == (0, f"{version}\n"), done.stderr
        assert "Traceback" not in running.log
    finally:
        running.stop()
        unmount_below(path.parent)
