"""Mixtures of experts in C++: which experts a token goes to, and their weights in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from control.quantization import BLOCK_QUANTS
from tests import models
from tests.integration.worker.engine.ranks import RankGroup
from tests.integration.worker.engine.test_native import PROMPT, Running, conversation, loaded
from worker.collective import Solo
from worker.kv.base import CacheLayout
from worker.models.loading import load
from worker.models.native import forward
from worker.models.native.plan import Plan
from worker.models.served import Row
from worker.native.library import load_library, threads_here
from worker.tensors import as_array
from worker.weights.dequantize import dequantize
from worker.weights.formats import format_for
from worker.weights.quantizer import quantize
from worker.weights.stored_matrix import StoredMatrix

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")

Checkpoint = Callable[[str], Path]


def changed(folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """The checkpoint with every tensor replaced by what `change` makes of it."""
    file = folder / "model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("family", "expected"), [("qwen3_moe", [0, -1, 1]), ("mixtral", [0, 1, 2])])
def test_the_layers_are_mixtures(
    family: str, expected: list[int], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of these tests have mixtures in C++, and one of them a dense layer between."""
    plans: list[Plan] = []

    def noted(model: Any, layout: CacheLayout) -> Plan:
        plans.append(Plan(model, layout))
        return plans[-1]

    monkeypatch.setattr(forward, "Plan", noted)
    load(checkpoint(family), collective=Solo(), dtype="float32")
    (plan,) = plans
    assert [layer.mixture for layer in plan._layers] == expected
    assert {mixture.chosen for mixture in plan._mixtures.structs} == {2}


def test_equal_experts_are_chosen_alike_in_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the router cannot tell experts apart, a token goes to the same ones alone and among others."""
    folder = changed(
        models.make("qwen3_moe", tmp_path, norm_topk_prob=False),
        lambda name, tensor: tensor[[0, 1, 2, 0, 1, 2, 0, 1]].clone() if "mlp.gate.weight" in name else tensor,
    )
    running = loaded(folder, None, monkeypatch, native=True)
    alone = [running.step(Row(0, [token], at, True))[0] for at, token in enumerate(PROMPT)]
    together = running.step(*(Row(sid, PROMPT[: 50 + sid], 0, True) for sid in range(1, 10)))
    for sid, logits in enumerate(together, start=1):
        assert torch.equal(logits, alone[49 + sid])


@pytest.mark.parametrize("threads", [1, 3])
def test_all_tokens_may_go_to_the_same_experts(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that prefers no expert sends all tokens to the first ones; the others' weights have no effect."""
    folder = changed(
        models.make("mixtral", tmp_path),
        lambda name, tensor: tensor.zero_() if "block_sparse_moe.gate" in name else tensor,
    )
    torch.set_num_threads(threads)
    try:
        messages = conversation(loaded(folder, None, monkeypatch, native=True))
        changed(folder, lambda name, tensor: tensor.fill_(9.0) if ".experts.2." in name else tensor)
        again = conversation(loaded(folder, None, monkeypatch, native=True))
        changed(folder, lambda name, tensor: tensor.fill_(9.0) if ".experts.1." in name else tensor)
        other = conversation(loaded(folder, None, monkeypatch, native=True))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(messages, again)
    assert not torch.equal(messages, other)


def test_a_token_with_nan_spoils_no_other(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of NaN goes to some experts and gives NaN; a row beside it keeps its bits."""
    running = loaded(checkpoint("qwen3_moe"), None, monkeypatch, native=True)
    running.step(Row(0, PROMPT, 0, True), Row(1, PROMPT, 0, True), Row(2, PROMPT, 0, True))
    logits = running.step(Row(2, [3], 60, True))[0]
    slab = running.store._slabs[1]
    slab.pool.memories[0][1, 0, slab.slot, 0, 5] = float("nan")
    step_logits = running.step(Row(0, [3], 60, True), Row(1, [3], 60, True))
    assert torch.equal(step_logits[0], logits)
    assert step_logits[1].isnan().all()


@pytest.mark.parametrize(("quant", "share"), [(None, 1.05), ("f16", 1.05), ("int8", 0.6)])
def test_experts_are_kept_as_they_are_stored(quant: str | None, share: float, tmp_path: Path) -> None:
    """Experts of a 16-bit checkpoint take the room of the file, or with 8 bits about half of it."""
    shape = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 16, "intermediate_size": 128}
    folder = changed(models.make("qwen3_moe", tmp_path, **shape), lambda _, tensor: tensor.bfloat16())
    weights = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert load(folder, collective=Solo(), quant=quant).weight_bytes <= share * weights


@pytest.mark.timeout(60)
@pytest.mark.parametrize("quant", [None, "int8", "q4_0"])
def test_each_of_two_ranks_keeps_half(quant: str | None, tmp_path: Path, ranks: RankGroup) -> None:
    """Two ranks' packed experts take no more memory together than one's, one expert and one panel of 32 apart: the sum
    of the ranks' weights is that of one rank, beside norms and routers."""
    shape = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 16, "num_hidden_layers": 2}
    folder = changed(models.make("qwen3_moe", tmp_path, **shape), lambda _, tensor: tensor.bfloat16())
    alone = load(folder, collective=Solo(), quant=quant).weight_bytes
    ranks.form(2)
    shares = ranks.ask("load", folder, "float32", quant)
    assert sum(shares) < 1.02 * alone
    assert max(shares) < 0.52 * alone


def test_experts_run_without_the_step_in_cpp(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed experts answer where torch runs the forward."""
    running: Running = loaded(checkpoint("mixtral"), "int8", monkeypatch, native=False)
    assert running.step(Row(0, PROMPT, 0, True)).isfinite().all()


@pytest.mark.parametrize("quant", ["q4_0", "q4k"])
def test_experts_in_blocks(quant: str, tmp_path: Path) -> None:
    """Their logits are near those of the dequantised weights, and have the same bits token by token as in chunks and in
    company."""
    shape = {"hidden_size": 256, "moe_intermediate_size": 64, "intermediate_size": 256, "initializer_range": 0.05}
    running = Running(load(models.make("qwen3_moe", tmp_path, norm_noise=0.1, **shape), collective=Solo(), quant=quant))
    assert running.model.is_native
    threads = threads_here()
    assert threads is not None

    def rounded(name: str, weight: Tensor) -> Tensor:
        chosen = format_for(BLOCK_QUANTS[quant], weight.shape[-1])
        if chosen is None or weight.dim() < 2 or name.endswith("mlp.gate.weight"):
            return weight
        return torch.from_numpy(
            dequantize(StoredMatrix(chosen.name, quantize(as_array(weight), chosen, threads, name)))
        )

    exact = Running(load(changed(tmp_path, rounded), collective=Solo()))
    assert running.model.weight_bytes < 0.25 * exact.model.weight_bytes
    near = functional.cosine_similarity(conversation(running), conversation(exact), dim=-1)
    assert near.median() >= 0.999  # not of all: rounded activations send a token between two experts to the other one
    assert near.min() > 0.98
    alone = [running.step(Row(20, [token], at, True))[0] for at, token in enumerate(PROMPT)]
    running.step(Row(21, PROMPT[:33], 0, True), Row(22, PROMPT[:9], 0, True))
    chunked = running.step(Row(21, PROMPT[33:], 33, True), *(Row(s, PROMPT[:s], 0, True) for s in range(23, 30)))
    assert torch.equal(chunked[0], alone[-1])
