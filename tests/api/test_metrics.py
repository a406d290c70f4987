"""`/metrics` follows Prometheus' conventions, checked by promtool."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from prometheus_client.parser import text_string_to_metric_families

from mirrord import Client
from mirrord.api.metrics import METRICS


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A synced and audited mirror, a failing one, and a checkout."""
    root = tmp_path_factory.mktemp("metrics")
    upstream = Upstream(root / "o" / "r")
    commit = upstream.commit({"file": "text\n"})
    with daemon(f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n') as made:
        with Client(made.socket) as client:
            client.wait(client.add_mirror("o/r"))
            client.add_mirror("o/none")
            client.pin("o/r", commit)
            client.wait(client.start_audit())
            client.checkout(f"o/r@{commit}").reset()
            client.checkout(f"o/r@{commit}")
        yield made


def values(running: Daemon) -> dict[str, float]:
    """By name, with the labels as in the text."""
    found = {}
    for family in text_string_to_metric_families(running.get("/metrics")[2].decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.mark.slow
def test_promtool_has_nothing_to_say(running: Daemon) -> None:
    """Neither errors nor lint."""
    text = running.get("/metrics")[2]
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_they_say_what_there_is(running: Daemon) -> None:
    """Counts, ages, caches, failures."""
    found = values(running)
    assert found["mirrord_up"] == 1
    assert (found["mirrord_mirrors"], found["mirrord_mirrors_failed"]) == (2, 1)
    assert found["mirrord_checkouts"] == 2
    assert found[f"mirrord_owner_checkouts{{uid={os.getuid()}}}"] == 2
    assert found["mirrord_operations_total{kind=mirror.add,outcome=failed}"] == 1
    assert found["mirrord_operations_total{kind=audit,outcome=done}"] == 1
    assert found["mirrord_commits_unservable"] == 0
    assert found["mirrord_proofs_failed_total"] == 0
    started = found["mirrord_start_time_seconds"]
    for name in ("synced", "audited"):
        assert found[f"mirrord_mirror_{name}_timestamp_seconds{{mirror=o__r}}"] > started
    for name in ("hits", "misses"):  # the backend says which cache is asked
        assert sum(
            found[f"mirrord_cache_{name}_total{{cache={c}}}"] for c in ("templates", "stores")
        )
    answered = "mirrord_request_duration_seconds_count{endpoint=start_checkout}"
    assert found[answered] == found["mirrord_requests_total{endpoint=start_checkout,status=201}"]


def test_an_audit_of_one_mirror_forgets_no_other(running: Daemon) -> None:
    """Judgements are stored by mirror, also across a restart."""
    before = values(running)
    with Client(running.socket) as client:
        client.wait(client.start_audit("o/none"))
    running.stop()
    running.start(wait=False).wait_until_healthy(60)
    after = values(running)
    name = "mirrord_mirror_audited_timestamp_seconds{mirror=%s}"
    assert after[name % "o__r"] == pytest.approx(before[name % "o__r"], abs=2)
    assert after[name % "o__r"] < after["mirrord_start_time_seconds"]


def test_openmetrics_is_answered_to_who_accepts_it(running: Daemon) -> None:
    """As Prometheus asks for it."""
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    status, headers, body = running.request("GET", "/metrics", headers=accept)
    assert status == 200
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_the_document_names_every_metric_with_its_labels(running: Daemon) -> None:
    """Document, table and answer have the same metrics."""
    document = Path(__file__).parents[2] / "docs/observability/README.md"
    lines = [line for line in document.read_text().splitlines() if line[:3] == "| `"]
    # a metric has a name, labels and a text; the pages of the web have no labels
    rows = [row for row in (line.split(" | ") for line in lines) if len(row) == 3]
    documented = {row[0].strip("| `"): row[1].replace("`", "").strip() for row in rows}
    known = {
        f"{name}_total" if each.kind == "counter" else name: ", ".join(each.labels)
        for name, each in METRICS.items()
    }
    assert documented == known | {"request_duration_seconds": "endpoint"}
    families = text_string_to_metric_families(running.get("/metrics")[2].decode())
    answered = {family.name.removeprefix("mirrord_"): family for family in families}
    assert answered.keys() >= {*METRICS, "request_duration_seconds"}
