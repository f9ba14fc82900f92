"""Connections are bounded by open files."""

from __future__ import annotations

import resource

import pytest

from api.__main__ import OWN_FILES, fitting_connections


def test_connections_fit_the_open_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond them the kernel would reset connections without a word; now they get 503, and the limit is named."""
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert fitting_connections(8192) == 1000 - OWN_FILES
    assert raised == [(1000, 1000)]
    warning = capsys.readouterr().err
    assert "1000 open files" in warning and "LimitNOFILE" in warning and str(8192 + OWN_FILES) in warning
    assert fitting_connections(100) == 100 and capsys.readouterr().err == ""
