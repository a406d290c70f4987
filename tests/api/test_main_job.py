"""The main job over the socket: from a dataset file to a checkout and its release."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from anyone import BARE_PYTHON, NOBODY
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from waiting import BOUND_S, until

from mirrord.protocol import RESULTS

pytestmark = pytest.mark.slow


class World:
    """A daemon, one upstream, and a dataset of its first commits."""

    def __init__(self, running: Daemon, upstream: Upstream, commits: list[str]) -> None:
        self.daemon, self.upstream, self.commits = running, upstream, commits

    @property
    def dataset(self) -> bytes:
        rows = (
            {"instance_id": f"o__r-{n}", "repo": "o/r", "base_commit": c, **_ROW}
            for n, c in enumerate(self.commits[:4])
        )
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    def finished(self, operation: dict[str, Any]) -> dict[str, Any]:
        """The operation once it has ended."""
        assert "id" in operation, operation
        deadline = time.monotonic() + BOUND_S
        while operation["state"] == "running" and time.monotonic() < deadline:
            time.sleep(0.05)
            operation = self.daemon.json("GET", f"/v1/operations/{operation['id']}")
        if operation["result"] is not None:
            message = RESULTS[operation["kind"]]
            assert (
                message.from_json(operation["result"]).to_json() == operation["result"]
            )  # nothing that is not documented
        return operation

    def import_dataset(self, name: str = "d.jsonl") -> dict[str, Any]:
        return self.finished(
            self.daemon.json("POST", f"/v1/datasets?filename={name}", self.dataset)
        )

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, told=lambda: self.daemon.log)


_ROW = {
    "patch": "diff --git a/README b/README\n--- a/README\n+++ b/README\n@@ -1 +1 @@\n-number 0\n+number one\n",
    "test_patch": "diff --git a/t b/t\nnew file mode 100644\n--- /dev/null\n+++ b/t\n@@ -0,0 +1 @@\n+x\n",
    "problem_statement": "p",
    "hints_text": "",
    "created_at": "2020-01-01T00:00:00Z",
    "version": "1",
    "FAIL_TO_PASS": "[]",
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": None,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One world for all tests, which run in order."""
    upstreams = tmp_path_factory.mktemp("upstreams")
    upstream = Upstream(upstreams / "o__r")
    commits = upstream.history(6)
    text = f'[upstream]\nurl = "file://{upstreams}/{{owner}}__{{name}}"\n[checkouts]\nbackend = "pool"\n'
    with daemon(text) as running:
        yield World(running, upstream, commits)


def test_a_dataset_file_becomes_mirrors_pins_and_instances(world: World) -> None:
    """The result of the operation describes the import."""
    ended = world.import_dataset()
    assert ended["state"] == "done", ended
    assert ended["result"]["dataset"]["instance_count"] == 4
    assert ended["result"]["dataset"]["mirrors"] == ["o__r"]
    assert ended["result"]["dataset"]["unpinned"] == []
    assert {pin["commit"] for pin in world.daemon.json("GET", "/v1/pins")} == set(world.commits[:4])
    assert not list((world.daemon.state_dir / "quarantine").glob("upload-*"))


def test_importing_again_changes_nothing(world: World) -> None:
    """It is idempotent, and the result says so."""
    change = world.import_dataset()["result"]["change"]
    assert (change["added"], change["changed"], change["removed"], change["unchanged_count"]) == (
        [],
        [],
        [],
        4,
    )


def test_an_agent_sees_no_answer_and_a_grader_does(world: World) -> None:
    """Patches need the grader view."""
    agent = world.daemon.json("GET", "/v1/instances/o__r-0")
    assert (agent["patch"], agent["test_patch"]) == (None, None)
    assert {commit["role"] for commit in agent["commits"] or []} <= {"base"}
    grader = world.daemon.json("GET", "/v1/instances/o__r-0?view=grader")
    assert grader["patch"] == _ROW["patch"]


def test_an_audit_finds_all_commits_servable(world: World) -> None:
    """The result is the audit, and status shows it."""
    ended = world.finished(world.daemon.json("POST", "/v1/audits", {"level": "content"}))
    assert ended["result"]["counts"]["ok"] == 4
    assert world.daemon.json("GET", "/v1/status")["last_audit"]["id"] == ended["result"]["id"]
    assert world.daemon.json("GET", f"/v1/audits/{ended['result']['id']}")["findings"] == []


