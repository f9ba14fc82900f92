"""Engines that a host offers; and what a process of one gets of the worker."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from control.errors import SettingsError
from worker.external import host as host_module
from worker.external.engine import Address, Launch
from worker.external.host import (
    EngineSettings,
    address_of,
    engine_environment,
    engine_settings,
    last_lines,
    named_settings,
)


def program(folder: Path, name: str) -> Path:
    file = folder / name
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def test_an_engine_on_the_path_is_offered_and_a_named_one_goes_before_it(tmp_path: Path) -> None:
    on_path = program(tmp_path, "vllm")
    environment = {"PATH": str(tmp_path)}
    assert engine_settings(environment) == {"vllm": EngineSettings(command=[str(on_path)])}
    named = {"vllm": EngineSettings(command=["/other"], memory=5), "sglang": EngineSettings(url="http://127.0.0.1:1")}
    environment[host_module.VARIABLE] = msgspec.json.encode(named).decode()
    assert engine_settings(environment) == named


def test_options_of_a_worker_become_settings(tmp_path: Path) -> None:
    settings = named_settings(
        {"vllm": sys.executable}, {"llama-server": f"{program(tmp_path, 'llama')} --verbose"}, {}, {"vllm": 7}
    )
    assert settings["vllm"].command[1:] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert settings["vllm"].by_module and settings["vllm"].memory == 7
    assert settings["llama-server"].command[1:] == ["--verbose"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (({"tgi": "x"}, {}, {}, {}), "'tgi' is unknown"),
        (({"llama-server": sys.executable}, {}, {}, {}), "no Python program"),
        (({}, {"vllm": "/no/such/program"}, {}, {}), "no such program"),
    ],
)
def test_wrong_options_are_refused_at_the_start(options: tuple[dict[str, str], ...], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        named_settings(*options)  # type: ignore[arg-type]


def test_a_socket_lies_where_only_this_user_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = address_of("vllm", EngineSettings(command=["x"]), "h", "org/m", "r0")
    again = address_of("vllm", EngineSettings(command=["x"]), "h", "org/m", "r0")
    assert address == again and Address.parse(str(address)) == address
    folder = Path(address.socket).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(address.socket) < 108
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="others may enter"):
        address_of("vllm", EngineSettings(command=["x"]), "h", "org/m", "r0")
    assert address_of("sglang", EngineSettings(command=["x"]), "h", "m", "r0").url.startswith("http://127.0.0.1:")


def test_an_engine_gets_none_of_the_workers_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FURROW_REDIS_URL", "REDIS_URL", "HF_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "secret")
    launch = Launch(tmp_path, "m", Address(socket="/x"), ("cpu",), {})
    environment = engine_environment("vllm", launch)
    assert "secret" not in environment.values() and environment["PATH"] == os.environ["PATH"]


def test_the_last_lines_of_a_log_leave_out_the_frames_of_a_traceback(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == ""
    log.write_text('Traceback (most recent call last):\n  File "x", line 1\n    y\nValueError: bad\n\n')
    assert last_lines(log) == "Traceback (most recent call last): | ValueError: bad"
