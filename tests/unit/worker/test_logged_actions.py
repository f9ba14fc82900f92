"""Log lines have an event and an `action`: of worker and control."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.rooms import ROOT

ROOMS = [
    *sorted(f"worker/{init.parent.name}" for init in (ROOT / "worker").glob("*/__init__.py")),
    *sorted(f"control/{init.parent.name}" for init in (ROOT / "control").glob("*/__init__.py")),
]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
LONGEST_EVENT = 40


def lines(room: str) -> Iterator[tuple[str, ast.Call, ast.expr]]:
    """Where each call stands, the call, and its event."""
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            function = node.func
            if room == "worker/agent/supervision" and isinstance(function, ast.Name) and function.id == "log":
                yield where, node, node.args[1]
            elif (
                isinstance(function, ast.Attribute) and function.attr in LEVELS and "log" in ast.unparse(function.value)
            ):
                yield where, node, node.args[0]


def test_the_search_finds_log_lines() -> None:
    assert len([line for room in ROOMS for line in lines(room)]) > 80


@pytest.mark.parametrize("room", ROOMS)
def test_each_log_line_has_an_action_and_a_short_event(room: str) -> None:
    for where, call, event in lines(room):
        actions = [word.value for word in call.keywords if word.arg == "action"]
        assert len(actions) == 1 and isinstance(actions[0], ast.Constant) and actions[0].value, where
        assert isinstance(event, ast.Constant) and isinstance(event.value, str), f"{where}: the event is no literal"
        assert len(event.value) <= LONGEST_EVENT and "%" not in event.value, f"{where}: {event.value}"
