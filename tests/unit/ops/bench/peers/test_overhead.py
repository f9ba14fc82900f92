"""The farm and the bare loop serve the same weights: those that were named."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.bench.peers import overhead as subject
from ops.bench.peers.engine import Setup, Unavailable
from ops.harness import program


@pytest.mark.parametrize(("weights", "file"), [("q4_k_m", "q4_k_m.gguf"), ("f32", None), ("int8", None)])
def test_weights_in_a_file_are_measured_from_it(
    weights: str, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setups: list[Setup] = []

    def stop(setup: Setup) -> None:
        setups.append(setup)
        raise Unavailable("enough")

    class Made:
        def __init__(self, *_: object) -> None: ...
        def checkpoint(self) -> Path:
            return tmp_path

        def gguf(self, weights: str) -> Path:
            return tmp_path / f"{weights}.gguf"

    monkeypatch.setattr(subject, "bare_loop", stop)
    monkeypatch.setattr(program, "Models", Made)
    CliRunner().invoke(subject.overhead, ["--weights", weights, "--models", str(tmp_path)])
    [setup] = setups
    assert setup.gguf == (None if file is None else tmp_path / file)
