"""The offline benchmark compares two engines at the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ops.bench.common import random_model, shapes
from ops.bench.engine.decode import compare, decode
from ops.bench.engine.engines import Furrow, Transformers
from ops.bench.engine.loading import loading, tensor_bytes

TINY = {**shapes.SHAPES["tiny"], "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    return random_model.build("tiny", tmp_path, "float64")


def test_both_engines_decode_the_same_tokens(folder: Path) -> None:
    """In float64 all sequences agree, each round anew, and each engine's every step is timed."""
    furrow, reference = Furrow(folder, "float64", "cpu", kv_tokens=64), Transformers(folder, "float64", "cpu")
    prompts = torch.randint(128, (3, 5), generator=torch.Generator().manual_seed(1)).tolist()
    for one in (furrow.decode(prompts, 6), reference.decode(prompts, 6), furrow.decode(prompts, 6)):
        assert len(one.seconds) == 6
        assert all(seconds > 0 for seconds in one.seconds)
        assert [len(tokens) for tokens in one.tokens] == [6, 6, 6]
    found = compare(furrow, reference, prompts, 6, rounds=1)
    assert (found.batch, found.equal) == (3, 3)
    assert found.ratio == pytest.approx(found.furrow_tokens_per_second / found.transformers_tokens_per_second)
    assert found.furrow_tokens_per_second == pytest.approx(3000 / found.furrow_step_ms)


def test_different_weights_are_noticed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The count of equal sequences is a comparison, not a constant."""
    torch.manual_seed(1)
    other = tmp_path_factory.mktemp("other")
    reference = Transformers(folder, "float64", "cpu")
    with torch.no_grad():
        for parameter in reference._model.parameters():
            parameter.normal_()
    reference._model.save_pretrained(other)
    furrow = Furrow(other, "float64", "cpu", kv_tokens=64)
    found = compare(furrow, Transformers(folder, "float64", "cpu"), [[1, 2, 3]], 6, rounds=1)
    assert found.equal == 0


def test_the_command_prints_and_writes_its_figures(folder: Path, tmp_path: Path) -> None:
    """One line per batch, and the same in JSON."""
    file = tmp_path / "out.json"
    arguments = ["--model", str(folder), "--batch", "1", "--batch", "2", "--prompt", "4", "--tokens", "3"]
    found = CliRunner().invoke(decode, [*arguments, "--rounds", "1", "--dtype", "float64", "--json", str(file)])
    assert found.exit_code == 0, found.output
    assert "batch 2: Furrow" in found.output
    written = json.loads(file.read_text())
    assert [one["batch"] for one in written["batches"]] == [1, 2]
    assert [one["equal"] for one in written["batches"]] == [1, 2]
    assert "torch" in written["machine"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_said(folder: Path) -> None:
    """The refusal names the device and the remedy."""
    found = CliRunner().invoke(decode, ["--model", str(folder), "--device", "cuda:0"])
    assert found.exit_code == 2
    assert "--device cuda:0: torch sees no GPU here; use cpu" in found.output


def test_the_memory_of_a_load_is_measured(folder: Path) -> None:
    """In a process of its own; the verdict is the exit status."""
    assert tensor_bytes(folder) == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    found = CliRunner().invoke(loading, ["--model", str(folder), "--rounds", "1"])
    assert "weights kept" in found.output and "peak of a load" in found.output, found.output
    assert found.exit_code == (1 if "MISSED" in found.output else 0)
