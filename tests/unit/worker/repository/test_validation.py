"""Models are refused from config.json alone; and the messages."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2Model

from control.errors import ModelFilesError, SettingsError, UnsupportedArchitecture
from worker.families.recurrence import feed_forward_width
from worker.repository import validation
from worker.selftest import shapes

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_divides_is_accepted(tp: int) -> None:
    """Key-value heads are repeated where there are fewer than ranks; widths and vocabulary need not divide."""
    validation.check(LLAMA, tp)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"model_type": "gpt9"}, 1, "'gpt9' is not supported: its positions are no rotary.* types: .*qwen3_moe"),
        ({"model_type": "gpt9", "rope_theta": 1e4}, 1, "'gpt9' is not supported: no record describes its layers"),
        ({"model_type": "youtu", "kv_lora_rank": 8}, 1, "compressed keys and values .*--engine vllm"),
        ({"model_type": "whisper", "is_encoder_decoder": True}, 1, "an encoder reads the input"),
        ({"model_type": "zamba", "mamba_d_state": 8}, 1, "its layers keep a recurrent state"),
        ({"model_type": "bloom9", "alibi": True}, 1, "ALiBi"),
        ({"model_type": "gte", "type_vocab_size": 2}, 1, "it is no decoder"),
        (
            {"model_type": "falcon", "alibi": False},
            1,
            "'falcon' is not supported: its queries, keys and values lie by head",
        ),
        ({"model_type": "olmo", "rope_theta": 1e4}, 1, "its norms have no weights"),
        ({"model_type": "bitnet", "rope_theta": 1e4}, 1, "norms lie within its attention and feed-forward"),
        (
            {"model_type": "qwen2_vl_text", "rope_theta": 1e4},
            1,
            "it is one part of a model; give the folder of the whole",
        ),
        ({"model_type": "bert"}, 1, "Model type 'bert' is not supported: it is no decoder"),
        ({"model_type": "deepseek_v2"}, 1, "'deepseek_v2' is not supported: its attention keeps compressed .*MLA"),
        ({"model_type": "mimo_v2_flash", "per_layer_config": {"0": {"head_dim": 32}}}, 1, "not served with"),
        ({"model_type": "newer", "v_head_dim": 64}, 1, "heads of its values have another width"),
        ({"model_type": "lfm3", "layer_types": ["conv", "wide"]}, 1, "a layer of type 'wide' in layer_types"),
        ({"model_type": "lfm3", "layer_types": ["conv", "sliding_attention"]}, 1, "no layer of type full_attention"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mlp", "wide"]}, 1, "a layer of type 'wide' in layers_bl"),
        ({"model_type": "nemotron_h", "layers_block_type": None, "layer_types": ["mlp", "wide"]}, 1, "of type 'wide'"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-"}, 1, "no layer of type full_attention in layers"),
        ({"model_type": "jamba"}, 1, "'jamba' is not supported: its layers keep a recurrent state"),
        (
            {"model_type": "newer", "attention_chunk_size": 8},
            1,
            "'newer' is not supported: its attention ends at the borders",
        ),
        ({"model_type": "gemma5", "altup_num_inputs": 4}, 1, "its layers predict and correct several hidden"),
        ({"model_type": "glm_v", "vision_config": {}}, 1, "'glm_v' is not supported: of the types with images only"),
        ({}, 3, "4 attention heads can't be divided among 3 ranks. Use one of --tp 1, 2, 4"),
        ({}, 0, "must be at least 1, not 0"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            "3 key-value heads can be neither divided among 2 ranks",
        ),
        ({"num_attention_heads": 5}, 1, "5 attention heads can't share 2 key-value heads"),
        ({"intermediate_size": 3}, 4, "intermediate_size = 3 can't be divided among 4 ranks"),
        ({"quantization_config": {"quant_method": "hqq"}}, 1, "quantization_config.quant_method is 'hqq'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1, "Rotary embedding 'dynamic'"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 50.0}}, 1, "Rotary embedding 'dynamic'"),
        (
            {"model_type": "hunyuan_v1_moe", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            1,
            "Rotary embedding 'dynamic'",
        ),
        (
            {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [1, 2]},
            1,
            r"moe_topk = \[1, 2\]: layers with different numbers",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, 1, "Rotary embedding 'longrope'"),
        ({"use_bidirectional_attention": True}, 1, "encoder"),
    ],
)
def test_an_unservable_model_is_refused_by_type_or_number(changes: dict[str, Any], tp: int, message: str) -> None:
    """Each refusal names the type or the number, and the remedy where there is one."""
    with pytest.raises(UnsupportedArchitecture, match=message):
        validation.check(LLAMA | changes, tp)


RECURRENT = LLAMA | {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
QUANTIZED_EXPERTS: dict[str, Any] = {
    "model_type": "gemma4_text",
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("changes", "tp", "kind", "message"),
    [
        (
            {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
            2,
            UnsupportedArchitecture,
            "3 key heads of .*--tp 1, 3",
        ),
        ({"linear_num_value_heads": 24}, 1, UnsupportedArchitecture, "24 value heads .* can't share 16 key heads"),
        ({"layer_types": ["linear_attention"] * 4}, 1, UnsupportedArchitecture, "no layer of type full_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, 1, UnsupportedArchitecture, "'sliding_attention' in layer_types"),
        ({"layer_types": ["full_attention"]}, 1, ModelFilesError, "a list of num_hidden_layers = 4 kinds"),
        ({"linear_conv_kernel_dim": 1}, 1, ModelFilesError, "linear_conv_kernel_dim = 1; at least 2"),
        ({"linear_key_head_dim": -1}, 1, ModelFilesError, "linear_key_head_dim = -1"),
        ({"full_attention_interval": "4"}, 1, ModelFilesError, "full_attention_interval = 4; a whole number"),
        ({"linear_value_head_dim": 2**20, "linear_num_value_heads": 2**12}, 1, ModelFilesError, "inner channels; at"),
        ({"hidden_act": "gelu"}, 1, UnsupportedArchitecture, "hidden_act = 'gelu'"),
        (QUANTIZED_EXPERTS, 1, UnsupportedArchitecture, "'gemma4_text' quantized as fp8 is not"),
    ],
)
def test_recurrent_layers_that_can_not_be_served(
    changes: dict[str, Any], tp: int, kind: type[Exception], message: str
) -> None:
    """Heads that ranks can't divide, layers of another kind and sizes that are none are refused by name."""
    validation.check(RECURRENT, 2)
    with pytest.raises(kind, match=message):
        validation.check(RECURRENT | changes, tp)


