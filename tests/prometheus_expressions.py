"""The expressions of ops/grafana and ops/prometheus, ready for a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.prometheus import RULES
from tests.rooms import ROOT

DASHBOARDS = sorted((ROOT / "ops" / "grafana").glob("*.json"))
_COMPARISON = re.compile(r" (==|!=|>=|<=|>|<) (?!bool)")
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels of a dashboard that show data."""
    return (panel for panel in board["panels"] if panel["type"] != "row")


def of_dashboard(file: Path) -> dict[str, str]:
    """Title and letter → expression, with every variable set to all of its values and rates over 10 s."""
    return {
        f"{panel['title']} {target['refId']}": filled(target["expr"])
        for panel in panels(json.loads(file.read_text()))
        for target in panel["targets"]
    }


def filled(expression: str) -> str:
    return re.sub(r"\$\w+", ".+", expression.replace("$__rate_interval", "10s"))


def of_variables(file: Path) -> dict[str, tuple[str, str]]:
    """Variable → the selector and the label of which it has the values."""
    queries = {
        variable["name"]: variable["definition"]
        for variable in json.loads(file.read_text())["templating"]["list"]
        if variable["type"] == "query"
    }
    matches_by_name = {name: _LABEL_VALUES.fullmatch(filled(query)) for name, query in queries.items()}
    return {name: (match[1], match[2]) for name, match in matches_by_name.items() if match}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def of_rules() -> dict[str, str]:
    """Rule → its expression as a sound farm of a few seconds can answer it. Comparisons give 0 or 1 instead of
    nothing, `absent` a number, and requests of every status count as failed."""

    def ready(expression: str) -> str:
        for over_minutes, sound in (("[10m:15s]", "[10s:1s]"), ("offset 15m", "offset 1s"), ('status=~"5.."', "")):
            expression = expression.replace(over_minutes, sound)
        return _COMPARISON.sub(r" \1 bool ", expression).replace("absent(", "count(")

    return {rule.get("alert") or rule["record"]: ready(rule["expr"]) for rule in rules()}