def test_a_checkout_is_made_diffed_reset_and_released(world: World) -> None:
    """The tree is git's, the diff applies, the reset has a proof, and the release leaves nothing."""
    checkout = world.daemon.json("POST", "/v1/checkouts", {"instance": "o__r-2"})
    tree = Path(checkout["path"])
    assert git(tree, "rev-parse", "HEAD") == world.commits[2]
    assert (
        git(tree, "write-tree")
        == git(world.upstream.path, "rev-parse", f"{world.commits[2]}^{{tree}}")
        == checkout["tree"]
    )
    (tree / "new").write_text("new\n")
    identity = checkout["id"]
    status, headers, patch = world.daemon.get(f"/v1/checkouts/{identity}/diff")
    assert (status, headers["content-type"]) == (200, "text/x-diff"), patch
    assert b"+new" in patch
    answer = world.daemon.json("POST", f"/v1/checkouts/{identity}/reset", {})
    assert answer["proof"]["tree"] == checkout["tree"]
    assert not (tree / "new").exists()
    deadlines = [
        world.daemon.json("POST", f"/v1/checkouts/{identity}/renew", {"ttl": ttl})["expires_at"]
        for ttl in (7200, "2h", 60)
    ]
    seconds, words, short = map(datetime.fromisoformat, deadlines)
    assert timedelta() <= words - seconds < timedelta(minutes=1) < seconds - short
    assert world.daemon.request("DELETE", f"/v1/checkouts/{identity}")[0] == 204
    assert world.daemon.request("GET", f"/v1/checkouts/{identity}")[0] == 404


def test_a_patch_is_the_body_or_named_and_not_both(world: World) -> None:
    """`@test_patch` is the instance's, in the grader view only."""
    checkout = world.daemon.json("POST", "/v1/checkouts", {"instance": "o__r-0", "view": "grader"})
    path = f"/v1/checkouts/{checkout['id']}/apply"
    assert world.daemon.request("POST", path)[0] == 400
    assert world.daemon.request("POST", f"{path}?named=@test_patch", b"x")[0] == 400
    assert world.daemon.request("POST", f"{path}?named=@test_patch")[0] == 200
    assert (Path(checkout["path"]) / "t").read_text() == "x\n"
    world.daemon.request("DELETE", f"/v1/checkouts/{checkout['id']}")


def test_a_client_that_hangs_up_leaves_no_checkout(world: World) -> None:
    """It would stay until its deadline."""
    for _ in range(3):
        with world.daemon.connect() as connection:
            body = b'{"instance": "o__r-1"}'
            head = b"POST /v1/checkouts HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(
                body
            )
            connection.sendall(head + body)
    world.until(lambda: world.daemon.json("GET", "/v1/checkouts") == [] and not _busy(world))


def _busy(world: World) -> bool:
    """True if a directory of an unlisted checkout exists."""
    return any(
        path.suffix == "" and len(path.name) == 16
        for path in (world.daemon.state_dir / "checkouts").iterdir()
    )


def test_a_file_dropped_into_the_watched_directory_is_imported(world: World) -> None:
    """A rename into it is one import; names of unfinished files are ignored."""
    directory = world.daemon.state_dir / "datasets"
    (directory / "half.jsonl.part").write_bytes(world.dataset)
    (directory / ".w.jsonl").write_bytes(world.dataset)
    (directory / ".w.jsonl").rename(directory / "w.jsonl")
    world.until(lambda: "w" in _datasets(world))
    assert _datasets(world) == {"d", "w"}


def _datasets(world: World) -> set[str]:
    return {dataset["name"] for dataset in world.daemon.json("GET", "/v1/datasets")}


def test_a_broken_file_dropped_there_is_told_once(world: World) -> None:
    """Once, and again after a change."""
    (world.daemon.state_dir / "datasets" / "broken.jsonl").write_text("not json\n")

    def failures() -> int:
        events = world.daemon.get("/v1/events?follow=false&after=0")[2].decode()
        return sum(
            '"subject":"broken.jsonl","state":"failed"' in line for line in events.splitlines()
        )

    world.until(lambda: failures() == 1)
    assert _datasets(world) == {"d", "w"}


