"""`int8` and `f16` models stay near float32: on one rank and two, in less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from control.errors import SettingsError
from ops.demo import MODEL_DIR
from tests import models
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.stepping import tensor_of
from training.batches import conversation_pieces
from training.tasks.tasks import held_out
from worker.collective import Solo
from worker.engine.step import Engine
from worker.families.registry import FAMILIES
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.served import Row, ServedModel, flatten
from worker.native.host import SWITCH
from worker.native.library import load_library

Checkpoint = Callable[[str], Path]

CHANGES = {
    "gpt_oss": {"num_experts_per_tok": 4},
    "qwen3_5_moe_text": {"num_experts_per_tok": 8},
    "qwen3_next": {"num_experts_per_tok": 8},
}
"""All experts, where a rounding would send some tokens to another one. The last two have cosines of 0.9996 then; with
two of eight experts the mean is 0.9980 and 0.9987 and the median 0.9996: the few tokens that another expert takes."""

QUANTS = ["f16", "int8"]
compiled = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")
LOOSER = {"gemma4_text": 0.004}
"""Types whose bounds are lower by so much. A random model of Gemma 4, of five layers with experts and an input for each
layer, adds three times as many normed vectors as others, and rounding turns each. Without both its cosine is 0.9992."""
JOBS = [Job(1, list(range(20)), 8, 10), Job(2, list(range(40, 45)), 8, 10, start=3)]


@pytest.fixture(scope="session")
def tame(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A family's random checkpoint with weights of a trained model's scale (0.02 at a width of 1,024).

    Those of the parity tests are far larger, and make another answer of any rounding.
    """
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(f"tame-{family}")
            made[family] = models.make(
                family, folder, initializer_range=0.05, norm_noise=0.1, **CHANGES.get(family, {})
            )
        return made[family]

    return of


def logits_of(model: ServedModel, prompts: list[list[int]]) -> Tensor:
    """(all tokens, vocabulary): the logits of every position of the prompts, in one batch."""
    rows = [Row(sid, tokens, 0, True) for sid, tokens in enumerate(prompts)]
    store = SlabStore(model.cache_layout, sum(map(len, prompts)))
    batch = flatten(rows, store.begin([row.extent for row in rows]))
    every = type(batch)(batch.tokens, batch.positions, np.arange(len(batch.tokens)), batch.cache)
    return tensor_of(model.forward(every))


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 128, (count, length), generator=generator).tolist()


@functools.cache
def exact_logits(folder: Path) -> Tensor:
    """The float32 logits of the prompts with which packings are compared."""
    return logits_of(load(folder, collective=Solo(), dtype="float32"), prompts(4, 24))


@compiled
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_point_the_same_way(family: str, quant: str, tame: Checkpoint) -> None:
    """The cosine between packed and float32 logits is at least 0.999 in each family."""
    folder, own_prompts = tame(family), prompts(4, 24)
    packed = logits_of(load(folder, collective=Solo(), quant=quant), own_prompts)
    cosine = functional.cosine_similarity(exact_logits(folder), packed, dim=-1).mean()
    assert cosine >= 0.999 - (LOOSER.get(family, 0) if quant != "f16" else 0)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "llama"])
def test_float32_from_sixteen_bits(family: str, tmp_path: Path) -> None:
    """Float32 logits of a bfloat16 checkpoint, packed and its embedding still in 16 bits, are those of transformers."""
    folder, own_prompts = models.make(family, tmp_path), prompts(1, 24)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention)
    with torch.no_grad():
        expected = reference(torch.tensor(own_prompts)).logits[0]
    model = load(folder, collective=Solo())
    assert (logits_of(model, own_prompts) - expected).abs().max() < 1e-4


