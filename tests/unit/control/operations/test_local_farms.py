"""The farms of this machine are found by their folders."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from control.errors import SettingsError
from control.operations import local_farms as subject
from control.operations.options import farm_named


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("FURROW_REDIS_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "furrow"


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def put(folder: Path, port: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "port").write_text(str(port))
    (folder / "url").write_text(f"redis://default:secret@127.0.0.1:{port}/0")
    return folder


def test_there_is_none_without_a_folder() -> None:
    assert subject.local_farm() is None and farm_named(None) is None


def test_a_farm_that_was_killed_is_left_out(state: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = gone.getsockname()[1]
    put(state / "serve-8000", closed)
    (state / "serve-8002").mkdir()
    serving = put(state / "serve-8001", port)
    assert subject.local_farms() == [serving]
    assert farm_named(None) == str(serving)


def test_a_farm_of_serve_goes_before_conversations(state: Path, port: int) -> None:
    conversation = put(state / "run/farm-x/redis", port)
    assert subject.local_farm() == conversation
    assert subject.local_farms(of_serve=True) == []
    serving = put(state / "serve-8000", port)
    assert subject.local_farm() == serving and subject.local_farms(of_serve=True) == [serving]


def test_several_have_to_be_named(state: Path, port: int) -> None:
    put(state / "serve-8000", port)
    put(state / "serve-8001", port)
    with pytest.raises(SettingsError, match=r"--redis .*serve-8000 or --redis .*serve-8001"):
        subject.local_farm()
    assert farm_named("redis://h") == "redis://h", "a named one is not looked for"


def test_the_environment_goes_before_a_farm_that_runs_here(
    state: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(state / "serve-8000", port)
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:6379/0")
    assert farm_named(None) == "redis://elsewhere:6379/0"