LFM2 = LLAMA | {"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [1]}


@pytest.mark.parametrize(
    ("changes", "tp", "kind", "message"),
    [
        ({"hidden_size": 63}, 2, UnsupportedArchitecture, "63 channels .*hidden_size.* can't be divided among 2"),
        ({"hidden_size": 715827881}, 2, UnsupportedArchitecture, "715827881 channels .*Use one of --tp 1"),
        ({"hidden_size": 2**31 - 1}, 1, ModelFilesError, "6442450941 inner channels; at most 2147483647"),
        (
            {"intermediate_size": 2**31 - 1, "block_multiple_of": 2**31 - 3, "block_ffn_dim_multiplier": 1.5},
            1,
            ModelFilesError,
            "intermediate_size for a width of 4294967290",
        ),
        ({"full_attn_idxs": []}, 1, UnsupportedArchitecture, "no layer of type full_attention"),
        ({"full_attn_idxs": [4]}, 1, ModelFilesError, r"full_attn_idxs = \[4\]; a list of layers below"),
        ({"full_attn_idxs": 1}, 1, ModelFilesError, "full_attn_idxs = 1"),
        ({"layer_types": ["conv"] * 4}, 1, UnsupportedArchitecture, "no layer of type full_attention"),
        ({"layer_types": ["linear_attention"] * 4}, 1, UnsupportedArchitecture, "Served are conv and full_attention"),
        ({"layer_types": ["conv"]}, 1, ModelFilesError, "a list of num_hidden_layers = 4 kinds"),
        ({"conv_L_cache": 1}, 1, ModelFilesError, "conv_L_cache = 1; at least 2"),
        ({"conv_L_cache": 2**40}, 1, ModelFilesError, "conv_L_cache = 1099511627776"),
        ({"conv_bias": "no"}, 1, ModelFilesError, "conv_bias = no; true or false"),
        ({"conv_dim": 7}, 1, UnsupportedArchitecture, "conv_dim = 7"),
        ({"head_dim": None}, 1, ModelFilesError, "head_dim = None"),
        ({"norm_eps": "x"}, 1, ModelFilesError, "norm_eps = 'x'"),
        ({"block_ff_dim": 0}, 1, ModelFilesError, "block_ff_dim = 0"),
        ({"block_multiple_of": 0}, 1, ModelFilesError, "block_multiple_of = 0"),
        ({"block_ffn_dim_multiplier": float("nan")}, 1, ModelFilesError, "block_ffn_dim_multiplier = nan"),
        ({"block_ffn_dim_multiplier": 10**400}, 1, ModelFilesError, "a width of at most"),
        ({"block_auto_adjust_ff_dim": 1}, 1, ModelFilesError, "block_auto_adjust_ff_dim = 1"),
        ({"block_ffn_dim_multiplier": None}, 1, ModelFilesError, "block_ffn_dim_multiplier = None"),
        ({"intermediate_size": 1}, 1, ModelFilesError, "a width of at least 1"),
    ],
)
def test_short_convolutions_that_can_not_be_served(
    changes: dict[str, Any], tp: int, kind: type[Exception], message: str
) -> None:
    """Fields of lfm2 that are none, or that no model has, are refused by name."""
    validation.check(LFM2, 2)
    with pytest.raises(kind, match=message):
        validation.check(LFM2 | changes, tp)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"]}, "a list of num_hidden_layers = 4 kinds"),
        ({"sliding_window": None, "num_hidden_layers": 5}, "sliding_window = None; a width is needed"),
        ({"conv_L_cache": 1}, "conv_L_cache = 1; at least 2"),
        ({"conv_bias": "no"}, "conv_bias = no; true or false"),
        ({"use_attention_gate": "no"}, "use_attention_gate = 'no'; true or false"),
    ],
)
def test_layers_of_lfm3_that_can_not_be_served(changes: dict[str, Any], message: str) -> None:
    whole = LLAMA | {"model_type": "lfm3", "num_hidden_layers": 4}
    validation.check(whole, 2)
    with pytest.raises(ModelFilesError, match=message):
        validation.check(whole | changes, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_auto_adjust_ff_dim": False},
        {"block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.0},
        {"intermediate_size": 1000, "block_multiple_of": 48, "block_ffn_dim_multiplier": 1.3},
    ],
)
def test_the_layers_of_lfm2(changes: dict[str, Any]) -> None:
    """The layers with attention, and the feed-forward width, are those of transformers' class."""
    config = LFM2 | changes
    kept = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        layers = Lfm2Model(Lfm2Config(**kept)).layers
    recurrence = validation.recurrence(config)
    assert recurrence is not None
    assert [kind == "full_attention" for kind in recurrence.kinds] == [hasattr(layer, "self_attn") for layer in layers]
    width = layers[0].feed_forward.w1.out_features
    assert feed_forward_width(config) == width == shapes.of_config(config, "float32").inner


