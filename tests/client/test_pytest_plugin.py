"""The plugin in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import daemon
from gitrepos import Upstream

from mirrord import Client

pytestmark = pytest.mark.slow

_TESTS = """
import pytest

@pytest.mark.checkout("demo/project@main")
def test_each_has_its_own(checkout):
    (checkout.path / "new").write_text("work")
    assert b"+work" in checkout.diff()

@pytest.mark.checkout("demo/project@main", label="named")
@pytest.mark.parametrize("n", [1, 2])
def test_which_is_new(checkout, mirrord_client, n):
    assert not (checkout.path / "new").exists()
    assert [taken.label for taken in mirrord_client.list_checkouts()] == ["named"]

@pytest.mark.checkout("demo/project@none")
def test_that_cannot_be_had(checkout):
    pass

def test_without_a_mark(checkout):
    pass
"""


def test_a_test_has_the_checkout_that_its_mark_names(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "demo+project")
    upstream.commit({"README": "1\n"})
    (tmp_path / "test_agent.py").write_text(_TESTS)
    text = f'[upstream]\nurl = "file://{tmp_path}/{{owner}}+{{name}}"\n'
    with daemon(text) as running, Client(running.socket) as client:
        client.wait(client.add_mirror("demo/project"))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mirrord.pytest", "--strict-markers"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "test_agent.py"],
            cwd=tmp_path,
            env={**os.environ, "MIRRORD_SOCKET": str(running.socket)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "3 passed, 2 errors" in done.stdout, done.stdout
        assert "CommitNotFoundError" in done.stdout
        assert "mark the test with @pytest.mark.checkout(INSTANCE)" in done.stdout
        assert client.list_checkouts() == []
