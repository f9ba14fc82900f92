"""Logged exceptions show causes and no secrets."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from control import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The run's own logging, afterwards as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("style", ["json", "console"])
def test_passwords_and_local_variables_stay_inside(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The cause and the place are shown; a URL's password and what the frames held (prompts, weights) are not."""
    logs.configure(style, "info")
    prompt = "words of a user"
    try:
        raise ConnectionError(f"no way to redis://:hunter2@host:6379/0 for {len(prompt)} characters")
    except ConnectionError:
        structlog.get_logger().exception("failed")
    shown = capsys.readouterr().err
    assert "ConnectionError" in shown and "host:6379" in shown and "test_logged_exceptions" in shown
    assert "hunter2" not in shown and "words of a user" not in shown
