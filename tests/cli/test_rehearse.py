"""Rehearsals against a real daemon: each kind of row that does not work is planted and named."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import BOUND_S, until

from mirrord import Client, Missing, Readiness, Rehearsed, UnexpectedTest
from mirrord.cli.main import run
from mirrord.client.rehearsing import Candidate, needs_of
from mirrord.errors import UsageError
from mirrord.runs.rehearsals import Results

SOURCE = "".join(f"line {n}\n" for n in range(20))
TEST = (
    "diff --git a/tests/test_x.py b/tests/test_x.py\nnew file mode 100644\n--- /dev/null\n"
    "+++ b/tests/test_x.py\n@@ -0,0 +1 @@\n+assert True\n"
)


def change(line: int, *, of: str = "source.txt") -> str:
    """A patch of one line that fits."""
    around = "".join(f" line {n}\n" for n in range(line - 2, line))
    after = "".join(f" line {n}\n" for n in range(line + 1, line + 3))
    head = f"diff --git a/{of} b/{of}\n--- a/{of}\n+++ b/{of}\n@@ -{line - 1},5 +{line - 1},5 @@\n"
    return f"{head}{around}-line {line}\n+changed\n{after}"


class World(NamedTuple):
    daemon: Daemon
    root: Path
    upstream: Upstream
    commits: list[str]

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        raw = io.BytesIO(), io.BytesIO()
        out, err = (io.TextIOWrapper(each, write_through=True) for each in raw)
        with redirect_stdout(out), redirect_stderr(err):
            status = run(["--socket", str(self.daemon.socket), *map(str, words)])
        return status, raw[0].getvalue().decode(), raw[1].getvalue().decode()

    def row(self, name: str, **members: str) -> dict[str, str]:
        row = dict.fromkeys(("problem_statement", "hints_text", "version"), "")
        row |= {"repo": "demo/project", "instance_id": f"demo__project-{name}", "patch": change(5)}
        row |= {"test_patch": TEST, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}
        row |= {"base_commit": self.commits[0], "created_at": "2024-01-01T00:00:00Z"}
        return {**row, **members}

    def load(self, name: str, *rows: dict[str, str], status: int = 0) -> None:
        file = self.root / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        ended = self.run("dataset", "import", file, "--name", name)
        assert ended[0] == status, ended

    def rehearse(self, *words: str | Path) -> tuple[int, dict[str, Any]]:
        status, out, err = self.run("rehearse", "--json", *words)
        assert out, err
        return status, json.loads(out)

    def command(self, *words: str | Path) -> list[str]:
        socket = ["--socket", str(self.daemon.socket)]
        return [sys.executable, "-m", "mirrord", *socket, "rehearse", *map(str, words)]

    def await_no_checkouts(self) -> None:
        with Client(self.daemon.socket) as client:
            until(lambda: not client.list_checkouts())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    upstream = Upstream(root / "demo" / "project")
    commits = [upstream.commit({"source.txt": SOURCE, "n": f"{n}\n"}) for n in range(7)]
    config = (
        f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'
        '[checkouts]\nprewarm = false\n[audit]\ninterval = "0"\n[sync]\ninterval = "0"\n'
    )
    with daemon(config) as running:
        yield World(running, root, upstream, commits)


@pytest.mark.slow
def test_each_row_says_what_is_wrong_with_it(world: World, tmp_path: Path) -> None:
    absent = "ab" * 20
    world.load(
        "planted",
        world.row("good"),
        world.row("bare", patch="", test_patch=""),
        world.row("test", test_patch=TEST.replace("@@ -0,0 +1 @@\n", "@@ -3,1 +3,1 @@\n-gone\n")),
        world.row("gold", patch=change(5).replace("-line 5", "-no such line")),
        world.row("setup", environment_setup_commit=absent),
        world.row("base", base_commit=absent),
        world.row("elsewhere", repo="demo/absent"),
        status=8,
    )
    page, state = tmp_path / "r.html", tmp_path / "state.jsonl"
    words = ("--dataset", "planted", "--report", page, "--resume", state)
    status, answer = world.rehearse(*words)
    assert status == 8
    found = {row["instance"].removeprefix("demo__project-"): row for row in answer["instances"]}
    states = {name: row["status"] for name, row in found.items()}
    assert states == {
        "good": "ready", "bare": "ready", "test": "failed", "gold": "failed",
        "setup": "ready, but", "base": "failed", "elsewhere": "failed",
    }  # fmt: skip
    steps = {name: {s["name"]: s["outcome"] for s in row["steps"]} for name, row in found.items()}
    assert steps["good"] == dict.fromkeys(
        ("mirrored", "checkout", "seal", "@test_patch", "@patch", "tree", "reset", "recorded"), "ok"
    )
    assert (steps["bare"]["@patch"], steps["bare"]["@test_patch"]) == ("nothing", "nothing")
    assert steps["test"]["@test_patch"] == "failed"
    assert steps["test"]["@patch"] == steps["test"]["tree"] == "ok"  # each for itself
    assert steps["gold"]["@patch"] == "failed"
    assert found["setup"]["ok"]
    assert f"its environment-setup commit {absent}" in found["setup"]["reason"]
    assert found["base"]["error"]["code"] == "commit-unservable"
    assert "not mirrored" in found["elsewhere"]["reason"]
    totals = answer["totals"]
    assert totals["states"] == {"ready": 2, "ready, but": 1, "failed": 4}
    groups = {group["repo"]: group for group in totals["repositories"]}
    assert groups["demo/project"]["nothing_to_apply"] == {"@test_patch": 1, "@patch": 1}
    assert groups["demo/project"]["passed"]["checkout"] == 5
    assert groups["demo/project"]["environments"] == {}
    text = page.read_text()
    for each in answer["instances"]:
        assert each["instance"] in text
    assert "no such line" in text or "cannot apply the patch" in text
    with Client(world.daemon.socket) as client:
        assert client.list_checkouts() == []
        shown = client.list_reports()[0]  # on the page
    assert (shown.kind, shown.dataset, shown.total, shown.done) == ("rehearsal", "planted", 7, 7)
    assert shown.results == totals["states"]
    assert shown.mirrors["demo/absent"] == {"failed": 1}
    names = ("test", "gold", "setup", "base", "elsewhere")
    steps_shown = ("@test_patch", "@patch", "recorded", "checkout", "mirrored")
    assert shown.faults == {
        f"demo__project-{name}": step for name, step in zip(names, steps_shown, strict=True)
    }

    status, out, _ = world.run("rehearse", *words)
    assert status == 8
    assert "7 instances rehearsed (7 by an earlier run): 2 ready; 1 ready, but; 4 failed" in out
    assert "1 instance without @patch: nothing to apply" in out
    assert "@patch: cannot apply the patch" in out


@pytest.mark.slow
def test_a_patch_that_brings_the_bug_goes_backwards(world: World) -> None:
    """SWE-smith: the base commit is a branch named after the instance, with the bug in it."""
    name = "demo__project.abcdef12"
    upstream = Upstream(world.root / "swesmith" / name)
    upstream.commit({"source.txt": SOURCE})
    instance = f"{name}.lm_rewrite__x1"
    upstream.git("checkout", "-q", "-b", instance)
    upstream.commit({"source.txt": SOURCE.replace("line 5\n", "changed\n")})
    row = {"instance_id": instance, "repo": f"swesmith/{name}", "patch": change(5)}
    row |= {"FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]", "image_name": "x"}
    world.load("smith", row)
    status, answer = world.rehearse("--dataset", "smith")
    assert (status, answer["instances"][0]["status"]) == (0, "ready"), answer
    world.load("smith", {**row, "patch": change(7)})  # would fit forward
    status, answer = world.rehearse("--dataset", "smith")
    assert (status, answer["instances"][0]["status"]) == (8, "failed")


@pytest.mark.slow
def test_a_damaged_mirror_fails_its_rows_and_no_others(world: World) -> None:
    upstream = Upstream(world.root / "demo" / "damaged")
    base = upstream.commit({"source.txt": SOURCE, "more": "more\n" * 999})
    row = world.row("damaged", repo="demo/damaged", base_commit=base)
    world.load("damaged", row, world.row("whole"))
    mirror = world.daemon.state_dir / "mirrors" / "demo__damaged"
    for pack in mirror.glob("objects/pack/*.pack"):
        pack.chmod(0o644)
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 255
        pack.write_bytes(data)
    status, answer = world.rehearse("--dataset", "damaged")
    states = {row["instance"]: row["status"] for row in answer["instances"]}
    assert status == 8
    assert states == {"demo__project-damaged": "failed", "demo__project-whole": "ready"}


@pytest.mark.slow
def test_a_store_with_more_in_it_is_no_seal(world: World) -> None:
    """Something was written into the daemon's own files, where all checkouts of the commit see it."""
    world.load("leaky", world.row("leaky", base_commit=world.commits[6]))
    assert world.rehearse("--dataset", "leaky")[0] == 0
    stores = world.daemon.state_dir / "templates" / "demo__project" / "gits"
    objects = stores / f"sealed-{world.commits[6]}" / ".git" / "objects"
    (objects / "info").mkdir(exist_ok=True)
    (objects / "info" / "alternates").write_text("/tmp\n")
    status, answer = world.rehearse("--dataset", "leaky")
    assert (status, answer["instances"][0]["status"]) == (8, "failed")
    assert (
        "seal: cannot prove the seal: file: objects/info/alternates"
        in (answer["instances"][0]["reason"])
    )


