"""The wheel has the right contents: as setuptools finds them by the settings of pyproject.toml."""

from __future__ import annotations

import ast
import fnmatch
import tomllib

from setuptools import find_packages

from tests.unit.ops.compose_file import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES = set(find_packages(str(ROOT), **SETTINGS["packages"]["find"]))
LEFT_OUT = ("ops.compat", "ops.wheels")


def test_the_wheel_has_every_package_but_the_repository_s_tools() -> None:
    """Tests, the training of the demonstration model, and the runs of other clients stay in the repository."""
    inits = [path.parent for top in ("control", "worker", "api", "ops") for path in (ROOT / top).rglob("__init__.py")]
    every = {folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in inits}
    assert {name for name in every if name.startswith(LEFT_OUT)} >= {*LEFT_OUT}
    assert not any(name.startswith("training") for name in PACKAGES)
    assert {name for name in every if not name.startswith(LEFT_OUT)} == PACKAGES


def test_no_module_of_the_wheel_imports_one_that_is_left_out() -> None:
    """Imports inside functions included."""
    for package in PACKAGES:
        for path in (ROOT / package.replace(".", "/")).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.startswith((*LEFT_OUT, "training")) for name in names), f"{path}:{node.lineno}"


def test_the_wheel_has_every_file_that_its_modules_read() -> None:
    """Lua scripts, sources in C++, the console and the demonstration model."""
    for package, folder, count in (
        ("api.console", "static", 15),
        ("control", "scripts", 20),
        ("worker.native", "source", 10),
        ("worker.collective", ".", 1),
        ("ops.demo", "model", 6),
    ):
        place = ROOT / package.replace(".", "/")
        files = [path for path in (place / folder).rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
        assert len(files) >= count
        for path in files:
            name = path.relative_to(place).as_posix()
            assert any(fnmatch.fnmatch(name, pattern) for pattern in SETTINGS["package-data"][package]), path
