"""`furrow service install` writes systemd's unit."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from control.errors import SettingsError
from ops.cli import service


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in service.KEPT:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(service.service, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_unit_runs_the_part_with_its_arguments(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What systemd would replace or split stays a word; variables of this shell are in it; only its user reads it."""
    monkeypatch.setattr(service, "_program", lambda: ["/opt/my env/furrow"])
    monkeypatch.setenv("FURROW_REDIS_URL", "redis://:p%s$d@h:6379/0")
    said = run("install", "serve", "my model", "--name", "100%", "--set", "a=$b", "--port", "8000")
    path = home / "systemd" / "user" / "furrow-serve.service"
    assert f"systemctl --user enable --now {path.name}" in said and str(path) in said
    lines = path.read_text().splitlines()
    assert r'ExecStart="/opt/my env/furrow" serve "my model" --name 100%% --set a=$$b --port 8000' in lines
    assert "Environment=FURROW_REDIS_URL=redis://:p%%s$d@h:6379/0" in lines
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    run("uninstall", "serve")
    assert not path.exists()
    with pytest.raises(SettingsError, match="does not exist"):
        run("uninstall", "serve")


def test_a_unit_can_be_printed_only(home: Path) -> None:
    assert "[Install]\nWantedBy=default.target\n" in run("install", "--print", "worker")
    assert not list(home.iterdir())


def test_a_line_break_can_t_add_a_line_to_a_unit(home: Path) -> None:
    with pytest.raises(SettingsError, match="line break"):
        run("install", "serve", "m\nExecStartPost=/bin/true")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one with a section less is refused."""
    monkeypatch.setattr(service, "_program", lambda: ["/bin/true"])
    run("install", "serve", "my model; x", '"', "100%")
    path = home / "systemd" / "user" / "furrow-serve.service"
    command = ["systemd-analyze", "--user", "verify", str(path)]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    assert "furrow-serve" not in subprocess.run(command, capture_output=True, text=True, timeout=50).stderr
    path.write_text(path.read_text().replace("ExecStart=", "ExecStop="))
    assert "furrow-serve" in subprocess.run(command, capture_output=True, text=True, timeout=50).stderr
