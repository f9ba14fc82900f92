"""Text on a terminal has no control characters: text of others; in a pipe it is as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click
import pytest

from control.errors import FurrowError
from control.operations.checks.findings import Finding
from ops import cli
from ops.cli.doctor.doctor import _lines
from ops.cli.progress import Stage, Waiting
from ops.cli.show import ModelShown, show
from ops.cli.tables import echo_table, fit
from ops.cli.top import ModelRow, ReplicaRow, _cells

EVIL = "a\x1b]0;title\x07\x9b2Jb"
PLAIN = "a]0;title2Jb"


def table() -> None:
    echo_table([("DETAIL",), (EVIL,)])


def stage() -> None:
    with Waiting() as waiting:
        waiting._bar = None  # the line, which every terminal shows
        waiting.show(Stage(EVIL))


def finding() -> None:
    one = Finding(subject="models", check="replicas", level="error", where=EVIL, message=EVIL, remedy=EVIL)
    for line in _lines("models", EVIL, [one]):
        click.echo(click.unstyle(line) if EVIL not in line else line)


def shown() -> None:
    assert show.callback is not None
    show.callback("m", None, False, False, None)


def error() -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor"])


@pytest.mark.parametrize("act", [table, stage, finding, shown, error])
def test_a_terminal_gets_no_control_characters(
    act: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of details, stages, findings, files of a repository, and errors."""

    def fail(**_: object) -> None:
        raise FurrowError(EVIL)

    monkeypatch.setattr(cli.cli, "main", fail)
    model = ModelShown(name="m", source=EVIL, files=None, files_missing=EVIL, served=None)
    monkeypatch.setattr("ops.cli.show._shown", lambda *_: model)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    act()
    output = "".join(capsys.readouterr())
    assert PLAIN in output and not {"\x1b", "\x07", "\x9b"} & set(output)


def test_a_pipe_gets_the_text_as_it_is() -> None:
    assert fit(EVIL) == EVIL


def test_top_shows_no_control_characters() -> None:
    """Rich passes escape characters on."""
    replica = ReplicaRow(
        replica="r0",
        state="failed",
        detail=EVIL,
        host=EVIL,
        running=0,
        tokens_per_second=None,
        first_token_ms=None,
        kv_usage=None,
        ranks=[],
    )
    model = ModelRow(
        model="m",
        state="failed",
        paused=False,
        queued=0,
        expected_wait_ms=None,
        wanted=1,
        serving=0,
        replicas=[replica],
    )
    cell_texts = [cell.plain for cell in _cells(model, replica, first=True)]
    assert cell_texts.count(PLAIN) == 2 and not any("\x1b" in cell for cell in cell_texts)