GRANITE = LLAMA | {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "position_embedding_type": "nope",
}


@pytest.mark.parametrize(
    ("changes", "tp", "kind", "message"),
    [
        ({"mamba_n_heads": 1}, 2, UnsupportedArchitecture, r"1 heads of Mamba layers \(mamba_n_heads\) can't .*--tp 1"),
        (
            {"mamba_n_heads": 12, "mamba_n_groups": 3, "hidden_size": 96},
            2,
            UnsupportedArchitecture,
            "3 groups of .*--tp 1, 3",
        ),
        ({"mamba_n_groups": 3}, 1, UnsupportedArchitecture, "4 heads of Mamba layers can't share 3 groups"),
        ({"mamba_d_conv": 1}, 1, ModelFilesError, "mamba_d_conv = 1; at least 2"),
        ({"mamba_d_head": 7}, 1, ModelFilesError, "mamba_d_head = 7; their product must be .* = "),
        ({"mamba_d_state": 0}, 1, ModelFilesError, "mamba_d_state = 0; a whole number"),
        ({"mamba_expand": 2**20, "hidden_size": 2**30}, 1, ModelFilesError, "inner channels; at most 2147483647"),
        ({"mamba_expand": None}, 1, ModelFilesError, "mamba_expand = null; remove the field"),
        ({"logits_scaling": None}, 1, ModelFilesError, "logits_scaling = null"),
        ({"logits_scaling": 0}, 1, ModelFilesError, "logits_scaling = 0; a number above 0"),
        ({"hidden_act": "gelu"}, 1, UnsupportedArchitecture, "hidden_act = 'gelu'"),
        ({"position_embedding_type": "alibi"}, 1, UnsupportedArchitecture, "'alibi'; served are 'nope' and 'rope'"),
        ({"time_step_limit": [0.001, 0.1]}, 1, UnsupportedArchitecture, r"time_step_limit = \[0\.001, 0\.1\]"),
        ({"mamba_conv_bias": 1}, 1, ModelFilesError, "mamba_conv_bias = 1; true or false"),
        ({"layers_block_type": ["mamba"]}, 1, UnsupportedArchitecture, "Rename the field to layer_types"),
        ({"layer_types": ["mamba"] * 2}, 1, UnsupportedArchitecture, "no layer of type attention"),
        ({"layer_types": ["mamba", "x"]}, 1, UnsupportedArchitecture, "type 'x' .*Served are mamba and attention"),
        ({"layer_types": None}, 1, ModelFilesError, "layer_types = None; a list"),
        ({"num_local_experts": -1}, 1, ModelFilesError, "num_local_experts = -1"),
        ({"shared_intermediate_size": 1}, 2, UnsupportedArchitecture, "shared_intermediate_size = 1 can't be divided"),
        ({"quantization_config": {"quant_method": "fp8"}}, 1, UnsupportedArchitecture, "quantized as fp8 is not"),
    ],
)
def test_mamba_layers_that_can_not_be_served(
    changes: dict[str, Any], tp: int, kind: type[Exception], message: str
) -> None:
    """Heads and groups that ranks can't divide, sizes that don't fit and other forms are refused by name."""
    validation.check(GRANITE | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}, 2)
    with pytest.raises(kind, match=message):
        validation.check(GRANITE | changes, tp)


