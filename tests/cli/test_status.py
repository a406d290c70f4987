"""`mirrord status`: what needs attention comes first, in a few lines, with what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from daemons import Daemon, daemon

from mirrord import protocol
from mirrord.cli.attention import problems_of
from mirrord.cli.table import VERBS
from mirrord.cli.verbs.status import _status_lines
from mirrord.model import AuditLevel, Backend

NOW = datetime(2030, 1, 1, tzinfo=UTC)
FAILURE = protocol.Problem(type="", title="", status=502, code="upstream-not-found", detail="")


def _status(mirror_count: int, failed_count: int = 0) -> protocol.Status:
    mirrors = [
        protocol.Mirror(name=f"o__r{n}", repo=f"o/r{n}", url="x", host="h", state="ready")
        for n in range(mirror_count)
    ]
    mirrors[:failed_count] = [replace(each, error=FAILURE) for each in mirrors[:failed_count]]
    return protocol.Status(
        version="1", pid=1, uid=0, started_at=NOW, state_dir="/s", config_path=None,
        backend=Backend.POOL, health=protocol.Health(status="ok", version="1"), mirrors=mirrors,
        datasets=[], checkout_count=0, checkout_max=10, operations_running=0,
    )  # fmt: skip


def test_where_all_is_well_nothing_needs_attention() -> None:
    assert list(problems_of(_status(2000))) == []


def test_two_thousand_mirrors_are_a_few_lines() -> None:
    """Those that fail alike are one problem, with the first names."""
    found = _status(2000, failed_count=700)
    (problem,) = problems_of(found)
    assert problem.fact == ("700 mirrors: upstream-not-found: o__r0, o__r1, o__r2 and 697 more")
    lines = list(_status_lines(found, [problem], [], every=False))
    assert lines[0].startswith("problem: 700 mirrors")
    assert len(lines) <= 30


def test_the_worst_comes_first_and_each_has_a_verb_to_begin_with() -> None:
    audit = protocol.AuditSummary(
        id="a", level=AuditLevel.QUICK, finished_at=NOW, counts={}, affected_count=3,
        finding_count=4, open_count=4, left_count=1,
    )  # fmt: skip
    dataset = protocol.DatasetSummary(
        name="d", format="generic", instance_count=5, commit_count=5, unpinned_count=1,
        fault_count=2, imported_at=NOW,
    )  # fmt: skip
    reasons = ["warning: x.jsonl in datasets: cannot import it", "the disk of /s is nearly full: x"]
    found = replace(
        _status(3, failed_count=1),
        health=protocol.Health(status="degraded", version="1", reasons=reasons),
        last_audit=audit, datasets=[dataset], checkout_count=10,
        jobs=[protocol.JobState(name="audit", last_error="x")],
    )  # fmt: skip
    known = list(problems_of(found))
    assert [each.kind for each in known] == ["degraded", *["problem"] * 6, "warning"]
    verbs = {verb.name for verb in VERBS}
    for each in known[:-1]:
        first = each.action.split(";")[0].removeprefix("mirrord ").split()
        assert {" ".join(first[:1]), " ".join(first[:2])} & verbs, each


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with daemon('[access]\ngroup = "daemon"\n') as made:
        yield made


def _mirrord(running: Daemon, *words: str) -> str:
    command = [sys.executable, "-m", "mirrord", "--socket", str(running.socket), "status", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_problems_alone(running: Daemon) -> None:
    """Nothing where there are none; an array with --json."""
    assert _mirrord(running, "--problems") == ""
    running.write_config("[checkouts]\nmax = 0\n")
    assert running.request("POST", "/v1/reload")[0] >= 400
    assert _mirrord(running, "--problems").startswith("warning: the previous settings stay")
    assert _mirrord(running).startswith("warning: the previous settings stay")
    (problem,) = json.loads(_mirrord(running, "--problems", "--json"))
    assert problem["kind"] == "warning"
