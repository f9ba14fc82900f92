"""Settings from the environment: defaults, and refusals that name variable, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from control import settings
from control.errors import SettingsError
from control.settings import REDIS_AWAITED, Settings, wait_for_url


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FURROW_REDIS_URL", "redis://nowhere")
    for name in ("FURROW_STANDBY", "FURROW_SHARED_MEMORY", REDIS_AWAITED):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("value", "has_standby"), [("", True), ("1", True), ("0", False)])
def test_a_standby_is_kept_unless_switched_off(monkeypatch: pytest.MonkeyPatch, value: str, has_standby: bool) -> None:
    """Unset, empty and 1 keep one; 0 does without."""
    assert Settings.from_environment().standby
    monkeypatch.setenv("FURROW_STANDBY", value)
    assert Settings.from_environment().standby is has_standby


@pytest.mark.parametrize(("value", "shared"), [("", True), ("1", True), ("0", False)])
def test_memory_is_shared_unless_switched_off(monkeypatch: pytest.MonkeyPatch, value: str, shared: bool) -> None:
    """Unset, empty and 1 let ranks on one host share memory; 0 leaves them to sockets."""
    assert Settings.from_environment().shared_memory
    monkeypatch.setenv("FURROW_SHARED_MEMORY", value)
    assert Settings.from_environment().shared_memory is shared


@pytest.mark.parametrize(
    "name",
    [
        "FURROW_STANDBY",
        "FURROW_SHARED_MEMORY",
        "FURROW_LOG_FORMAT",
        "FURROW_LOG_LEVEL",
        "FURROW_REDIS_WAIT",
        "FURROW_WEIGHT_CACHE",
    ],
)
def test_a_value_that_is_not_understood_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The error names the variable and the value."""
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(SettingsError, match=f"{name}='perhaps'"):
        Settings.from_environment()


def test_a_url_that_is_awaited_may_come_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part that starts beside the private server waits for its URL; any other is refused at once."""
    monkeypatch.setenv("FURROW_REDIS_URL", str(tmp_path))
    with pytest.raises(SettingsError, match="no private server"):
        Settings.from_environment()
    with pytest.raises(SettingsError, match="no private server"):
        wait_for_url(str(tmp_path), 60.0)
    monkeypatch.setenv(REDIS_AWAITED, "1")
    assert Settings.from_environment().redis_url == str(tmp_path)
    with pytest.raises(SettingsError, match="no private server"):
        wait_for_url(str(tmp_path), 0.02)
    looks: list[float] = []

    def publish(seconds: float) -> None:
        looks.append(seconds)
        (tmp_path / "url").write_text("redis://here")

    monkeypatch.setattr(settings.time, "sleep", publish)
    wait_for_url(str(tmp_path), 60.0)
    assert len(looks) == 1


@pytest.mark.parametrize(("value", "planned"), [("", None), ("off", 0), ("12GiB", 12 * 2**30)])
def test_memory_is_planned_unless_switched_off(
    monkeypatch: pytest.MonkeyPatch, value: str, planned: int | None
) -> None:
    monkeypatch.setenv("FURROW_MEMORY", value)
    assert Settings.from_environment().memory_bytes == planned


def test_memory_that_is_no_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FURROW_MEMORY", "much")
    with pytest.raises(SettingsError, match="FURROW_MEMORY"):
        Settings.from_environment()
