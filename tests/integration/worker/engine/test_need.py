"""A rank's memory need is known from headers: beside what a load has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from control.messages import ModelSpec
from control.quantization import BLOCK_QUANTS
from tests import image_models, models, pooled_models, quantized
from tests.integration.worker.engine.test_gguf import MODELS, made
from tests.integration.worker.engine.test_loading import Membership
from worker.agent.needs import need_of, uneven_need_of
from worker.collective import Solo
from worker.kv.base import CacheLayout
from worker.models.loading import load
from worker.models.native.forward import NativeModel
from worker.models.native.plan import Plan
from worker.models.native.scratch import scratch_bytes
from worker.models.need import GPU_PROCESS_BYTES, GPU_STEP_BYTES, rank_need
from worker.native.host import panel_outputs
from worker.native.library import KINDS, Batch, Slab, Span, threads_here
from worker.repository.files import inspect
from worker.weights.formats import FORMATS
from worker.weights.schemes import E2M1, E4M3, INT4, INT8
from worker.weights.stored_matrix import PackedMatrix, StoredMatrix, packed_bytes

pytestmark = pytest.mark.skipif(threads_here() is None, reason="no compiler")

Checkpoint = Callable[[str], Path]
TOKENS = 100


def measured(source: Path, rank: int = 0, ranks: int = 1, **options: Any) -> tuple[int, int]:
    """Bytes of the weights of a load, and of TOKENS cached positions."""
    group: Any = Solo() if ranks == 1 else Membership(rank, ranks)
    model = load(source, collective=group, **options)
    layout = model.cache_layout
    assert isinstance(layout, CacheLayout)
    return model.weight_bytes, TOKENS * layout.bytes_per_token


def assert_exact(source: Path, rank: int = 0, ranks: int = 1, **options: Any) -> None:
    weights, kv = measured(source, rank, ranks, **options)
    need = rank_need(inspect(source), tp=ranks, rank=rank, kv_tokens=TOKENS, **options)
    assert need.exact
    assert (need.weights, need.kv) == (weights, kv)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_bytes_are_those_of_the_packing(kind: str) -> None:
    threads = threads_here()
    assert threads is not None
    assert panel_outputs() == threads.library.furrow_panel()
    for outputs, inputs in ((1, 256), (33, 512), (64, 768)):
        for part in parts_of(kind, outputs, inputs):
            group = part.group if isinstance(part, StoredMatrix) else 0
            packed = PackedMatrix([part], inputs, kind, 0, threads)
            assert packed_bytes(kind, inputs, outputs, group, panel_outputs()) == packed.bytes


def parts_of(kind: str, outputs: int, inputs: int) -> list[Any]:
    """Matrices of a kind: plain, in blocks, or with scales by group."""
    if kind in FORMATS:
        return [StoredMatrix(kind, np.zeros((outputs, FORMATS[kind].row_bytes(inputs)), np.uint8))]
    plain = [] if kind in (E4M3, INT4, E2M1) else [np.zeros((outputs, inputs), np.float32)]
    if kind not in (E4M3, INT8, INT4, E2M1):
        return plain
    width = inputs // 2 if kind in (INT4, E2M1) else inputs
    groups = [inputs] if kind == INT8 else [32, 128, inputs]
    codes = np.zeros((outputs, width), np.uint8)
    scale = np.uint8 if kind == E2M1 else np.float32
    return plain + [
        StoredMatrix(kind, codes, np.zeros((outputs, -(-inputs // group)), scale), None, group) for group in groups
    ]


@pytest.mark.parametrize("family", sorted(models.FAMILY_SHAPES))
def test_weights_and_kv_of_each_family_are_exact(family: str, checkpoint: Checkpoint) -> None:
    options: dict[str, Any]
    for options in (
        {},
        {"quant": "int8", "kv_type": "auto"},
        {"quant": "q8_0", "kv_type": "q8_0"},
        {"dtype": "float16"},
    ):
        assert_exact(checkpoint(family), **options)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "family",
    ["llama", "gemma4_text", "qwen3_moe", "qwen3_next", "granitemoehybrid", "gpt_oss", "mimo_v2_flash", "gemma3n_text"],
)
def test_weights_and_kv_of_a_rank_of_two_are_exact(family: str, rank: int, checkpoint: Checkpoint) -> None:
    options: dict[str, Any]
    for options in ({}, {"quant": "q4_0"}):
        assert_exact(checkpoint(family), rank, 2, **options)


@pytest.mark.parametrize("quant", ["f16", *sorted(BLOCK_QUANTS)])
def test_weights_in_each_quantization_are_exact(quant: str, tmp_path: Path) -> None:
    """With blocks of 256 and of 32, and rows that neither divides."""
    wide = {"hidden_size": 256, "intermediate_size": 800, "head_dim": 64, "vocab_size": 300}
    assert_exact(models.make("llama", tmp_path / "wide", **wide), quant=quant)
    assert_exact(models.make("qwen3", tmp_path / "narrow"), quant=quant)


@pytest.mark.parametrize("family", sorted(MODELS))
def test_weights_of_gguf_files_are_exact(family: str, tmp_path: Path) -> None:
    file, _ = made(family, tmp_path)
    options: dict[str, Any]
    for options in ({}, {"quant": "q8_0"}, {"dequantize": True}):
        assert_exact(file, **options)


@pytest.mark.parametrize("kind", sorted(quantized.KINDS))
def test_weights_of_quantized_checkpoints_are_exact(kind: str, tmp_path: Path) -> None:
    stored, _ = quantized.write(tmp_path, kind)
    for rank in (0, 1):
        assert_exact(stored, rank, 2)
    assert_exact(stored)


def test_weights_of_mxfp4_are_exact(tmp_path: Path) -> None:
    stored, _ = quantized.write_mxfp4(tmp_path)
    assert_exact(stored)


def test_an_encoder_of_images_counts_with_the_weights(tmp_path: Path) -> None:
    assert_exact(image_models.qwen3_vl(tmp_path / "qwen"))
    assert_exact(image_models.gemma3(tmp_path / "gemma"))


def test_a_model_for_vectors_is_counted_with_its_pooler(tmp_path: Path) -> None:
    assert_exact(pooled_models.make("qwen3", tmp_path, pool="last"))


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3n_text", "gemma4_text", "qwen3_moe", "mimo_v2_flash", "qwen3_next", "lfm2", "lfm3"),
        "granitemoehybrid",
    ],
)
def test_the_memory_of_a_step_is_that_of_the_compiled_one(family: str, kv_type: str, checkpoint: Checkpoint) -> None:
    model = load(checkpoint(family), collective=Solo(), kv_type=kv_type)
    assert isinstance(model, NativeModel) and isinstance(model.cache_layout, CacheLayout)
    plan = Plan(model.module, model.cache_layout)
    for tokens, rows, longest in ((1, 1, 16), (40, 3, 100), (300, 256, 500)):
        spans, slabs = (Span * 1)(Span(first=0, count=tokens, offset=longest - tokens)), (Slab * 4)()
        batch = Batch(
            spans=ctypes.addressof(spans),
            span_count=1,
            slabs=ctypes.addressof(slabs),
            tokens=tokens,
            sampled_count=rows,
        )
        compiled = plan.threads.library.furrow_step_room(
            plan.threads.address, ctypes.addressof(plan.model), ctypes.addressof(batch)
        )
        lanes = panel_outputs() // 2
        sizes = tokens, rows, longest, plan.threads.count, False, lanes
        assert scratch_bytes(model.module, model.cache_layout, *sizes) == compiled


def test_a_model_of_torch_is_estimated_within_15_percent(checkpoint: Checkpoint) -> None:
    for family in ("llama", "qwen3_moe", "qwen3_next"):
        weights, kv = measured(checkpoint(family), dtype="float64")
        need = rank_need(inspect(checkpoint(family)), dtype="float64", kv_tokens=TOKENS)
        assert not need.exact and need.kv == kv
        assert weights <= need.weights <= 1.15 * weights
    assert torch.get_num_threads() == 1


def test_kv_memory_of_a_model_that_torch_computes_is_counted(tmp_path: Path) -> None:
    """Heads of other widths than C++ takes."""
    folder = models.make("llama", tmp_path, head_dim=12)
    model = load(folder, collective=Solo())
    need = rank_need(inspect(folder), kv_tokens=TOKENS)
    assert isinstance(model.cache_layout, CacheLayout) and not model.is_native
    assert need.kv == TOKENS * model.cache_layout.bytes_per_token


def test_no_kv_tokens_are_one_context(checkpoint: Checkpoint) -> None:
    files = inspect(checkpoint("llama"))
    assert rank_need(files).kv_tokens == 512
    assert rank_need(files, max_context=64).kv_tokens == 64
    assert rank_need(files, kv_tokens=1000, max_context=64).kv_tokens == 1000


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize(("tp", "units"), [(2, 4), (3, 4)])
def test_a_rank_with_uneven_shares_takes_no_more_than_its_units(
    quant: str | None, tp: int, units: int, tmp_path: Path
) -> None:
    """Wherever they begin; weights and KV memory of the largest are exact."""
    folder = models.make("qwen3", tmp_path / "m", num_key_value_heads=4, num_attention_heads=12, intermediate_size=100)
    spec = ModelSpec(name="m", source="/m", tp=tp, quant=quant, kv_tokens=TOKENS)
    need = uneven_need_of(spec, inspect(folder))
    assert need.units == units and len(need.unit_ranks) == units - tp + 1 and len(need.ranks) == tp
    for rank, shares in enumerate(([2, 1, 1], [1, 2, 1], [1, 1, 2]) if tp == 3 else ([3, 1], [1, 3])):
        group: Any = Membership(rank, tp)
        model = load(folder, collective=group, quant=quant, kv_type=spec.kv_type, shares=shares)
        assert isinstance(model.cache_layout, CacheLayout)
        known = need.with_units(shares[rank])
        assert known is not None and known.kv == TOKENS * model.cache_layout.bytes_per_token
        assert model.weight_bytes <= known.weights <= model.weight_bytes * 1.05


def test_models_whose_ranks_have_even_shares_have_no_units(tmp_path: Path) -> None:
    """Their ranks sum norms, or there are too few key-value heads."""
    for family, heads in (("olmo2", 4), ("llama", 2)):
        folder = models.make(family, tmp_path / family, num_key_value_heads=heads, num_attention_heads=2 * heads)
        assert uneven_need_of(ModelSpec(name="m", source="/m", tp=2), inspect(folder)).unit_ranks == []


@pytest.mark.parametrize(
    ("devices", "on_gpus"), [([], True), (["cuda:1"], True), (["cpu"], False)], ids=["any", "named", "cpu"]
)
def test_a_model_has_a_need_on_gpus_where_it_may_be_on_one(
    checkpoint: Checkpoint, devices: list[str], on_gpus: bool
) -> None:
    """An estimate, with what the process of a GPU takes there; the KV memory is counted."""
    spec = ModelSpec(name="m", source="/m", devices=devices, kv_tokens=TOKENS)
    need = need_of(spec, inspect(checkpoint("llama")))
    assert bool(need.gpu_ranks) == on_gpus and need.ranks[0].exact == (devices != ["cuda:1"])
    for rank in need.gpu_ranks:
        assert not rank.exact and rank.process == GPU_PROCESS_BYTES and rank.step >= GPU_STEP_BYTES
        assert rank.kv == TOKENS * rank.bytes_per_token > 0 and need.rank_on(0, "cuda:0") == rank
    assert on_gpus or need.rank_on(0, "cuda:0") is None
