"""Quantized checkpoints keep tokens and width: the tokens of the weights that their formulas give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests import quantized
from tests.integration.worker.engine.parity import (
    assert_close,
    assert_identical,
    assert_same_bits_in_company,
    engine_of,
    mixed,
    prompt,
)
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from worker.models.shard import open_checkpoint
from worker.native.host import SWITCH
from worker.native.library import load_library
from worker.repository.files import inspect
from worker.weights.stored_matrix import StoredMatrix

Written = Callable[[str], tuple[Path, Path]]

WEIGHT_ONLY = sorted(set(quantized.KINDS) - {"w8a8"})


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """(stored, plain) of a kind, made once."""

    def made(kind: str) -> tuple[Path, Path]:
        return quantized.write(tmp_path_factory.mktemp(kind.replace(" ", "-")), kind)

    return functools.cache(made)


@pytest.mark.parametrize("kind", sorted(quantized.KINDS))
def test_weights_are_those_of_the_formula(kind: str, written: Written) -> None:
    """Each layer's weights, as a whole and by parts that begin inside a tensor, to the last bit of float64."""
    stored, plain = written(kind)
    exact = load_file(plain / "model.safetensors")
    with open_checkpoint(inspect(stored), dequantize=False) as checkpoint:
        for name in (name for name in exact if name.endswith("_proj.weight")):
            outputs, inputs = exact[name].shape
            for dim, part in ((None, slice(None)), (0, slice(13, outputs - 3)), (1, slice(inputs // 2, None))):
                ranges = None if dim is None else [(part.start, part.stop or inputs)]
                tensor = checkpoint.read(name, dim, ranges)
                assert isinstance(tensor, StoredMatrix)
                wanted = exact[name][:, part] if dim == 1 else exact[name][part]
                assert torch.equal(torch.from_numpy(tensor.dequantized(np.float64)), wanted), (name, dim)


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_tokens_are_those_of_the_dequantized_weights(kind: str, written: Written) -> None:
    """Greedy float64 tokens equal transformers' on the plain weights, in chunks and in company."""
    stored, plain = written(kind)
    jobs = mixed()
    assert_identical(plain, jobs, play(engine_of(stored, "float64"), write(jobs)))


@pytest.mark.parametrize(("kind", "native"), [*((kind, True) for kind in WEIGHT_ONLY), ("gptq", False)])
def test_logits_in_float32(kind: str, native: bool, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are within 1e-4 of transformers' forward on the plain weights, in C++ and in torch."""
    monkeypatch.setenv(SWITCH, str(int(native)))
    stored, plain = written(kind)
    jobs = [Job(1, prompt(21), 8, 4), Job(2, prompt(37), 512, 4, start=1)]
    engine = engine_of(stored, "auto")
    assert engine.model.is_native == (native and load_library() is not None)
    assert_close(plain, jobs, play(engine, write(jobs)))


def rounded(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Activations as W8A8 has them: each token's in ± 127 of its largest, for a layer's input."""
    largest = inputs[0].abs().amax(-1, keepdim=True)
    return (inputs[0] / largest * 127).round() * largest / 127


@pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")
def test_activations_of_eight_bits(written: Written) -> None:
    """W8A8's logits are those of the plain weights with rounded activations, and not those with plain ones."""
    stored, plain = written("w8a8")
    job = Job(1, prompt(37), 512, 1)
    played_tokens = play(engine_of(stored, "auto"), write([job])).logits[1][0]
    model, tokens = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), torch.tensor([job.prompt])
    with torch.no_grad():
        other = model(tokens).logits[0, -1]
        for name, layer in model.named_modules():
            if name.endswith("_proj"):
                layer.register_forward_pre_hook(rounded)
        exact = model(tokens).logits[0, -1]
    assert (played_tokens - other).abs().max() > 1e-3
    assert (played_tokens - exact).abs().max() < 1e-4


@pytest.mark.timeout(60)
@pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")
def test_two_ranks_round_their_own_activations(written: Written, ranks: RankGroup) -> None:
    """Where a layer's inputs are shared each rank has a scale of its own: logits move no further than by rounding."""
    stored, _ = written("w8a8")
    ranks.form(2)
    ranks.ask("load", stored, "float32")
    jobs = [Job(1, prompt(37), 16, 1)]
    first, second = ranks.ask("play", write(jobs))
    assert second.checksums == first.checksums
    alone = play(engine_of(stored, "auto"), write(jobs)).logits[1][0]
    assert functional.cosine_similarity(first.logits[1][0], alone, dim=0) > 0.999


@pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")
@pytest.mark.parametrize("kind", ["fp8 by block", "gptq", "w8a8"])
def test_a_sequence_has_the_same_bits_in_any_company(kind: str, written: Written) -> None:
    """In C++ a sequence's logits alone, token by token, are those in chunks beside others."""
    assert_same_bits_in_company(written(kind)[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fp8 by block", "w4a16 with zeros", "awq", "gptq"])
def test_two_ranks_share_whole_groups(kind: str, written: Written, ranks: RankGroup) -> None:
    """Two ranks give transformers' tokens on the plain weights, and in float32 its logits within 1e-4."""
    stored, plain = written(kind)
    ranks.form(2)
    ranks.ask("load", stored, "float64")
    jobs = mixed()
    first, second = ranks.ask("play", write(jobs))
    assert_identical(plain, jobs, first)
    assert second.checksums == first.checksums
    short = [Job(1, prompt(21), 16, 3)]
    ranks.ask("load", stored, "float32")
    assert_close(plain, short, ranks.ask("play", write(short))[0])


@pytest.mark.timeout(60)
def test_two_ranks_share_whole_numbers_of_eight_weights(tmp_path: Path, ranks: RankGroup) -> None:
    """A feed-forward width of 88 with one scale for all of its inputs, of which a number in the file holds eight: two
    ranks have 40 and 48, and logits within 1e-4."""
    stored, plain = quantized.write(tmp_path, "gptq of whole outputs", intermediate_size=88)
    ranks.form(2)
    ranks.ask("load", stored, "float32")
    jobs = [Job(1, prompt(21), 16, 3)]
    assert_close(plain, jobs, ranks.ask("play", write(jobs))[0])


RECURRENT = {
    "qwen3_5_text": ("fp8 by block", {}),
    "qwen3_next": ("gptq", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_recurrent_layers(family: str, tmp_path: Path, ranks: RankGroup) -> None:
    """One rank's logits in float32, in C++, are within 1e-4 of transformers' on the plain weights, and two ranks give
    its tokens in float64; projections into recurrent layers and out of them are quantized."""
    kind, shape = RECURRENT[family]
    stored, plain = quantized.write(tmp_path, kind, family, **shape)
    jobs, short = mixed(), [Job(1, prompt(21), 8, 3)]
    engine = engine_of(stored, "auto")
    assert engine.model.is_native == (load_library() is not None)
    assert_close(plain, short, play(engine, write(short)))
    ranks.form(2)
    ranks.ask("load", stored, "float64")
    assert_identical(plain, jobs, ranks.ask("play", write(jobs))[0])


UNLIKE = {
    "mimo_v2_flash": {"moe_intermediate_size": 64},
    "gemma4_text": {"enable_moe_block": False, "num_experts": None, "top_k_experts": None},
    "glm4_moe_lite": {"head_dim": 16, "qk_rope_head_dim": 16, "kv_lora_rank": 48},
    "gemma3n_text": {},
    "lfm3": {},
}
"""Values narrower than keys, key-value heads that differ by layer, one row of keys for all heads, gates of heads, and
layers whose products are not packed."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", sorted(UNLIKE))
def test_layers_of_unlike_sizes(family: str, tmp_path: Path) -> None:
    """Quantized layers of unusual sizes, or that stay unpacked, give logits within 1e-4 in C++."""
    stored, plain = quantized.write(tmp_path, "fp8 by block", family, **UNLIKE[family])
    engine = engine_of(stored, "auto")
    assert engine.model.is_native == (load_library() is not None)
    jobs = [Job(1, prompt(21), 8, 3)]
    assert_close(plain, jobs, play(engine, write(jobs)))


@pytest.mark.timeout(60)
def test_layers_whose_products_are_not_packed_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n's quantized layers between its streams are plain numbers there: logits within 1e-4."""
    monkeypatch.setenv(SWITCH, "0")
    stored, plain = quantized.write(tmp_path, "fp8 by block", "gemma3n_text")
    engine = engine_of(stored, "auto")
    assert not engine.model.is_native
    jobs = [Job(1, prompt(21), 8, 3)]
    assert_close(plain, jobs, play(engine, write(jobs)))