def held_out_texts(per_task: int) -> list[list[int]]:
    """Conversations that the demonstration model never saw, `per_task` of each kind, at most 256 tokens of each."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    texts = ["".join(text for text, _ in conversation_pieces(one)) for one in held_out(seed=5, per_task=per_task)]
    return [tokenizer.encode(text).ids[:256] for text in texts]


def perplexity(model: ServedModel, asked: list[list[int]]) -> float:
    losses: list[Tensor] = []
    for start in range(0, len(asked), 16):
        some = asked[start : start + 16]
        for tokens, logits in zip(some, logits_of(model, some).split([len(tokens) for tokens in some]), strict=True):
            losses.append(functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none"))
    return float(torch.cat(losses).mean().exp())


@compiled
@pytest.mark.parametrize("quant", QUANTS)
def test_perplexity_of_held_out_text(quant: str) -> None:
    """The demonstration model's perplexity on conversations that it never saw moves by less than one percent."""
    texts = held_out_texts(per_task=8)
    exact = perplexity(load(MODEL_DIR, collective=Solo(), dtype="float32"), texts)
    packed = perplexity(load(MODEL_DIR, collective=Solo(), quant=quant), texts)
    assert exact > 1
    assert abs(packed / exact - 1) < 0.01


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_rms_norm_is_fused(family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """No family's norm slips through to the slower form: whichever formula it has, torch's own stands for it."""
    monkeypatch.setenv(SWITCH, "0")
    model = load(checkpoint(family), collective=Solo())
    names = [type(part).__name__ for part in model.parts() if "RMSNorm" in type(part).__name__]
    assert set(names) <= {"FusedRMSNorm"}
    assert names or family in ("cohere", "cohere2", "phi", "phimoe", "starcoder2")


@compiled
@pytest.mark.timeout(60)
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", ["qwen2", "starcoder2", "gemma2"])
def test_two_ranks_are_as_near(family: str, quant: str, tame: Checkpoint, ranks: RankGroup) -> None:
    """Two ranks, with biases, a tied head and scaled embeddings, give the logits of one to the packing's precision."""
    folder = tame(family)
    alone = load(folder, collective=Solo(), quant=quant)
    expected = play(Engine(alone, SlabStore(alone.cache_layout, 4096), Solo()), write([Job(1, list(range(30)), 8, 1)]))
    ranks.form(2)
    ranks.ask("load", folder, "auto", quant)
    first, second = ranks.ask("play", write([Job(1, list(range(30)), 8, 1)]))
    assert functional.cosine_similarity(first.logits[1][0], expected.logits[1][0], dim=0) > 0.998
    assert second.checksums == first.checksums
    assert second.collectives == first.collectives > 0


@compiled
@pytest.mark.timeout(60)
def test_a_new_group_keeps_packed_weights(checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Ranks that join another group answer as before from the weights that they packed once."""
    ranks.form(2)
    ranks.ask("load", checkpoint("llama"), "auto", "int8")
    before = ranks.ask("play", write(JOBS))
    ranks.form(2)
    after = ranks.ask("play", write(JOBS))
    assert [outcome.checksums for outcome in after] == [outcome.checksums for outcome in before]


@compiled
@pytest.mark.parametrize(("quant", "share"), [("f16", 0.5), ("int8", 0.26)])
def test_packed_weights_are_counted(quant: str, share: float, checkpoint: Checkpoint) -> None:
    """The reported size of the weights is their memory: half, or a quarter and the embedding's half."""
    folder = checkpoint("llama")
    whole = load(folder, collective=Solo(), dtype="float32").weight_bytes
    embedding = 131 * 64 * 4
    packed = load(folder, collective=Solo(), quant=quant).weight_bytes
    assert packed < share * (whole - embedding) + 0.5 * embedding + 0.05 * whole
    assert packed > share * (whole - embedding) * 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": "int4"}, "--quant int4 is unknown: use one of int8, f16, q4_0"),
        ({"quant": "int8", "dtype": "float64"}, "--quant int8 computes in float32, not in --dtype float64"),
        ({"quant": "f16", "device": "cuda:0"}, "--quant f16 is for CPUs, not for cuda:0"),
    ],
)
def test_what_packing_does_not_go_with(options: dict[str, str], message: str, checkpoint: Checkpoint) -> None:
    """Other types and devices are refused with the remedy before a weight is read."""
    with pytest.raises(SettingsError, match=message):
        load(checkpoint("llama"), collective=Solo(), **options)
