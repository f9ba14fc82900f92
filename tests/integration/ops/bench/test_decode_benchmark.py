"""The offline benchmark compares two engines at the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ops.bench.engine.decode import (
    CPP,
    RANKS,
    TRANSFORMERS,
    BatchComparison,
    Furrow,
    Setting,
    Timed,
    Transformers,
    compare,
    decode,
    limits,
)
from ops.harness import models

TINY = {**models.SHAPES["tiny"], "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    return models.build("tiny", tmp_path, "float64")


def setting(folder: Path) -> Setting:
    return Setting(folder, "float64", "cpu", threads=1, kv_tokens=64, tp=2)


def test_both_engines_decode_the_same_tokens(folder: Path) -> None:
    """In float64 all sequences agree, each round anew, and each engine's every step is timed."""
    furrow, reference = Furrow(setting(folder)), Transformers(setting(folder))
    prompts = torch.randint(128, (3, 5), generator=torch.Generator().manual_seed(1)).tolist()
    for one in (furrow.decode(prompts, 6), reference.decode(prompts, 6), furrow.decode(prompts, 6)):
        assert len(one.seconds) == 6
        assert all(seconds > 0 for seconds in one.seconds)
        assert [len(tokens) for tokens in one.tokens] == [6, 6, 6]
    comparison = compare({CPP: furrow, TRANSFORMERS: reference}, prompts, 6, rounds=1)
    assert (comparison.batch, comparison.equal) == (3, 3)
    for timed in comparison.engines.values():
        assert timed.tokens_per_second == pytest.approx(3000 / timed.step_ms)
        assert timed.fastest_ms <= timed.step_ms


def test_different_weights_are_noticed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The count of equal sequences is a comparison, not a constant."""
    torch.manual_seed(1)
    other = tmp_path_factory.mktemp("other")
    reference = Transformers(setting(folder))
    with torch.no_grad():
        for parameter in reference._model.parameters():
            parameter.normal_()
    reference._model.save_pretrained(other)
    engines = {CPP: Furrow(setting(other)), TRANSFORMERS: Transformers(setting(folder))}
    assert compare(engines, [[1, 2, 3]], 6, rounds=1).equal == 0


def test_the_command_prints_and_writes_its_figures(folder: Path, tmp_path: Path) -> None:
    """One line per batch, and the same in JSON."""
    file = tmp_path / "out.json"
    arguments = ["--model", str(folder), "--batch", "1", "--batch", "2", "--prompt", "4", "--tokens", "3"]
    arguments += ["--engine", CPP, "--engine", TRANSFORMERS, "--rounds", "1", "--dtype", "float64"]
    result = CliRunner().invoke(decode, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "batch 2: c++" in result.output
    written = json.loads(file.read_text())
    assert [one["batch"] for one in written["batches"]] == [1, 2]
    assert [one["equal"] for one in written["batches"]] == [1, 2]
    assert list(written["batches"][0]["engines"]) == [CPP, TRANSFORMERS]
    assert "torch" in written["machine"]


def test_ranks_are_held_to_a_share_of_one_rank() -> None:
    """Where both were measured."""
    one, half = Timed(1.0, 1.0, 1.0, 100.0), Timed(2.0, 2.0, 2.0, 50.0)
    [figure] = limits([BatchComparison(8, {CPP: one, RANKS: half}, 8)], 2)
    assert (figure.measured, figure.limit, figure.holds) == (0.5, 0.9, False)
    assert limits([BatchComparison(8, {CPP: one}, 8)], 2) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_said(folder: Path) -> None:
    """The refusal names the device and the remedy."""
    result = CliRunner().invoke(decode, ["--model", str(folder), "--device", "cuda:0"])
    assert result.exit_code == 2
    assert "--device cuda:0: torch sees no GPU here; use cpu" in result.output
