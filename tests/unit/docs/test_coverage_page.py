"""docs/coverage.md and the attacks of docs/reliability.md name tests that are there; no row is without a test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.unit.ops.compose_file import ROOT

PAGE = (ROOT / "docs/coverage.md").read_text()
ATTACKS = (ROOT / "docs/reliability.md").read_text().partition("\n## Attacks\n")[2].partition("\n## ")[0]
ROWS = [line for line in (PAGE + ATTACKS).splitlines() if line.startswith("| ") and not re.match(r"\|[ -]*\|", line)]


def named() -> dict[str, set[str]]:
    """File → the tests of every mention; a bare `::test` belongs to the file before it in its row."""
    tests = defaultdict[str, set[str]](set)
    for row in ROWS:
        file = ""
        for path, test in re.findall(r"([\w/]+\.py)?::(\w+|\*)", row):
            file = path or file
            tests[file].add(test)
    return tests


NAMED = named()


@pytest.mark.parametrize("file", sorted(NAMED))
def test_every_test_that_it_names_exists(file: str) -> None:
    """A test that was renamed or dropped would leave a promise without its proof."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert any(name.startswith("test_") for name in functions)
    assert NAMED[file] - functions - {"*"} == set()


def test_every_attack_has_a_test() -> None:
    """Each row ends with at least one."""
    rows = [line for line in ATTACKS.splitlines() if line in ROWS and not line.startswith("| attack ")]
    assert len(rows) >= 15
    for row in rows:
        assert "::" in row.rstrip("| ").rpartition("|")[2], row


def test_every_row_names_a_test() -> None:
    """A behaviour is shown by tests, unless it is not there yet; the last tables have their own columns."""
    judged = PAGE[PAGE.index("## The rank group") : PAGE.index("## Load scenarios")]
    rows = [line for line in judged.splitlines() if line in ROWS]
    assert len(rows) > 80
    for row in rows:
        _, _, behaviour, shown, _ = re.split(r"(?<!\\)\|", row)
        assert behaviour.strip(), row
        assert re.search(r"::|acceptance/\*", shown) or "**not yet" in behaviour, row
