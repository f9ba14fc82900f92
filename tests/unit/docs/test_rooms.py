"""Rooms and their order are those of docs/architecture.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.rooms import ROOT, TOPS, layers, line_of, rooms

ORDER = {"control": 0, "worker": 1, "api": 1, "ops": 2}
_MODULE = re.compile(r"(control|worker|api|ops)(\.\w+)*(:\w+)?")


def folders(top: str) -> list[Path]:
    return [path for path in [ROOT / top, *(ROOT / top).rglob("*/")] if list(path.glob("*.py"))]


def package_folders() -> list[Path]:
    """Without programs of other environments, which are no package."""
    return [path for top in TOPS for path in folders(top) if path != ROOT / "ops/compat/scripts"]


@pytest.mark.parametrize("top", TOPS)
def test_every_room_has_its_layer(top: str) -> None:
    """import-linter holds the same, and that no room imports one above or beside it."""
    there = {path.name for path in folders(top) if path.parent == ROOT / top}
    assert set(rooms(top)) == there
    loose = {path.stem for path in (ROOT / top).glob("*.py")} - {"__init__"}
    assert {name for line in layers(top) for name in line} == there | loose


@pytest.mark.parametrize("folder", package_folders(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_folder_says_in_one_line_what_it_is_for(folder: Path) -> None:
    assert 10 < len(line_of(folder)) <= 140


@pytest.mark.parametrize("top", ["control", "worker", "api"])
def test_no_module_of_a_higher_layer_is_named_in_a_string(top: str) -> None:
    """An import by name passes the contracts unseen."""
    for path in (ROOT / top).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if (named := _MODULE.fullmatch(text)) and "." in text and exists(text.partition(":")[0]):
                assert named[1] == top or ORDER[named[1]] < ORDER[top], f"{path}:{node.lineno} names {text}"


def exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()
