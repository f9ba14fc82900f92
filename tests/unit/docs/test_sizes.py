"""The limits of CONTRIBUTING.md: a file has at most 300 lines, a function 60."""

from __future__ import annotations

import ast

import pytest

from tests.rooms import ROOT, TOPS

FILE, FUNCTION = 300, 60


def exceeding(top: str) -> set[str]:
    found = set[str]()
    for path in (ROOT / top).rglob("*"):
        if path.suffix not in (".py", ".lua", ".cpp", ".h", ".js"):
            continue
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        if text.count("\n") > FILE:
            found.add(name)
        for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= FUNCTION:
                    found.add(f"{name}:{node.name}")
    return found


@pytest.mark.parametrize("top", [*TOPS, "tests"])
def test_no_file_or_function_exceeds_its_limit(top: str) -> None:
    assert exceeding(top) == set()
