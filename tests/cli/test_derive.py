"""`mirrord dataset derive` against a real daemon; on real rows and repositories where they are at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream

from mirrord import Client

pytestmark = pytest.mark.slow

ROWS = Path(__file__).parents[3] / "shared/data/swe-bench/requests-flask.jsonl"
UPSTREAM = os.environ.get("MIRRORD_REAL_UPSTREAM")


def derive(socket: Path, *words: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "mirrord", "dataset", "derive", *map(str, words)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MIRRORD_SOCKET": str(socket),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, list[str]]]:
    """A project with its version in a file, in one that is a link out of the tree, and in a tag."""
    root = tmp_path_factory.mktemp("derive")
    upstream = Upstream(root / "o" / "n")
    commits = [upstream.commit({"n/__init__.py": "__version__ = '1.4.0'\n"})]
    secret = root / "secret.py"
    secret.write_text("__version__ = '6.6.6'\n")
    (upstream.path / "n/__init__.py").unlink()
    (upstream.path / "n/__init__.py").symlink_to(secret)
    commits.append(upstream.commit())
    upstream.git("tag", "v2.5.1", commits[0])
    with daemon(f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n') as running:
        with Client(running.socket) as client:
            client.wait(client.add_mirror("o/n"))
        yield running, commits


def test_versions_come_from_the_source_at_the_base_commit(
    house: tuple[Daemon, list[str]], tmp_path: Path
) -> None:
    running, commits = house
    rows: list[dict[str, Any]] = [
        {"instance_id": f"o__n-{number}", "repo": "o/n", "base_commit": commit}
        for number, commit in enumerate([*commits, "c" * 40])
    ]
    rows.append({"instance_id": "x", "repo": "x/y", "base_commit": "d" * 40, "version": "1"})
    file, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no row\n")
    status, out, _ = derive(running.socket, file, "--output", output, "--json")
    assert status == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row.get("version") for row in found] == ["1.4", "2.5", None, "1"]
    assert [row.get("derived", {}).get("version") for row in found[:2]] == [
        "n/__init__.py",
        "tag v2.5.1",
    ]
    assert output.stat().st_mode & 0o777 == 0o600
    answer = json.loads(out)
    assert (answer["rows"], answer["faults"], answer["added"]["version"]) == (4, 1, 2)
    reasons = {each["reason"] for each in answer["not_derived"] if each["column"] == "version"}
    assert "x__y is not mirrored" in reasons
    with Client(running.socket) as client:
        assert client.list_checkouts() == []


def test_what_needs_no_source_needs_no_daemon(tmp_path: Path) -> None:
    row = {"instance_id": "i", "repo": "o/n", "title": "Fix #1", "base_commit": "a" * 40}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    status, out, _ = derive(tmp_path / "none", file, "--only", "issue_numbers")
    assert (status, json.loads(out)["issue_numbers"]) == (0, ["1"])
    assert derive(tmp_path / "none", file)[0] == 9
    assert derive(tmp_path / "none", file, "--json", "--only", "patch")[0] == 2


@pytest.mark.skipif(not ROWS.exists(), reason=f"needs {ROWS}")
@pytest.mark.skipif(
    not UPSTREAM, reason="needs psf/requests and pallets/flask at MIRRORD_REAL_UPSTREAM"
)
def test_real_rows_agree_with_the_published_columns(tmp_path: Path) -> None:
    """All but set-up commits: those are base commits of rows that are not among these."""
    with daemon(f'[upstream]\nurl = "{UPSTREAM}"\n') as running:
        with Client(running.socket) as client:
            for operation in [
                client.add_mirror(name) for name in ("psf/requests", "pallets/flask")
            ]:
                client.wait(operation)
        status, out, _ = derive(running.socket, ROWS, "--output", tmp_path / "o", "--json")
    answer = json.loads(out)
    assert (status, answer["rows"]) == (0, 17)
    assert answer["agreed"] == {"patch": 17, "version": 17, "environment_setup_commit": 7}
    columns = [each["column"] for each in answer["disagreements"]]
    assert columns == ["environment_setup_commit"] * 10
