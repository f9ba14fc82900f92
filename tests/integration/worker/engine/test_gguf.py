"""GGUF models compute as transformers does: on the numbers that their weights are."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from control.errors import ModelFilesError
from tests import gguf_models, models
from tests.integration.worker.engine.parity import assert_identical, mixed, prompt, reference, solo
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.native.linear import PackedLinear
from worker.native.library import load_library
from worker.repository.gguf.configuration import configuration
from worker.repository.gguf.gate import check_tensors
from worker.weights.gguf import read_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
COHERE2_REST = ["full_attention", "sliding_attention"]
WIDE_HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
"""Two ranks have a block of each tile of value heads."""
EXPERTS_OF_96 = {"moe_intermediate_size": 96}
WIDE_LATENT = {
    "moe_intermediate_size": 96,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
MODELS: dict[str, tuple[list[str], dict[str, object]]] = {
    "llama": (["q8_0", "f16", "q4_0", "bf16"], {"rope_parameters": LLAMA3, "head_dim": 64, "hidden_size": 128}),
    "qwen2": (["q5_1", "q8_0"], {"tie_word_embeddings": False}),
    "qwen3": (["q8_0", "q4_1", "q5_0"], {}),
    "qwen3_moe": (["f16", "q8_0"], {"mlp_only_layers": [], "moe_intermediate_size": 96}),
    "gpt_oss": (["mxfp4", "q8_0"], {"swiglu_limit": 7.0}),
    "gemma3_text": (
        ["q6_k", "iq4_xs", "q4_k", "iq3_s", "q3_k", "tq2_0"],
        {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 6},
    ),
    "qwen3_5_text": (["q8_0", "q4_0", "f16"], WIDE_HEADS),
    "qwen3_5_moe_text": (
        ["q8_0", "q5_1"],
        {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, **WIDE_HEADS},
    ),
    "qwen3_next": (
        ["q8_0", "q5_1"],
        {
            "mlp_only_layers": [],
            "moe_intermediate_size": 96,
            "shared_expert_intermediate_size": 96,
            "linear_num_value_heads": 8,
            **WIDE_HEADS,
        },
    ),
    "arcee": (["q8_0", "iq4_nl"], {}),
    "ernie4_5": (["q8_0", "q4_0"], {}),
    "hunyuan_v1_dense": (["q5_1", "q8_0"], {}),
    "seed_oss": (["q8_0", "q4_1"], {"attention_out_bias": False}),
    "smollm3": (["q8_0", "q5_0"], {"num_hidden_layers": 5, "no_rope_layers": None, "no_rope_layer_interval": 4}),
    "olmo2": (["q8_0", "q4_0"], {}),
    "exaone4": (["q8_0", "q5_1"], {}),
    "gemma": (["q8_0", "q4_1"], {}),
    "gemma2": (["q8_0", "q5_0"], {"query_pre_attn_scalar": 16}),
    "granite": (["q8_0", "f16"], {}),
    "cohere": (["q8_0", "q4_0"], {}),
    "cohere2": (["q8_0", "q4_1"], {"num_hidden_layers": 5, "layer_types": [*["sliding_attention"] * 3, *COHERE2_REST]}),
    "glm4": (["q8_0", "q5_0"], {}),
    "phi3": (["q8_0", "q5_1"], {}),
    "starcoder2": (["q8_0", "q4_0"], {"sliding_window": None}),
    "deepseek_v3": (
        ["q8_0", "q5_0"],
        {
            **WIDE_LATENT,
            "rope_parameters": {**models.YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "falcon_h1": (
        ["q8_0", "q5_0"],
        {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "ssm_multipliers": None,
            "mlp_multipliers": None,
            **dict.fromkeys(("lm_head_multiplier", "embedding_multiplier", "key_multiplier"), 1.0),
            **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
            **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
        },
    ),
    "granitemoehybrid": (["q8_0", "q5_0"], {"shared_intermediate_size": 96, "mamba_n_groups": 2}),
    "nemotron_h": (
        ["q8_0", "f16"],
        {
            **EXPERTS_OF_96,
            "moe_shared_expert_intermediate_size": 96,
            "num_experts_per_tok": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        },
    ),
    "llama4_text": (
        ["q8_0", "q4_0"],
        {
            "intermediate_size_mlp": 96,
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "apertus": (["q8_0", "q5_0"], {}),
    "gemma4_text": (["q8_0", "q4_0"], {"moe_intermediate_size": 96, "hidden_size_per_layer_input": 32}),
    "lfm2": (["q8_0", "q4_0"], {"conv_bias": False, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (
        ["q8_0", "q5_0"],
        {**EXPERTS_OF_96, "conv_bias": False, "tie_word_embeddings": True, "routed_scaling_factor": 1.0},
    ),
    "phi": (["q8_0", "q4_1"], {"qk_layernorm": False, "num_key_value_heads": 4}),
    "dots1": (["q8_0", "q4_0"], {**EXPERTS_OF_96, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ernie4_5_moe": (["q8_0", "q5_0"], {**EXPERTS_OF_96, "use_bias": False, "moe_layer_end_index": 3}),
    "exaone_moe": (["q8_0", "q4_1"], EXPERTS_OF_96),
    "glm4_moe": (["q8_0", "q5_1"], EXPERTS_OF_96),
    "glm4_moe_lite": (["q8_0", "f16"], {**WIDE_LATENT, "q_lora_rank": None}),
    "granitemoe": (["q8_0", "f16"], {}),
    "hunyuan_v1_moe": (
        ["q8_0", "q4_0"],
        {"moe_intermediate_size": [96] * 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "minimax_m2": (["q8_0", "q4_0"], {}),
    "ministral3": (["q8_0", "q4_1"], {}),
    "mixtral": (["q8_0", "q5_0"], {"sliding_window": None}),
    "qwen2_moe": (
        ["q8_0", "q4_0"],
        {"mlp_only_layers": [], "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
    ),
}
"""Types and shape by family; the sixth layer of a gemma3 is the first that attends to all positions."""


@cache
def made(family: str, folder: Path) -> tuple[Path, Path]:
    kinds, changes = MODELS[family]
    inner = 256 if family == "gemma3_text" else 96
    if family == "gemma3_text":
        changes = changes | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "query_pre_attn_scalar": 64}
    return gguf_models.make(family, folder, kinds, **({"intermediate_size": inner} | changes))


@cache
def tame(family: str, folder: Path) -> tuple[Path, Path]:
    """Weights of a trained model's scale: those of the parity tests make another answer of any rounding. Feed-forward
    widths have three blocks, so that two ranks' shares differ."""
    kinds, changes = MODELS[family]
    wide = (
        {"intermediate_size": 768, "num_attention_heads": 8} if family == "gemma3_text" else {"intermediate_size": 96}
    )
    if family == "gemma3_text":
        wide |= {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "query_pre_attn_scalar": 64}
    quiet = {"initializer_range": 0.05, "norm_noise": 0.1}
    return gguf_models.make(family, folder, kinds, size=0.3, **(wide | changes | quiet))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.parametrize("family", sorted(MODELS))
