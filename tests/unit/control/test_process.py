"""The command that starts a process anew; and the version of a checkout."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from control import process
from control.process import PROGRAM_VARIABLE, program, python_command, remembered_program
from control.version import VERSION


def script(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/python3\n")
    path.chmod(0o755)
    return path


def test_a_console_script_is_run_by_its_own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the interpreter that its first line named when it was started; links stay as they were typed."""
    script(tmp_path / "build-1/bin/furrow")
    (tmp_path / "current").symlink_to(tmp_path / "build-1")
    typed = str(tmp_path / "current/bin/furrow")
    assert program(["/build-1/bin/python", typed, "worker", "--host-id", "h"], [typed, "worker", "--host-id", "h"]) == [
        typed
    ]
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("PWD", str(tmp_path / "current"))
    assert program(["/b/python", "bin/furrow", "worker"], ["bin/furrow", "worker"]) == [typed]
    monkeypatch.setenv("PWD", "/")  # of another folder
    assert program(["/b/python", "bin/furrow"], ["bin/furrow"]) == [str(tmp_path / "build-1/bin/furrow")]


def test_a_module_is_run_by_the_interpreter_that_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its options; a name without a folder is looked for on the PATH."""
    python = script(tmp_path / "bin/python9")
    monkeypatch.setenv("PATH", str(python.parent))
    main = "/build-1/ops/cli/__main__.py"
    words = ["-X", "dev", "-m", "ops.cli"]
    assert program(["python9", *words, "worker"], [main, "worker"]) == [str(python), *words]
    assert program([str(python), *words], [main]) == [str(python), *words]


def test_a_program_is_remembered_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no list of words counts as none."""
    monkeypatch.setenv(PROGRAM_VARIABLE, "")
    assert remembered_program() == []
    process.remember_program()
    assert remembered_program() == program() == json.loads(os.environ[PROGRAM_VARIABLE])
    for text in ("{", '"furrow"', "7"):
        monkeypatch.setenv(PROGRAM_VARIABLE, text)
        assert remembered_program() == []


def test_children_are_of_this_build_whatever_a_link_leads_to() -> None:
    assert (
        Path(python_command("worker", "rank")[0]) == Path(sys.executable).parent.resolve() / Path(sys.executable).name
    )


def test_a_checkout_says_so() -> None:
    """Its files change without an installation."""
    assert version("furrow").partition("+")[0] + ".dev0+source" == VERSION
