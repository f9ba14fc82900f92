"""Messages of `furrow serve` while a model loads."""

from __future__ import annotations

import sys

import pytest

from ops.cli.serve import News


@pytest.fixture
def news() -> News:
    return News()


def test_a_log_gets_the_quarters(news: News, capsys: pytest.CaptureFixture[str]) -> None:
    """And every change that is more than a number, once."""
    for line in (
        "m: loading (no worker has it yet)",
        *(f"m: loading (rank 0 is loading: {n} %)" for n in range(0, 99, 3)),
    ):
        news.tell(line)
        news.tell(line)
    said = capsys.readouterr().err.splitlines()
    assert said == ["furrow: m: loading (no worker has it yet)"] + [
        f"furrow: m: loading (rank 0 is loading: {share} %)" for share in (0, 27, 51, 75)
    ]


def test_a_terminal_counts_in_place(
    news: News, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that differs from the one before by its percentage alone takes its place."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for line in ("m: loading (1 %)", "m: loading (2 %)", "m: loaded"):
        news.tell(line)
    assert (
        capsys.readouterr().err
        == "furrow: m: loading (1 %)\n\033[A\033[2Kfurrow: m: loading (2 %)\nfurrow: m: loaded\n"
    )