@pytest.mark.slow
def test_what_could_not_be_tried_is_no_verdict(world: World) -> None:
    world.load("one", world.row("one"))
    assert world.run("rehearse", "none")[0] == 4
    status, answer = world.rehearse("demo__project-one", "none")
    assert status == 4
    assert [row["status"] for row in answer["instances"]] == ["untried", "ready"]
    assert world.run("rehearse", "--jobs", "0")[0] == 2
    assert world.run("rehearse", "--timeout", "soon", "demo__project-one")[0] == 2
    with Client(world.daemon.socket) as client:  # the same, in a harness
        rehearsal = client.rehearsal("demo__project-one")
        (found,) = map(rehearsal.rehearse, rehearsal.candidates)
        assert found.status is Readiness.READY
        assert found.ok


@pytest.mark.slow
def test_a_run_goes_on_where_another_was_killed(world: World, tmp_path: Path) -> None:
    """Nothing is held, a torn line is cut off, and what changed since is done again."""
    rows = [world.row(f"k{n}", base_commit=world.commits[n % 6]) for n in range(60)]
    world.load("killed", *rows)
    state = tmp_path / "state.jsonl"
    words = ("--dataset", "killed", "--resume", state)
    run_away(world, words, signal.SIGKILL, state)
    done = state.read_text().count("\n")
    assert 0 < done < 60
    with state.open("a") as file:
        file.write('{"instance": "demo__pro')
    world.await_no_checkouts()
    status, answer = world.rehearse(*words)
    assert (status, answer["totals"]["states"]) == (0, {"ready": 60})
    assert answer["totals"]["kept"] == done
    assert len([json.loads(line) for line in state.read_text().splitlines()]) == 60
    rows[3] |= {"patch": change(9)}
    world.load("killed", *rows)
    assert world.rehearse(*words)[1]["totals"]["kept"] == 59


