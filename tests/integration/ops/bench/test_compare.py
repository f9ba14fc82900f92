"""The comparison gives all engines the same work: on the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.bench.peers import limits
from ops.bench.peers.compare import compare
from ops.bench.peers.engine import Setup
from ops.bench.peers.loops.furrow_loop import load
from ops.bench.peers.overhead import overhead
from ops.harness import models
from ops.harness.models import Models

TINY = {**models.SHAPES["tiny"], "vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


pytestmark = pytest.mark.timeout(180)  # each engine is a process that imports torch


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and kernels that cost next to nothing, and no standby, which would import torch once more."""
    monkeypatch.setenv("FURROW_STANDBY", "0")
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    monkeypatch.setitem(limits.READ_BYTES, "cpu", 2**20)
    monkeypatch.setitem(limits.SIDE, "cpu", 64)


def test_compare_finds_equal_tokens_and_writes_its_file(tmp_path: Path) -> None:
    """Equal tokens in float64, figures for every number of streams, an absent peer skipped, the file written."""
    file = tmp_path / "out.json"
    rows = ["--engine", "furrow-loop:f64", "--engine", "transformers:f64", "--engine", "llama-server:f32"]
    sizes = ["--streams", "1", "--streams", "3", "--prompt", "6", "--tokens", "4", "--ttft", "6", "--rounds", "1"]
    written = ["--json", str(file), "--models", str(tmp_path)]
    result = CliRunner().invoke(compare, [*rows, *sizes, *written, "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "skipped llama-server:f32: no llama-server is named" in result.output
    loop, generate, absent = json.loads(file.read_text())["rows"]
    assert absent["runs"] == {}
    for row in (loop, generate):
        assert row["equal"] == [1, 1]
        assert list(row["runs"]) == ["1", "3"]
        assert list(row["ttft_ms"]) == ["6"]
        assert row["medians"]["3"]["decode"] > 0
        assert row["memory_mib"][0] > 50


def test_the_bare_loop_reads_a_file_of_several_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows q4_k_m of Furrow and of llama.cpp are of one file."""
    wide = {**TINY, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
    monkeypatch.setitem(models.SHAPES, "tiny", wide)
    files = Models("tiny", tmp_path)
    setup = Setup(files.checkpoint(), "q4_k_m", files.gguf("q4_k_m"))
    (stream,) = load(setup).run([[5, 6, 7]], 3)
    assert len(stream.tokens) == 3


def test_the_farm_beside_the_bare_loop(tmp_path: Path) -> None:
    """Both are measured, with what Redis was asked; the verdict is the exit status."""
    sizes = ["--streams", "1", "--prompt", "8", "--tokens", "160", "--rounds", "1"]
    result = CliRunner().invoke(overhead, ["--shape", "tiny", "--models", str(tmp_path), *sizes])
    assert "1 streams: farm / bare loop" in result.output, result.output
    assert "commands sent" in result.output
    assert result.exit_code == (1 if "MISSED" in result.output else 0)
