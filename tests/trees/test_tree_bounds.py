"""Bounds of trees: one that is too large is refused before anything is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from faults.kills import descendants
from gitrepos import Upstream, git
from waiting import until

pytestmark = pytest.mark.root

DEPTH = 399


class Bombs:
    """An upstream with a plain commit on `main`, and commits with trees that are hostile on branches of their names."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.plain = upstream.commit({"README": "plain\n", "src/a.py": "a\n"})
        blob = upstream.git("hash-object", "-w", "--stdin", stdin=b"x")
        self._commit("paths", self._nested(blob, levels=10, width=10))
        self._commit("entries", self._nested(blob, levels=2, width=1001))
        zeros = upstream.git("hash-object", "-w", "--stdin", stdin=bytes(70 * 1024**2))
        self._commit("bytes", self._nested(zeros, levels=1, width=1000))
        self._import("deep", "d/" * 3000 + "f")
        self._import("long", f"{'n' * 200}/" * 60 + "f")
        self._import("allowed", "d/" * (DEPTH - 1) + "f")
        self._import("longest", f"{'n' * 200}/" * 19 + "n" * 150 + "/f")

    def _nested(self, oid: str, levels: int, width: int) -> str:
        """A tree of `width` names in each of so many levels, and as many objects as levels."""
        kind = "100644 blob"
        for _ in range(levels):
            lines = "".join(f"{kind} {oid}\tn{name:04}\n" for name in range(width))
            oid, kind = (
                self.upstream.git("mktree", "--missing", stdin=lines.encode()),
                "040000 tree",
            )
        return oid

    def _commit(self, branch: str, tree: str) -> None:
        self.upstream.git(
            "branch", branch, self.upstream.git("commit-tree", tree, "-p", self.plain, "-m", branch)
        )

    def _import(self, branch: str, path: str) -> None:
        head = f"commit refs/heads/{branch}\ncommitter A <a@b.c> 1600000000 +0000\ndata 1\nx\nfrom {self.plain}\n"
        git(
            self.upstream.path,
            "fast-import",
            "--quiet",
            stdin=f"{head}M 100644 inline {path}\ndata 1\ny\n\n".encode(),
        )


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Bombs:
    return Bombs(Upstream(tmp_path_factory.mktemp("bombs") / "up"))


@pytest.fixture(scope="module")
def running(bombs: Bombs) -> Iterator[Daemon]:
    with daemon() as made:
        operation = made.json(
            "POST", "/v1/mirrors", {"repo": "up/stream", "url": bombs.upstream.url}
        )
        until(lambda: made.json("GET", f"/v1/operations/{operation['id']}")["state"] == "done")
        yield made


@pytest.fixture
def house(running: Daemon, bombs: Bombs) -> Iterator[tuple[Daemon, Bombs]]:
    yield running, bombs
    for checkout in running.json("GET", "/v1/checkouts"):
        assert running.request("DELETE", f"/v1/checkouts/{checkout['id']}")[0] == 204


def check_out(running: Daemon, commit: str, backend: str) -> tuple[int, Any]:
    body = {"mirror": "up/stream", "commit": commit, "backend": backend}
    status, _, content = running.request("POST", "/v1/checkouts", body)
    return status, json.loads(content)


def peak_bytes(running: Daemon) -> int:
    """The most memory that any process below the daemon that is still there ever had."""
    peaks = [0]
    for pid in descendants(running.pid):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if b"forkserver" in command and "VmHWM" in fields:
            peaks.append(int(fields["VmHWM"].split()[0]) * 1024)
    return max(peaks)


@pytest.mark.parametrize("backend", ["overlay", "pool"])
def test_a_tree_that_is_too_large_is_refused(house: tuple[Daemon, Bombs], backend: str) -> None:
    """Each with what is too large; nothing of it is left, and a tree within the bounds is handed out."""
    running, bombs = house
    facts = {
        "paths": "1000000 entries",
        "entries": "1000000 entries",
        "bytes": "64 GiB",
        "deep": "400 directories deep",
        "long": "4000 bytes",
    }
    assert check_out(running, bombs.plain, backend)[0] == 201
    for branch, fact in facts.items():
        status, answer = check_out(running, branch, backend)
        assert (status, answer["code"]) == (422, "too-large"), answer
        assert fact in answer["detail"]
    for branch in ("allowed", "longest"):
        status, answer = check_out(running, branch, backend)
        assert status == 201, answer
        assert answer["commit"] == bombs.upstream.git("rev-parse", branch)
        tree, lease = Path(answer["path"]), f"/v1/checkouts/{answer['id']}"
        assert git(tree, "status", "--porcelain") == ""
        for file in tree.rglob("f"):
            file.write_text("new\n")
        assert b"+new" in running.get(f"{lease}/diff")[2]
        made = [running.request("POST", f"{lease}/{verb}", {}) for verb in ("snapshots", "fork")]
        assert [status for status, *_ in made] == [201, 201], made
        assert running.request("POST", f"{lease}/reset", {})[0] == 200
        assert git(tree, "status", "--porcelain") == ""
    assert len(running.json("GET", "/v1/checkouts")) == 5
    assert "Traceback" not in running.log


@pytest.mark.parametrize("backend", ["overlay", "pool"])
def test_a_reset_to_a_tree_that_is_too_large_touches_nothing(
    house: tuple[Daemon, Bombs], backend: str
) -> None:
    """The checkout is what it was, with the work in it."""
    running, bombs = house
    _, checkout = check_out(running, bombs.plain, backend)
    (Path(checkout["path"]) / "work.txt").write_text("work\n")
    for branch in ("paths", "bytes", "deep"):
        status, _, body = running.request(
            "POST", f"/v1/checkouts/{checkout['id']}/reset", {"commit": branch}
        )
        assert (status, json.loads(body)["code"]) == (422, "too-large")
    assert b"+work" in running.get(f"/v1/checkouts/{checkout['id']}/diff")[2]
    assert running.json("GET", f"/v1/checkouts/{checkout['id']}")["commit"] == bombs.plain


def test_prewarming_passes_over_a_tree_that_is_too_large(house: tuple[Daemon, Bombs]) -> None:
    """Once: it is counted as failed, and the other base commits are prepared."""
    running, bombs = house
    rows = [
        {
            "instance_id": f"up__stream-{n}",
            "repo": "up/stream",
            "base_commit": bombs.upstream.git("rev-parse", name),
        }
        for n, name in enumerate(("paths", "main"))
    ]
    text = "".join(json.dumps({**row, "patch": "", "test_patch": ""}) + "\n" for row in rows)
    running.json("POST", "/v1/datasets?filename=set.jsonl", text.encode())

    def prewarmed() -> list[Any]:
        return [
            each
            for each in running.json("GET", "/v1/operations")
            if each["kind"] == "prewarm" and each["state"] == "done"
        ]

    until(lambda: len(prewarmed()) == 1)
    assert prewarmed()[0]["result"] == {"prepared": 1, "failed": 1, "left": 0}
    assert [line["detail"] for line in running.log_lines if line["event"] == "prewarm.failed"] != []
    assert check_out(running, "main", "auto")[0] == 201
    assert peak_bytes(running) < 1024**3
