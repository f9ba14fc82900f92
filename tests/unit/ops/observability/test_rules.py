"""Alerts and dashboards of Prometheus and Grafana: promtool's word, and what an operator needs of each alert and
panel."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.prometheus import RULES, promtool
from tests.prometheus_expressions import DASHBOARDS, of_dashboard, of_rules, panels, rules
from tests.rooms import ROOT

TESTS = RULES.with_name("rules_test.yaml")
ALERTS = [rule for rule in rules() if "alert" in rule]


def test_promtool_accepts_rules_and_the_example() -> None:
    """Syntax of expressions and templates; the example names files that are there."""
    status, output = promtool("check", "rules", RULES)
    assert status == 0, output
    status, output = promtool("check", "config", RULES.with_name("prometheus.yaml"))
    assert status == 0, output


def test_each_alert_fires_and_does_not(tmp_path: Path) -> None:
    """promtool's tests pass; they fail where an alert always fires, and where one never does."""
    status, output = promtool("test", "rules", TESTS)
    assert status == 0, output
    file_text = TESTS.read_text()
    assert [rule["alert"] for rule in ALERTS if f'alertname="{rule["alert"]}"' not in file_text] == []
    shutil.copy(TESTS, tmp_path)
    for wrong in ("vector(1)", "vector(1) == 0"):
        text = RULES.read_text().replace("max by (model_name) (furrow_dead_letters) > 0", wrong)
        assert text != RULES.read_text()
        (tmp_path / "rules.yaml").write_text(text)
        assert promtool("test", "rules", tmp_path / TESTS.name)[0] == 1, wrong


def test_each_alert_has_a_remedy() -> None:
    """A severity, a summary that names what is wrong, a description, and a section of the runbook that exists."""
    runbook = (ROOT / "ops" / "runbook.md").read_text()
    anchors = {
        re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-") for line in runbook.splitlines() if line[:3] == "## "
    }
    for rule in ALERTS:
        told = rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        file, _, anchor = told["runbook"].partition("#")
        assert file == "ops/runbook.md" and anchor in anchors, rule["alert"]
        assert told["summary"].endswith(".") and len(told["description"]) > len(told["summary"])


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_dashboards_fit_any_grafana(file: Path) -> None:
    """Each has its data source as a variable, ids of its own, a text for each panel, and no panel above another."""
    board = json.loads(file.read_text())
    assert board["id"] is None and board["uid"].startswith("furrow-")
    assert {"name": "datasource", "type": "datasource", "query": "prometheus"}.items() <= board["templating"]["list"][
        0
    ].items()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken = set[tuple[int, int]]()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not taken & cells, panel["title"]
        taken |= cells
    for panel in panels(board):
        assert panel["description"] and panel["targets"]
    assert set(re.findall(r'"uid": "([^"]+)"', file.read_text())) == {"${datasource}", board["uid"]}


def test_variables_are_defined() -> None:
    """No expression has a variable that its dashboard lacks."""
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        defined = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval", "__all"}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]) + json.dumps(board["templating"])))
        assert used <= defined, file


def test_expressions_are_made_ready() -> None:
    """The control of the test with a farm: no variable is left, no comparison hides a value."""
    assert [name for file in DASHBOARDS for name, text in of_dashboard(file).items() if "$" in text] == []
    assert of_rules()["FurrowModelNotServed"].count("bool") == 3 and "absent" not in of_rules()["FurrowFarmNotShown"]