def test_the_forms_of_granite() -> None:
    """Layers have the names of published files or transformers' own; a model may have no experts, or no Mamba layer."""
    for names in (["mamba", "attention"], ["linear_attention", "full_attention"]):
        recurrence = validation.recurrence(GRANITE | {"layer_types": names})
        assert recurrence is not None and recurrence.kinds == ("linear_attention", "full_attention")
    dense = GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": ["attention"] * 2}
    validation.check(dense, 2)
    assert validation.recurrence(dense) is None


def test_recurrent_layers_on_a_gpu() -> None:
    """They are refused with the remedy; models of attention are not."""
    validation.check_devices(LLAMA, ["cuda:0"])
    validation.check_devices(RECURRENT, ["cpu", "cpu:1"])
    with pytest.raises(
        SettingsError, match=r"'qwen3_5_text' is one with recurrent .* not on cuda:0\. Use --devices cpu"
    ):
        validation.check_devices(RECURRENT, ["cuda:0"])
    with pytest.raises(SettingsError, match=r"'llama4_text' has attention within chunks, which .* not on cuda:1"):
        validation.check_devices({"model_type": "llama4_text"}, ["cpu", "cuda:1"])
    with pytest.raises(SettingsError, match=r"'granitemoehybrid' is .*: all its models are served on CPUs only"):
        validation.check_devices(GRANITE | {"layer_types": ["attention"] * 2}, ["cuda:0"])