def test_the_configuration_file_changing_is_a_reload(world: World) -> None:
    """Including a new file renamed over the old one, as editors do."""
    text = world.daemon.config.read_text()
    staged = world.daemon.config.with_suffix(".new")
    staged.write_text(f"{text}max = 7\n")
    staged.rename(world.daemon.config)
    world.until(lambda: world.daemon.json("GET", "/v1/status")["checkout_max"] == 7)


def test_a_dataset_that_is_removed_takes_its_pins_along(world: World) -> None:
    """Pins that another dataset also owns stay."""
    assert world.daemon.request("DELETE", "/v1/datasets/w")[0] == 204
    assert {pin["owner"] for pin in world.daemon.json("GET", "/v1/pins")} == {"dataset/d"}
    assert world.daemon.request("GET", "/v1/datasets/w")[0] == 404


def test_a_mirror_that_is_recorded_is_not_removed(world: World) -> None:
    """409, with its users."""
    status, _, body = world.daemon.request("DELETE", "/v1/mirrors/o__r")
    assert (status, json.loads(body)["code"]) == (409, "conflict")


@pytest.fixture
def as_member(world: World) -> Callable[..., list[tuple[int, str]]]:
    """Statuses and bodies that a process of a group member gets."""
    script = """
import json, socket, sys
found = []
for method, path in json.loads(sys.argv[2]):
    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
    s.sendall(f"{method} /v1/{path} HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n\\r\\n".encode())
    head, _, body = b"".join(iter(lambda: s.recv(65536), b"")).partition(b"\\r\\n\\r\\n")
    found.append((int(head.split()[1]), body.decode()))
print(json.dumps(found))
"""
    if "[access]" not in (text := world.daemon.config.read_text()):
        world.daemon.config.write_text(text + '[access]\ngroup = "daemon"\n')
        world.daemon.request("POST", "/v1/reload")

    def ask(*requests: tuple[str, str]) -> list[tuple[int, str]]:
        command = [BARE_PYTHON, "-c", script, str(world.daemon.socket), json.dumps(requests)]
        done = subprocess.run(
            command,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[1],
            capture_output=True,
            text=True,
            check=True,
        )
        return [(status, body) for status, body in json.loads(done.stdout)]

    return ask


_ADMINISTRATION = (
    ("POST", "reload"), ("POST", "mirrors"), ("DELETE", "mirrors/o__r"), ("POST", "mirrors/o__r/sync"),
    ("POST", "mirrors/o__r/url"),
    ("GET", "mirrors/o__r/refs/log"), ("GET", "mirrors/o__r/refs/diff"), ("POST", "mirrors/o__r/refs/restore"),
    ("GET", "mirrors/o__r/bundle"), ("POST", "bundles"), ("POST", "datasets"), ("DELETE", "datasets/d"),
    ("GET", "instances"), ("GET", "instances/o__r-0?view=grader"), ("GET", "audits"), ("GET", "audits/x"), ("POST", "audits"),
    ("POST", "heals"),
)  # fmt: skip


def test_only_commits_are_pinned(world: World) -> None:
    """A tree or a tag is not a commit."""
    world.upstream.git("tag", "--annotate", "--message", "m", "signed", world.commits[0])
    world.finished(world.daemon.json("POST", "/v1/mirrors/o__r/sync"))
    for name in (f"{world.commits[0]}^{{tree}}", "signed"):
        oid = world.upstream.git("rev-parse", name)
        status, _, body = world.daemon.request("POST", "/v1/pins", {"mirror": "o/r", "commit": oid})
        assert (status, json.loads(body)["code"]) == (404, "commit-not-found"), body
    assert json.loads(body)["hint"] == f"pin {world.commits[0]}"


def test_a_dataset_is_sent_with_its_name_or_that_of_its_file(world: World) -> None:
    """One of them is enough; without both nothing is started."""
    sent = world.finished(
        world.daemon.json("POST", "/v1/datasets?name=streamed", world.dataset + b"{}\n")
    )
    assert sent["result"]["dataset"]["source"] == "streamed"
    assert [fault["file"] for fault in sent["result"]["dataset"]["faults"]] == ["streamed"]
    status, _, body = world.daemon.request("POST", "/v1/datasets", world.dataset)
    assert (status, json.loads(body)["code"]) == (400, "invalid-request")
    world.daemon.request("DELETE", "/v1/datasets/streamed")


