"""Weights packed into ggml's blocks stay near: to their dequantised weights, on one rank and two, alone and not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor
from torch.nn import functional

from control.errors import ModelFilesError, SettingsError
from control.quantization import BLOCK_QUANTS
from tests import models
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.test_quant import MODEL_DIR, held_out_texts, logits_of, perplexity
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.native.host import SWITCH
from worker.native.library import threads_here
from worker.tensors import as_array
from worker.weights.dequantize import dequantize
from worker.weights.formats import BLOCK_FORMATS, format_for
from worker.weights.quantizer import quantize
from worker.weights.safetensors_header import image_name
from worker.weights.stored_matrix import StoredMatrix

pytestmark = pytest.mark.skipif(threads_here() is None, reason="no compiler")

Checkpoint = Callable[[str], Path]

WIDE = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_attention_heads": 8}
HEADS = {"granitemoehybrid": {"mamba_d_head": 64}}
JOBS = [Job(1, list(range(20)), 8, 10), Job(2, list(range(40, 45)), 8, 10, start=3)]
DISTINCT = sorted({format: name for name, format in reversed(BLOCK_QUANTS.items())}.values())
"""One name for each format."""


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A family's random checkpoint with widths that blocks of 256 divide, and weights of a trained model's scale."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(f"wide-{family}")
            changes = WIDE | HEADS.get(family, {})
            made[family] = models.make(family, folder, initializer_range=0.03, norm_noise=0.1, **changes)
        return made[family]

    return of


def dequantized(folder: Path, quant: str, into: Path) -> Path:
    """The checkpoint with each matrix of its text part rounded to its blocks and back, in float32."""
    threads = threads_here()
    assert threads is not None

    def rounded(name: str, tensor: Tensor) -> Tensor:
        packed = tensor.dim() == 2 and image_name(name) is None
        chosen = format_for(BLOCK_QUANTS[quant], tensor.shape[-1]) if packed else None
        return (
            tensor.float()
            if chosen is None
            else torch.from_numpy(dequantize(StoredMatrix(chosen.name, quantize(as_array(tensor), chosen, threads))))
        )

    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (into / file.name).write_bytes(file.read_bytes())
    tensors = {name: rounded(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


def prompts(count: int, length: int) -> list[list[int]]:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(length)).tolist()


def cosine(one: Tensor, other: Tensor) -> float:
    return float(functional.cosine_similarity(one, other, dim=-1).mean())


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        *(("qwen3", quant) for quant in DISTINCT),
        ("gemma2", "q4k"),
        ("gemma2", "q5_1"),
        ("granitemoehybrid", "q4k"),
        ("lfm2", "q8_0"),
        ("starcoder2", "q4k"),
    ],
)
def test_logits_are_those_of_the_dequantized_weights(family: str, quant: str, wide: Checkpoint, tmp_path: Path) -> None:
    """With separate and tied tables, norms after sublayers, layer norms, short convolutions, Mamba layers, biases.
    The control: the weights as they were are further away."""
    folder, own_prompts = wide(family), prompts(4, 24)
    packed = logits_of(load(folder, collective=Solo(), quant=quant), own_prompts)
    near = logits_of(load(dequantized(folder, quant, tmp_path), collective=Solo(), dtype="float32"), own_prompts)
    assert cosine(packed, near) >= 0.999
    if quant in ("q2k", "q3k", "q4_0"):
        far = logits_of(load(folder, collective=Solo(), dtype="float32"), own_prompts)
        assert cosine(packed, far) < cosine(packed, near)


@pytest.mark.parametrize("quant", ["q4_0", "q4k", "q6k"])
def test_a_rows_logits_do_not_depend_on_chunks_or_company(quant: str, wide: Checkpoint) -> None:
    """Alone in one chunk, alone in chunks of 8, and among nine: the same bits."""
    model = load(wide("qwen3"), collective=Solo(), quant=quant)

    def first_logits(jobs: list[Job]) -> Tensor:
        return torch.stack(play(Engine(model, SlabStore(model.cache_layout, 8192), Solo()), write(jobs)).logits[1])

    tokens = prompts(1, 30)[0]
    whole = first_logits([Job(1, tokens, 64, 6)])
    assert torch.equal(whole, first_logits([Job(1, tokens, 8, 6)]))
    others = [Job(sid, prompts(1, 10 + sid)[0], 16, 8) for sid in range(2, 10)]
    assert torch.equal(whole, first_logits([Job(1, tokens, 16, 6), *others]))


@pytest.mark.parametrize("quant", ["q4_0", "q4k"])
@pytest.mark.parametrize("family", ["gemma2", "granitemoehybrid", "lfm2", "qwen3"])
def test_two_ranks_are_as_near(family: str, quant: str, wide: Checkpoint, ranks: RankGroup, tmp_path: Path) -> None:
    """Each rank's part of a row-parallel matrix begins at a block. A new group goes on identically."""
    folder, script = wide(family), write([Job(1, list(range(30)), 8, 1)])
    model = load(dequantized(folder, quant, tmp_path), collective=Solo(), dtype="float32")
    expected = play(Engine(model, SlabStore(model.cache_layout, 4096), Solo()), script)
    ranks.form(2)
    ranks.ask("load", folder, "auto", quant)
    first, second = ranks.ask("play", script)
    assert cosine(first.logits[1][0], expected.logits[1][0]) > 0.999
    assert second.checksums == first.checksums
    before = ranks.ask("play", write(JOBS))
    ranks.form(2)
    after = ranks.ask("play", write(JOBS))
    assert [outcome.checksums for outcome in after] == [outcome.checksums for outcome in before]