def test_the_layers_of_a_configuration_without_their_kinds() -> None:
    """Every fourth layer attends, or one in as many as full_attention_interval says."""
    recurrence = validation.recurrence(RECURRENT)
    assert recurrence is not None and recurrence.kinds == ("linear_attention",) * 3 + ("full_attention",)
    recurrence = validation.recurrence(RECURRENT | {"full_attention_interval": 2})
    assert recurrence is not None and recurrence.kinds == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mimo_v2_flash", "sliding_window": 0}, "sliding_window = 0; a width"),
        (
            {"model_type": "lfm3", "layer_types": ["conv", "full_attention"], "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters of the kinds full_attention and sliding_attention of layers",
        ),
        (
            {"model_type": "mimo_v2_flash", "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "an object with rope_theta",
        ),
        (
            {"model_type": "mimo_v2_flash", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling = .*rope_parameters of the kinds",
        ),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}}, "full_attention = 3; an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0, "high_freq_factor": 4.0}},
            "low_freq_factor = 0; a number above 0",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1}},
            "rope_theta = 1; a number other than 1",
        ),
        ({"hidden_act": ["silu"]}, r"hidden_act = \['silu'\]; a text"),
    ],
)
def test_damaged_windows_and_rotary_parameters_are_refused(changes: dict[str, Any], message: str) -> None:
    """None of them ends in another error, or in frequencies and windows that the model does not have."""
    with pytest.raises(ModelFilesError, match=message):
        validation.check(LLAMA | changes, 1)


@pytest.mark.parametrize("value", [None, 0, "4", 2.0, True])
def test_a_number_that_is_none(value: object) -> None:
    """A missing or nonsensical number names itself and its value."""
    with pytest.raises(ModelFilesError, match="num_attention_heads = "):
        validation.check(LLAMA | {"num_attention_heads": value}, 1)


def test_a_context_beyond_the_models_own() -> None:
    """It is refused with both numbers, and never silently cut; what the model can do passes."""
    own = validation.context_length(LLAMA)
    validation.check(LLAMA, 1, max_context=own)
    with pytest.raises(ModelFilesError, match=f"--max-context {own + 1} is more than the model's {own}"):
        validation.check(LLAMA, 1, max_context=own + 1)


def test_silent_configurations_use_the_familys_default() -> None:
    """Without num_key_value_heads llama has as many as query heads, mistral transformers' own eight."""
    silent = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert validation.kv_heads(silent) == 4
    assert validation.kv_heads(silent | {"model_type": "mistral"}) == 8


def test_every_end_of_sequence_id_counts() -> None:
    """Every end-of-sequence id counts, generation_config.json's before config.json's."""
    assert validation.eos_ids({"eos_token_id": 1}, {"eos_token_id": [2, 3]}) == [2, 3]
    assert validation.eos_ids({"eos_token_id": 1}, {}) == [1]
    assert validation.eos_ids({}, {}) == []
    assert validation.context_length(LLAMA) == 512


def test_gates_need_no_torch() -> None:
    """The agent decides without torch: neither it nor transformers nor the hub's client is imported."""
    script = (
        "import sys, worker.repository.validation, worker.repository.source; "
        "print(*sorted({'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