def test_dequantised_tokens_equal_those_of_generate(family: str, folder: Path) -> None:
    """Greedy float64 tokens, alone in chunks of 8, 16 and whole, and in a mixed batch."""
    file, plain = made(family, folder / family)
    model = load(file, collective=Solo(), dtype="float64", dequantize=True)
    engine = Engine(model, SlabStore(model.cache_layout, 4096), Solo())
    for jobs in [*(solo(37, chunk) for chunk in (8, 16, 512)), mixed()]:
        assert_identical(plain, jobs, play(engine, write(jobs)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", sorted(MODELS.keys() - {"qwen2", "qwen3_5_moe_text"}))  # each is like another one
def test_two_ranks_equal_generate(family: str, folder: Path, ranks: RankGroup) -> None:
    file, plain = made(family, folder / family)
    ranks.form(2)
    ranks.ask("load", file, "float64", None, True)
    jobs = mixed()
    first, second = ranks.ask("play", write(jobs))
    assert_identical(plain, jobs, first)
    assert second.tokens == first.tokens


def test_gpt_oss_turns_as_its_folder_says(tmp_path: Path) -> None:
    """The borders between scaled and unscaled frequencies are not rounded, as `truncate` of published folders says and
    files do not. The control: rounded ones, as llama.cpp has them, give other logits."""
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    changes: dict[str, Any] = {"head_dim": 64, "swiglu_limit": 7.0, "rope_parameters": rope}
    changes["max_position_embeddings"] = 131072
    file, plain = gguf_models.make("gpt_oss", tmp_path, ["f32"], intermediate_size=96, **changes)
    job = Job(sid=1, prompt=prompt(200), chunk=512, new=4)
    model = load(file, collective=Solo(), dtype="float32")
    outcome = play(Engine(model, SlabStore(model.cache_layout, 4096), Solo()), write([job]))
    tokens = torch.tensor([job.prompt + outcome.tokens[1][:-1]])
    ours = torch.stack(outcome.logits[1])

    def theirs(folder: Path) -> torch.Tensor:
        with torch.no_grad():
            return reference(folder, torch.float32)(tokens).logits[0, len(job.prompt) - 1 :]

    assert (ours - theirs(plain)).abs().max() < 1e-4
    rounded = shutil.copytree(plain, tmp_path / "rounded")
    config = (plain / "config.json").read_text()
    (rounded / "config.json").write_text(config.replace('"truncate": false', '"truncate": true'))
    assert (ours - theirs(rounded)).abs().max() > 1e-2


def cosine(plain: Path, outcome: Any) -> float:
    """Of the logits of all sampled positions, with those of transformers on the tokens that were chosen."""
    pairs: list[tuple[Any, Any]] = []
    for job in mixed():
        tokens = outcome.tokens[job.sid]
        with torch.no_grad():
            whole = reference(plain, torch.float32)(torch.tensor([job.prompt + tokens[:-1]])).logits[0]
        pairs.append((torch.stack(outcome.logits[job.sid]), whole[len(job.prompt) - 1 :]))
    ours, theirs = (torch.cat(side).flatten() for side in zip(*pairs, strict=True))
    return float(functional.cosine_similarity(ours, theirs, dim=0))


@pytest.fixture
def compiled() -> None:
    if load_library() is None:
        pytest.skip("no C++ compiler: blocks are computed in C++ only")


@pytest.mark.parametrize("family", sorted(MODELS))
def test_packed_weights_are_near_the_dequantised_ones(family: str, folder: Path, compiled: None) -> None:
    """Blocks stay blocks, embedding and head included, and the logits point where transformers' do."""
    file, plain = tame(family, folder / f"tame-{family}")
    model = load(file, collective=Solo())
    outcome = play(Engine(model, SlabStore(model.cache_layout, 4096), Solo()), write(mixed()))
    assert cosine(plain, outcome) >= 0.999
    plain_bytes = load(file, collective=Solo(), dequantize=True).weight_bytes
    assert model.weight_bytes < 0.95 * plain_bytes and any(isinstance(part, PackedLinear) for part in model.parts())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", sorted(MODELS))
def test_two_ranks_share_packed_weights(family: str, folder: Path, ranks: RankGroup, compiled: None) -> None:
    file, plain = tame(family, folder / f"tame-{family}")
    ranks.form(2)
    shares = ranks.ask("load", file, "float32")
    assert max(shares) > 1.05 * min(shares)  # one and two blocks of the feed-forward widths
    first, second = ranks.ask("play", write(mixed()))
    assert cosine(plain, first) >= 0.999
    assert second.tokens == first.tokens


def test_experts_with_fused_gates_are_checked(folder: Path) -> None:
    """The tests of qwen3next are about gates that are one tensor with their neighbours; its shape is checked."""
    model = read_model(made("qwen3_next", folder / "qwen3_next")[0])
    assert "blk.0.ffn_gate_up_exps.weight" in model.tensors and "blk.0.ffn_gate_exps.weight" not in model.tensors
    config = configuration(model)
    check_tensors(model, config)
    with pytest.raises(ModelFilesError, match=r"tensor blk\.0\.ffn_gate_up_exps\.weight has the shape \(8, 192, 64\)"):
        check_tensors(model, config | {"moe_intermediate_size": 64})


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_plain_numbers_of_recurrent_layers_are_those_of_safetensors(
    family: str, tmp_path: Path, compiled: None
) -> None:
    """In C++, where three value heads share a key head: the file has them in another order, and sums of the output
    projection with them. A decay above 0 is refused."""
    shape: dict[str, Any] = {"linear_num_value_heads": 6, "initializer_range": 0.1}
    if family == "qwen3_next":
        shape["mlp_only_layers"] = []
    file, plain = gguf_models.make(family, tmp_path, ["f32"], **shape)
    ours, theirs = (
        play(Engine(model, SlabStore(model.cache_layout, 4096), Solo()), write(solo(37, 16)))
        for model in (load(file, collective=Solo()), load(plain, collective=Solo()))
    )
    assert ours.tokens == theirs.tokens
    assert max(float((one - two).abs().max()) for one, two in zip(ours.logits[1], theirs.logits[1], strict=True)) < 1e-4
    content = bytearray(file.read_bytes())
    place = next(one.start for name, one in read_model(file).tensors.items() if name == "blk.0.ssm_a")
    content[place : place + 4] = bytes.fromhex("0000803f")
    file.write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"blk\.0\.ssm_a has the value 1; a decay is 0 or less"):
        load(file, collective=Solo())
