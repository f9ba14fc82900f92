"""The rooms of the product: their order from the import contracts, and the line that each says of itself."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOPS = ("control", "worker", "api", "ops")


def layers(top: str) -> list[list[str]]:
    """Rooms and loose modules of a top folder as its contract orders them; those of a line are independent."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lines = next(one["layers"] for one in contracts if one.get("containers") == [top])
    return [re.split(r" [|:] ", line) for line in lines]


def rooms(top: str) -> list[str]:
    """Folders of a top folder, from the highest layer to the lowest."""
    return [name for line in layers(top) for name in line if list((ROOT / top / name).glob("*.py"))]


def line_of(package: Path) -> str:
    """The first paragraph of its `__init__`, in one line; empty where there is none."""
    init = package / "__init__.py"
    text = ast.get_docstring(ast.parse(init.read_text())) if init.exists() else None
    return " ".join((text or "").partition("\n\n")[0].split())


def page_map() -> str:
    """The map in docs/architecture.md."""
    lines = []
    for top in TOPS:
        lines.append(f"{top + '/':19}{line_of(ROOT / top)}")
        lines += [f"  {room + '/':17}{line_of(ROOT / top / room)}" for room in rooms(top)]
    return "".join(["```\n", *(f"{line}\n" for line in lines), "```\n"])