@pytest.mark.slow
def test_an_interrupted_run_releases_all_and_reports_what_it_did(
    world: World, tmp_path: Path
) -> None:
    rows = [world.row(f"i{n}", base_commit=world.commits[n % 6]) for n in range(60)]
    world.load("interrupted", *rows)
    state, page = tmp_path / "state.jsonl", tmp_path / "r.html"
    words = ("--dataset", "interrupted", "--resume", state, "--report", page)
    assert run_away(world, words, signal.SIGINT, state) == 130
    with Client(world.daemon.socket) as client:
        assert client.list_checkouts() == []
        shown = client.list_reports()[0]
    done = state.read_text().count("\n")
    assert (shown.done, shown.total) == (done, 60)
    assert f"Interrupted: this covers {done} of 60 instances." in page.read_text()


def run_away(world: World, words: tuple[str | Path, ...], number: int, state: Path) -> int:
    """Start a rehearsal, and end it once it has a result."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = world.command(*words, "--jobs", "2")
    pipe = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe) as process:
        deadline = time.monotonic() + BOUND_S
        while not (state.exists() and b"\n" in state.read_bytes()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(number)
    return process.returncode


# -- the report ------------------------------------------------------------------------------------

HOSTILE = '<script>alert(1)</script>"&\x1b[2J'


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.add(tag)
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_whole_and_runs_nothing(tmp_path: Path) -> None:
    """It escapes everything, loads nothing, fits a telephone, and says what is left."""
    failed, ready = Readiness.FAILED, Readiness.READY
    why = f"@patch: {HOSTILE}"
    rows = [
        Rehearsed(
            instance=HOSTILE,
            dataset=HOSTILE,
            repo="a/b",
            status=failed,
            reason=why,
            logs=[HOSTILE],
            missing=[Missing(kind="skipped", name=HOSTILE, tests=2)],
            unexpected=[
                UnexpectedTest(step="tests after", test=HOSTILE, expected="pass", lines=[HOSTILE]),
                UnexpectedTest(step="tests before", test=HOSTILE, expected="fail"),
            ],
        ),
        Rehearsed(instance="i-2", dataset=HOSTILE, repo="a/b", status=ready),
    ]
    results = Results([tmp_path / "r.html"], None)
    results.choose([Candidate(row.instance, row.dataset) for row in rows] * 2)
    for row in rows:
        results.add(row)
    results.close()
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.tags.isdisjoint({"script", "link", "img", "iframe"})
    assert "\x1b" not in text
    assert "src=" not in text
    assert 'name="viewport"' in text
    assert "default-src 'none'" in text
    assert "Interrupted: this covers 2 of 4 instances." in text
    assert "2 tests SKIPPED in 1 row; install it" in text
    assert results.exit_status == 8
    results.rows.clear()
    assert Page(results.render()).open == []


@pytest.mark.parametrize("name", ["report.txt", "missing/report.html"])
def test_a_page_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        Results([tmp_path / name], None)


def test_a_file_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    for content in ('{"a": 1}\n', "text\n"):
        file.write_text(content)
        with pytest.raises(UsageError, match="not results of a rehearsal"):
            Results([], file)
        assert file.read_text() == content


def test_what_a_host_lacks_is_counted_by_rows_and_tests() -> None:
    log = (
        'SKIPPED [2] tests/test_ext_graphviz.py:18: graphviz "dot" is not available\n'
        "SKIPPED [1] tests/test_a.py:3: could not import 'lxml': No module named 'lxml'\n"
        "SKIPPED [1] tests/test_a.py:9: only on Windows\n"
        "test_x (tests.T) ... skipped 'needs ImageMagick'\n"
    )
    old, gcc = Missing(kind="interpreter", name="Python 3.8"), Missing(kind="program", name="gcc")
    untried, ready = Readiness.UNTRIED, Readiness.READY
    results = Results([], None)
    for number, (status, missing) in enumerate(
        [(ready, needs_of(log)), (untried, [old]), (untried, [old, gcc]), (ready, [gcc])]
    ):
        results.add(Rehearsed(instance=f"i-{number}", status=status, missing=missing))
    assert [lack["text"] for lack in results.totals()["missing"]] == [
        "Python 3.8: not on this host: 2 rows untried",
        "gcc: not on this host: 2 rows, 1 of them untried",
        "could not import 'lxml': No module named 'lxml': 1 test SKIPPED in 1 row",
        'graphviz "dot" is not available: 2 tests SKIPPED in 1 row',
        "needs ImageMagick: 1 test SKIPPED in 1 row",
    ]
    results.close()
