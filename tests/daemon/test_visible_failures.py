"""Failures that nobody asked about are seen: in status, health, events and the log, with the log's priority."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import anyone
import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from typed import typed
from waiting import BOUND_S, until
from web_daemon import page, page_daemon

pytestmark = pytest.mark.slow


def _mirrord(running: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("--socket", running.socket, *words)


def _reasons(running: Daemon) -> str:
    return "; ".join(running.json("GET", "/v1/health")["reasons"])


def test_a_bad_file_in_the_watched_directory_is_a_warning_until_it_is_gone() -> None:
    """In health, status, the events and the log; after a restart too."""
    bad = {"broken.jsonl": "not json\n", "rows.csv": "repo,base_commit\na/b,1\n"}
    with daemon() as running:
        for name, content in bad.items():
            (running.state_dir / "datasets" / name).write_text(content)
        until(lambda: all(name in _reasons(running) for name in bad))
        shown = _mirrord(running, "status").stdout
        assert all(f"warning: {name} in datasets: cannot" in shown for name in bad)
        assert _mirrord(running, "events").stdout.count("dataset.refused") == 2
        told = [line for line in running.log_lines if line["event"] == "dataset.refused"]
        assert sorted((line["level"], line["file"]) for line in told) == [
            ("warning", name) for name in bad
        ]
        running.stop()
        running.start()
        until(lambda: all(name in _reasons(running) for name in bad))
        for name in bad:
            (running.state_dir / "datasets" / name).unlink()
        until(lambda: not any(name in _reasons(running) for name in bad))


def test_a_bad_file_that_was_repaired_is_no_warning(tmp_path: Path) -> None:
    """It is imported when it changes."""
    first = Upstream(tmp_path / "a" / "b").history(1)[0]
    with daemon(f'[upstream]\nurl = "file://{tmp_path}/{{owner}}/{{name}}"\n') as running:
        file = running.state_dir / "datasets" / "rows.jsonl"
        file.write_text("not json\n")
        until(lambda: "rows.jsonl" in _reasons(running))
        file.write_text(
            json.dumps({"repo": "a/b", "instance_id": "i", "base_commit": first}) + "\n"
        )
        until(
            lambda: "rows" in [dataset["name"] for dataset in running.json("GET", "/v1/datasets")]
        )
        until(lambda: "rows.jsonl" not in _reasons(running))


def test_health_is_degraded_when_no_mirror_can_be_synced(tmp_path: Path) -> None:
    """It says why, by a mirror; one that can be synced is enough, and a restart forgets nothing."""
    with daemon(f'[upstream]\nurl = "file://{tmp_path}/{{owner}}/{{name}}"\n') as running:
        assert running.get("/v1/health")[0] == 200
        assert _mirrord(running, "mirror", "add", "a/b", "c/d").returncode == 6
        running.stop()
        running.start()
        status, _, body = running.get("/v1/health")
        reason = json.loads(body)["reasons"][0]
        assert status == 503
        assert re.match(r"no mirror can be synced \(2 of 2 fail\); \w__\w: cannot ", reason)
        Upstream(tmp_path / "a" / "b").history(1)
        assert _mirrord(running, "mirror", "sync", "a/b").returncode == 0
        until(lambda: running.get("/v1/health")[0] == 200)


def test_health_says_what_cannot_be_served(tmp_path: Path) -> None:
    """By mirror, counted and with the reason, the same in health, status and on the page; so does
    the end of the import, also for who only waits for it. Known losses can be accepted.
    """
    base = Upstream(tmp_path / "o" / "r").history(2)[0]
    commits = {"o/r": [base, base, "1" * 40], "o/absent": ["2" * 40, "3" * 40]}
    rows = [
        {"instance_id": f"{repo.replace('/', '__')}-{number}", "repo": repo, "base_commit": commit}
        for repo, each in commits.items()
        for number, commit in enumerate(each)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f'[upstream]\nurl = "file://{tmp_path}/{{owner}}/{{name}}"\n'
    with page_daemon(text) as (running, port):
        assert _mirrord(running, "status", "--check").returncode == 0
        sent = _mirrord(
            running, "dataset", "import", f"{tmp_path}/rows.jsonl", "--no-wait", "--json"
        )
        operation = json.loads(sent.stdout)["id"]
        assert _mirrord(running, "operation", "wait", operation).returncode == 8
        assert _mirrord(running, "operation", "wait", "--follow", operation).returncode == 8

        reason = (
            "dataset rows: 3 of 5 instances cannot be served:"
            " o__absent 2 (upstream-not-found), o__r 1 (not pinned)"
        )
        status, _, body = running.get("/v1/health")
        assert (status, json.loads(body)["reasons"]) == (503, [reason])
        [(_, answer)] = anyone.ask_as(anyone.NOBODY, running.socket, ("GET", "health", None))
        assert json.loads(answer)["reasons"] == [reason.rpartition(":")[0]]
        checked = _mirrord(running, "status", "--check")
        assert checked.returncode == 8
        assert checked.stdout.startswith(f"degraded: {reason}\n  -> mirrord dataset show rows\n")
        _tells_readiness(running, tmp_path)
        overview = page(port, "/")
        assert reason in overview
        assert "degraded" in overview

        assert _mirrord(running, "audit", "o/r").returncode == 8
        assert ", 1 of 2 mirrors at level closure: " in _mirrord(running, "status").stdout
        assert "1 of 2 mirrors" in page(port, "/?again")
        running.write_config(f'{text}[audit]\naccept = ["missing o/r", "not-mirrored"]\n')
        running.request("POST", "/v1/reload")
        assert _mirrord(running, "audit").returncode == 0
        assert running.get("/v1/health")[0] == 200
        assert _mirrord(running, "dataset", "remove", "rows").returncode == 0


def _tells_readiness(running: Daemon, tmp_path: Path) -> None:
    """Two of five rows have a commit that is there: where people look, with the reasons."""
    again = _mirrord(running, "dataset", "import", f"{tmp_path}/rows.jsonl")
    assert again.returncode == 8
    lines = again.stdout.splitlines()
    assert lines[2:] == [
        "2 of 5 ready",
        "  o__absent: 2 not ready: upstream-not-found",
        "  o__r: 1 not ready: not pinned",
    ]
    shown = _mirrord(running, "dataset", "show", "rows").stdout
    assert re.search(r"^ready +2 of 5$", shown, re.MULTILINE)
    assert re.search(r"^o__absent +2  upstream-not-found$", shown, re.MULTILINE)
    assert " 2 of 5 " in _mirrord(running, "dataset", "list").stdout.splitlines()[1]
    status = _mirrord(running, "status").stdout
    assert "1 with 2 of 5 instances ready" in status
    [dataset] = running.json("GET", "/v1/status")["datasets"]
    reasons = [(each["mirror"], each["count"], each["reason"]) for each in dataset["not_ready"]]
    assert dataset["ready_count"] == 2
    assert reasons == [("o__absent", 2, "upstream-not-found"), ("o__r", 1, "not pinned")]


def test_reload_ends_as_the_daemon_judges() -> None:
    """What was applied on stdout, what needs a restart on stderr; two for a file with faults, which changes nothing."""
    with daemon("[checkouts]\nmax = 5\n[datasets]\nwatch = false\n") as running:
        running.write_config("[checkouts]\nmax = 6\n[datasets]\nwatch = false\n")
        _other_state_dir(running)
        done = _mirrord(running, "config", "reload")
        assert (done.returncode, done.stderr) == (0, "state_dir needs a restart\n")
        assert done.stdout in (
            "checkouts.max\n",
            "",
        )  # the daemon that watches the file may have been first
        assert running.json("GET", "/v1/status")["checkout_max"] == 6
        running.write_config("[checkouts]\nmax = 0\n")
        done = _mirrord(running, "config", "reload")
        assert (done.returncode, done.stdout) == (2, "")
        assert "checkouts.max: must be greater than or equal to 1" in done.stderr
        assert running.json("GET", "/v1/status")["checkout_max"] == 6


def _other_state_dir(running: Daemon) -> None:
    text = running.config.read_text()
    running.config.write_text(text.replace(str(running.state_dir), "/elsewhere"))


def test_lines_for_the_journal_begin_with_their_priority(tmp_path: Path) -> None:
    """Only where stderr is the journal, which takes it off again."""
    with daemon(f'[upstream]\nurl = "file://{tmp_path}/{{owner}}/{{name}}"\n', start=False) as made:
        made.log_path.touch()
        log = made.log_path.stat()
        running = Daemon(
            made.root,
            made.config.read_text().split("\n", 2)[2],
            environment={"JOURNAL_STREAM": f"{log.st_dev}:{log.st_ino}"},
        )
        try:
            running.start()
            _mirrord(running, "mirror", "add", "a/b")
        finally:
            running.stop()
        found = [re.fullmatch(r"<(\d)>(\{.*\})", line) for line in running.log.splitlines()]
        assert all(found)
        lines = [(int(line[1]), json.loads(line[2])) for line in found if line]
        assert {(6, "info"), (4, "warning")} == {(number, line["level"]) for number, line in lines}
        assert next(number for number, line in lines if line["event"] == "mirror.failed") == 4
        running.write_config("[checkouts]\nmax = 0\n")
        running.log_path.write_text("")
        running.start(wait=False)
        assert running.process is not None
        assert running.process.wait(BOUND_S) == 2
        assert running.log.startswith("<3>mirrord: cannot use configuration")
        assert all(line.startswith("<3>") for line in running.log.splitlines())


def test_config_show_prints_what_runs_else_the_file(tmp_path: Path) -> None:
    """A setting that needs a restart differs between the two; stderr says which it is. No secrets."""
    with daemon(
        '[checkouts]\nmax = 5\n[[mirror]]\nrepo = "a/b"\nurl = "https://me:hunter2@127.0.0.1:1/b.git"\n'
    ) as running:
        _other_state_dir(running)
        _mirrord(running, "config", "reload")
        for named in ([], ["--config", str(running.config)]):
            shown = _mirrord(running, "config", "show", *named)
            assert "https://***@127.0.0.1:1/b.git" in shown.stdout
            assert "hunter2" not in shown.stdout
            assert f'state_dir = "{running.state_dir}"' in shown.stdout
            assert shown.stderr == f"in effect; read from {running.config}\n"
        shown = _mirrord(running, "config", "show", "--json")
        assert json.loads(shown.stdout)["state_dir"] == str(running.state_dir)
        other = tmp_path / "other.toml"
        other.write_text("[checkouts]\nmax = 9\n")
        shown = _mirrord(running, "config", "show", "--config", str(other))
        assert "max = 9\n" in shown.stdout
        assert shown.stderr == f"the daemon has another file; read from {other}\n"
        running.stop()
        shown = _mirrord(running, "config", "show", "--config", str(running.config))
        assert 'state_dir = "/elsewhere"' in shown.stdout
        assert shown.stderr == f"no daemon answers; read from {running.config}\n"


def test_a_configuration_that_was_refused_is_a_warning_until_it_is_right() -> None:
    """Whoever changed it may not look at the log."""
    with daemon("[checkouts]\nmax = 5\n") as running:
        running.write_config("[checkouts]\nmax = 0\n")
        until(
            lambda: (
                "the previous settings stay in effect: cannot use configuration"
                in _mirrord(running, "status").stdout
            )
        )
        running.write_config("[checkouts]\nmax = 6\n")
        until(lambda: "previous settings" not in _reasons(running))
