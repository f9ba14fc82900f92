"""The table of failure detectors is the code's: the page shows it, and the code takes its time-outs from it."""

from __future__ import annotations

import ast
import re

from tests.rooms import ROOT
from worker import detectors

TIME_OUTS = {name for name in vars(detectors) if re.fullmatch(r"[A-Z_]+_S", name)}
SOURCES = [path for path in (ROOT / "worker").rglob("*.py") if path.name != "detectors.py"]


def test_every_time_out_of_the_table_is_used_by_the_code() -> None:
    used = {
        alias.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "worker.detectors"
        for alias in node.names
    }
    assert used >= TIME_OUTS


def test_every_time_out_is_a_row_of_the_table() -> None:
    """Each value is in the last column; a row with another value would be found by the first test only."""
    shown = " ".join(one.after for one in detectors.DETECTORS)
    for name in TIME_OUTS:
        seconds = getattr(detectors, name)
        assert f"{seconds:g} s" in shown or f"{1000 * seconds:g} ms" in shown, name