@pytest.mark.root
def test_a_member_uses_checkouts_and_no_more(
    as_member: Callable[..., list[tuple[int, str]]],
) -> None:
    """Members may use status and checkouts; other endpoints are for administrators."""
    allowed = [
        ("GET", path)
        for path in ("status", "mirrors", "datasets", "checkouts", "instances/o__r-0", "operations")
    ]
    assert [status for status, _ in as_member(*allowed)] == [200] * len(allowed)
    assert [status for status, _ in as_member(*_ADMINISTRATION)] == [403] * len(_ADMINISTRATION)


@pytest.mark.root
def test_a_member_is_shown_nothing_that_tells_an_answer(
    world: World, as_member: Callable[..., list[tuple[int, str]]]
) -> None:
    """Pins, unpinned commits and operations of others can name the commit of the fix."""
    gone = "9" * 40
    rows = (
        b'{"instance_id": "o__r-gone", "repo": "o/r", "base_commit": "%b"}\n{"repo": "o/r"}\n'
        % gone.encode()
    )
    operation = world.finished(world.daemon.json("POST", "/v1/datasets?filename=torn.jsonl", rows))
    shown = world.daemon.json("GET", "/v1/datasets/torn")
    assert (len(shown["unpinned"]), len(shown["faults"])) == (1, 1)
    made = world.daemon.json("POST", "/v1/pins", {"mirror": "o/r", "commit": world.commits[0]})
    asked = ("datasets/torn", "datasets", "status", "mirrors", "operations", "events?follow=false")
    answers = as_member(*(("GET", path) for path in asked))
    assert [status for status, _ in answers] == [200] * len(asked)
    for path, (_, body) in zip(asked, answers, strict=True):
        assert not any(secret in body for secret in (gone, made["commit"], operation["id"])), path
    mine = f"operations/{operation['id']}"
    assert [status for status, _ in as_member(("GET", mine), ("DELETE", mine))] == [404, 404]
    unpin = f"pins/o__r/{world.commits[0]}"
    assert world.daemon.request("DELETE", f"/v1/{unpin}")[0] == 204
    assert world.daemon.request("DELETE", "/v1/datasets/torn")[0] == 204


def test_a_lease_stands_through_kill_9(world: World) -> None:
    """The same id, the same path, the same content, released afterwards."""
    checkout = world.daemon.json("POST", "/v1/checkouts", {"instance": "o__r-3"})
    (Path(checkout["path"]) / "work").write_text("in progress")
    world.daemon.kill()
    world.daemon.start()
    (found,) = world.daemon.json("GET", "/v1/checkouts")
    assert (found["id"], found["path"]) == (checkout["id"], checkout["path"])
    assert (Path(found["path"]) / "work").read_text() == "in progress"
    assert world.daemon.request("DELETE", f"/v1/checkouts/{found['id']}")[0] == 204


def test_a_file_that_was_imported_is_not_imported_again_by_a_restart(world: World) -> None:
    """Failed files are retried once; imported ones stay."""
    (world.daemon.state_dir / "datasets" / "v.jsonl").write_bytes(world.dataset)
    world.until(lambda: "v" in _datasets(world))
    before = {d["name"]: d["imported_at"] for d in world.daemon.json("GET", "/v1/datasets")}
    assert world.daemon.stop() == 0
    world.daemon.start()
    broken = '"subject":"broken.jsonl","state":"failed"'
    world.until(lambda: broken in world.daemon.get("/v1/events?follow=false&after=0")[2].decode())
    assert {d["name"]: d["imported_at"] for d in world.daemon.json("GET", "/v1/datasets")} == before


def test_a_damaged_catalog_keeps_the_daemon_from_starting_and_says_so(world: World) -> None:
    """With the status of an integrity error; nothing is overwritten."""
    assert world.daemon.stop() == 0
    catalog = world.daemon.state_dir / "catalog.sqlite3"
    for journal in catalog.parent.glob("catalog.sqlite3-*"):
        journal.unlink()
    damaged = os.urandom(8192)
    catalog.write_bytes(damaged)
    world.daemon.start(wait=False)
    assert world.daemon.process is not None
    status = world.daemon.process.wait(BOUND_S)
    world.daemon.process = None
    assert status == 8
    assert "catalog" in world.daemon.log.splitlines()[-2]
    assert catalog.read_bytes() == damaged