@pytest.mark.parametrize("quant", ["q4_0", "q8_0", "q2k", "q4k", "q6k"])
def test_the_size_of_the_weights_is_that_of_the_blocks(quant: str, wide: Checkpoint) -> None:
    """Tied or not, tables included, at most a tenth is added to the blocks."""
    format = BLOCK_FORMATS[BLOCK_QUANTS[quant]]
    for family in ("qwen3", "gemma2"):
        tensors = load_file(wide(family) / "model.safetensors")
        blocks = sum(one.numel() for one in tensors.values() if one.dim() == 2) // format.weights * format.bytes
        weight_bytes = load(wide(family), collective=Solo(), quant=quant).weight_bytes
        assert blocks <= weight_bytes <= 1.1 * blocks + 60_000  # panels are filled up, and norms stay in float32


def test_widths_that_blocks_do_not_divide(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Rows of 64 take blocks of 32 in place of those of 256, rows of 90 stay in 16 bits, and the log says so."""
    with capture_logs() as lines:
        packed = load(checkpoint("llama"), collective=Solo(), quant="q4k")
    rows_by_format = {
        line["kept_as"]: (line["matrices"], line["first"]) for line in lines if line.get("action") == "quantize"
    }
    assert rows_by_format == {
        "q5_0": (20, "model.embed_tokens.weight"),
        "16 bits": (3, "model.layers.0.mlp.down_proj.weight"),
    }
    near = dequantized(checkpoint("llama"), "q4k", tmp_path)
    expected = logits_of(load(near, collective=Solo(), dtype="float32"), prompts(2, 9))
    assert cosine(logits_of(packed, prompts(2, 9)), expected) > 0.99  # weights that make much of any rounding


@pytest.mark.parametrize("quant", ["q8_1", "q8k"])
def test_formats_of_activations_are_kept_as_q8_0(quant: str, checkpoint: Checkpoint) -> None:
    with capture_logs() as lines:
        load(checkpoint("llama"), collective=Solo(), quant=quant)
    assert {"quant": quant, "kept_as": "q8_0"}.items() <= next(
        line for line in lines if line.get("action") == "quantize"
    ).items()


def test_a_weight_that_is_no_number_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = dequantized(checkpoint("llama"), "q8_0", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelFilesError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight has NaN or infinity in row 3"
    ):
        load(folder, collective=Solo(), quant="q4_0")


def test_blocks_need_the_compiled_products(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(
        SettingsError, match=r"--quant q4k is computed in C\+\+ only, but FURROW_NATIVE is 0. Leave it out"
    ):
        load(checkpoint("llama"), collective=Solo(), quant="q4k")


@pytest.mark.parametrize("quant", ["q4_0", "q4k"])
def test_perplexity_beside_the_dequantised_weights(quant: str, tmp_path: Path) -> None:
    """The demonstration model's perplexity on conversations that it never saw is at most 1.005 times that of the same
    weights as plain numbers: activations of 8 bits cost no more."""
    texts = held_out_texts(per_task=4)
    packed = perplexity(load(MODEL_DIR, collective=Solo(), quant=quant), texts)
    plain = perplexity(load(dequantized(MODEL_DIR, quant, tmp_path), collective=Solo(), dtype="float32"), texts)
    assert 0.995 < packed / plain <= 1.005
