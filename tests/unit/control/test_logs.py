"""Log lines have one shape and no secrets."""

from __future__ import annotations

import json
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
    structlog.contextvars.clear_contextvars()


def test_every_line_is_json_with_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    """Bound context is on structlog's lines and on those of any library."""
    logs.configure("json", "info")
    structlog.contextvars.bind_contextvars(model="m", rank=1, epoch=5)
    structlog.get_logger().info("step", seq=3)
    logging.getLogger("library").warning("hello %s", "there")
    structlog.get_logger().debug("not shown")
    step, library = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (step["event"], step["seq"], step["model"], step["rank"], step["epoch"]) == ("step", 3, "m", 1, 5)
    assert (library["event"], library["rank"], library["level"]) == ("hello there", 1, "warning")


@pytest.mark.parametrize("style", ["json", "console"])
def test_passwords_of_urls_are_hidden(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In values and in messages, whoever logs."""
    logs.configure(style, "info")
    structlog.get_logger().info("connects", url="redis://user:secret@host:6379/0")
    logging.getLogger("library").error("failed: redis://:secret@host/0")
    shown = capsys.readouterr().err
    assert "secret" not in shown
    assert "host:6379" in shown


def test_a_failure_shows_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """The chain of exceptions is in the line."""
    logs.configure("json", "info")
    try:
        try:
            raise ValueError("the root")
        except ValueError as error:
            raise RuntimeError("the result") from error
    except RuntimeError:
        structlog.get_logger().exception("step failed")
    line = json.loads(capsys.readouterr().err)
    assert "the root" in line["exception"]
    assert "the result" in line["exception"]
