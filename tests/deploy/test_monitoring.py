import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prometheus import Exposition
from gateway.workers.supervisor.state import MemoryView, ModelMemory
from protocol.stats import Stats
from tests.support.scale import patient

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "mlxd.json"
DOC = DEPLOY.parent / "docs" / "monitoring.md"
# What a histogram is made of, beyond the name of the family.
PARTS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def exposition() -> str:
    metrics = Metrics()
    metrics.model("m").stats = Stats(2, 3, 1, 500, 10, 20, 30, 40, 50)
    metrics.request_ended("m", "alice", 200)
    metrics.rejected("m", "queue_full")
    metrics.worker_exit("m", -9)
    metrics.auth_failures["unknown"] += 1
    metrics.certificate_expiry = lambda: 1.0
    memory = ModelMemory(share_bytes=3, floor_bytes=1, footprint_bytes=2, idle_s=0.0, is_gated=False)
    metrics.memory(MemoryView(4, 3, 2, (), {"m": memory}))
    return Exposition(metrics).text().decode()


def exported() -> set[str]:
    types = re.findall(r"^# TYPE (\S+) (\w+)$", exposition(), flags=re.MULTILINE)
    return {name + part for name, kind in types for part in PARTS[kind]} | {"up"}


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def names(expression: str) -> set[str]:
    """The metrics of an expression: what is ours or the process's, outside of label matchers."""
    return set(re.findall(r"\b((?:mlxd|process)_\w+)", re.sub(r"\{[^}]*\}", "", expression)))


def test_every_metric_of_the_alerts_exists() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    used = {name for rule in rules for name in names(rule["expr"])}

    assert len(used) >= 10
    assert used <= exported()
    for rule in rules:
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]


def test_the_table_of_the_page_has_each_metric_once_and_no_other() -> None:
    section = DOC.read_text().partition("\n## Metrics\n")[2].partition("The label `model`")[0]
    listed = re.findall(r"`(mlxd_\w+)`", section)

    assert sorted(listed) == sorted(re.findall(r"^# TYPE (mlxd_\S+) \w+$", exposition(), flags=re.MULTILINE))


def test_every_metric_is_explained_in_the_exposition() -> None:
    helps = re.findall(r"^# HELP mlxd_\S+(.*)$", exposition(), flags=re.MULTILINE)

    assert [text for text in helps if len(text) < 10 or not text.endswith(".")] == []


def test_every_alert_is_tested() -> None:
    rules = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    tests = yaml.safe_load(RULES.with_name("alerts_test.yml").read_text())["tests"]

    assert {case["alertname"] for test in tests for case in test["alert_rule_test"]} == rules


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    used = {name for expression in expressions(dashboard) for name in names(expression)}

    assert len(used) >= 30
    assert used <= exported()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_every_panel_of_the_dashboard_is_described_in_a_sentence_of_its_own() -> None:
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    descriptions = [panel.get("description", "") for panel in panels]

    assert [panel["title"] for panel, text in zip(panels, descriptions, strict=True) if not text.endswith(".")] == []
    assert len(set(descriptions)) == len(descriptions)


@pytest.mark.parametrize(
    "words",
    [["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]],
)
def test_promtool_accepts_the_files(words: list[str]) -> None:
    done = subprocess.run([promtool(), *words], cwd=RULES.parent, capture_output=True, text=True, timeout=patient(30))

    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_exposition() -> None:
    done = subprocess.run([promtool(), "check", "metrics"], input=exposition(), capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return found
