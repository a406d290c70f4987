"""Alert rules and dashboard: valid for promtool, and with existing metrics."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mirrord.api.metrics import METRICS
from mirrord.cli.table import VERBS

DIRECTORY = Path(__file__).parents[2] / "docs/observability"
HISTOGRAM = {f"request_duration_seconds_{part}" for part in ("bucket", "count", "sum")}
EXPORTED = {
    *(f"{name}_total" if each.kind == "counter" else name for name, each in METRICS.items()),
    *HISTOGRAM,
    *("process_resident_memory_bytes", "process_cpu_seconds_total"),
}


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], cwd=DIRECTORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DIRECTORY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_expressions() -> list[str]:
    panels = json.loads((DIRECTORY / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.slow
def test_the_rules_load_and_pass_their_tests() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")


@pytest.mark.slow
def test_prometheus_takes_the_documented_configuration(tmp_path: Path) -> None:
    document = (DIRECTORY / "README.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    file = tmp_path / "prometheus.yml"
    file.write_text(block.replace("/etc/prometheus/mirrord", str(DIRECTORY)))
    promtool("check", "config", str(file))


def test_every_rule_has_a_test_in_which_it_fires() -> None:
    tests = yaml.safe_load((DIRECTORY / "alerts_test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for each in tests
        for case in each["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules()}


@pytest.mark.slow
def test_prometheus_parses_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    """With Grafana's variables replaced, as a file of rules."""
    recorded = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(map(_without_variables, dashboard_expressions()))
    ]
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", str(file))


def _without_variables(expression: str) -> str:
    return expression.replace("$__rate_interval", "5m").replace("$instance", ".*")


def test_rules_and_dashboard_use_metrics_that_exist() -> None:
    expressions = [rule["expr"] for rule in rules()] + dashboard_expressions()
    used = set(re.findall(r"\bmirrord_(\w+)", " ".join(expressions)))
    assert used - EXPORTED == set()


def test_the_first_thing_to_do_is_a_verb() -> None:
    """The commands in alerts exist."""
    verbs = {verb.name for verb in VERBS}
    for rule in rules():
        for command in re.findall(
            r"mirrord ([a-z ]+?)(?= *(?:;|\||$|-|\{))", rule["annotations"]["action"]
        ):
            assert command in verbs, rule["alert"]


def test_a_dashboard_asks_for_its_data_source_and_fits_its_grid() -> None:
    """It can be imported anywhere, and its panels do not overlap."""
    dashboard = json.loads((DIRECTORY / "grafana.json").read_text())
    assert {each["name"] for each in dashboard["templating"]["list"]} == {"datasource", "instance"}
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
