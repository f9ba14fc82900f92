"""The model types whose forward is C++.

A layer is: attention or a recurrent layer, then a feed-forward network or a mixture of them, each added to its input
and with an RMS norm before or after it. Rotary embeddings turn a head's first numbers. A layer has the projections that
the roles of its type name (repository/families.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.formats.recurrence import FULL
from worker.native.library import ALL_HEADS, EACH_HEAD, EACH_TURNED_HEAD, GELU_TANH, RELU_SQUARED, SILU

SLIDING = "sliding_attention"

Fields = Mapping[str, Any]
"""The values of a family's fields in a config.json."""
Names = tuple[str | None, str | None, str | None, str | None]

ONLY_BEFORE: Names = ("input_layernorm", None, "post_attention_layernorm", None)
ONLY_AFTER: Names = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND: Names = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
AROUND_GLM4: Names = (
    *("input_layernorm", "post_self_attn_layernorm"),
    *("post_attention_layernorm", "post_mlp_layernorm"),
)


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a model type where config.json omits its parameters."""

    theta: float = 10_000.0
    partial: float | None = None
    """Share of a head that is rotated, which config.json may change; None: the whole head, always."""
    parameters: Fields = field(default_factory=dict[str, Any])
    by_kind: Mapping[str, tuple[str | None, float]] = field(default_factory=dict[str, tuple[str | None, float]])
    """By kind of layer, where each has an embedding of its own: the field with its theta, and the default."""


@dataclass(frozen=True)
class NativeFamily:
    """`fields` are the fields of config.json that the model type reads beside those that all have, with the values that
    transformers' class has where config.json omits them. A field that is not among them has no effect."""

    fields: Fields
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of fields in config.json, by the field."""
    query_key_value_bias: bool = False
    """True if these projections always have a bias. A field may give them one where this is False."""
    output_bias: bool = True
    """False if the output of attention has no bias, even where the other projections have one."""
    activations: Mapping[str, int] = field(default_factory=lambda: {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH})
    norms: Names = ONLY_BEFORE
    """The names of the norms before and after attention, and before and after the feed-forward network."""
    norm_offset: bool = False
    """True if one is added to the weights of norms."""
    head_norms: int | None = None
    """The reach of norms of query and key: EACH_HEAD, EACH_TURNED_HEAD or ALL_HEADS; None without such norms."""
    scaled_embedding: bool = False
    """True if embeddings are multiplied by the root of the hidden size."""
    output_gate: bool = False
    """True if the query projection has a gate of the attention's output behind the query of each head."""
    rope: Rope = field(default_factory=Rope)
    slides: Callable[[Fields, int], bool] = lambda fields, layer: True
    """True if a layer has a sliding window where config.json has a width of windows, but no `layer_types`."""
    rotates: Callable[[Fields, int, str], bool] = lambda fields, layer, kind: True
    """True if a layer of a kind rotates its queries and keys."""

    @property
    def head_norm_names(self) -> tuple[str, str]:
        turned = self.head_norms == EACH_TURNED_HEAD
        return ("query_layernorm", "key_layernorm") if turned else ("q_norm", "k_norm")


def _but_every(period: int) -> Callable[[Fields, int], bool]:
    return lambda fields, layer: (layer + 1) % period != 0


def _but_every_pattern(fields: Fields, layer: int) -> bool:
    return (layer + 1) % fields["sliding_window_pattern"] != 0


def _from_max_window(fields: Fields, layer: int) -> bool:
    return layer >= fields["max_window_layers"]


def _has_rope(fields: Fields, layer: int, kind: str = FULL) -> bool:
    given = fields["no_rope_layers"]
    return bool(given[layer]) if given is not None else (layer + 1) % fields["no_rope_layer_interval"] != 0


_SIZES: Fields = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": None}
_COMMON: Fields = {"hidden_act": "silu", **_SIZES}
_TIED: Fields = {**_COMMON, "tie_word_embeddings": True}
_LLAMA: Fields = {**_COMMON, "intermediate_size": 11008, "attention_bias": False, "mlp_bias": False}
_ATTENTION_BIAS: Fields = {**_COMMON, "attention_bias": False}
_FINE_NORMS: Fields = {"rms_norm_eps": 1e-5}
_WINDOWS: Fields = {"sliding_window": 4096, "layer_types": None}
_SWITCHED_WINDOWS: Fields = {"use_sliding_window": False, "max_window_layers": 28, **_WINDOWS}
_GEMMA: Fields = {**_SIZES, "tie_word_embeddings": True, "head_dim": 256, "attention_bias": False}
_GEMMA2: Fields = {
    **_GEMMA,
    **_WINDOWS,
    "hidden_activation": "gelu_pytorch_tanh",
    "intermediate_size": 9216,
    "query_pre_attn_scalar": 256,
}
_GLM: Fields = {
    **_ATTENTION_BIAS,
    "intermediate_size": 13696,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
}
_GPT_OSS: Fields = {
    **_COMMON,
    **_FINE_NORMS,
    **_WINDOWS,
    "intermediate_size": 2880,
    "head_dim": 64,
    "sliding_window": 128,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_YARN: Fields = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_SPARSE_LAYERS: Fields = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
_QWEN2_MOE: Fields = {
    **_COMMON,
    **_SWITCHED_WINDOWS,
    **_SPARSE_LAYERS,
    "intermediate_size": 5632,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3_MOE: Fields = {
    **_ATTENTION_BIAS,
    **_SPARSE_LAYERS,
    "intermediate_size": 6144,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_HYBRID: Fields = {**_ATTENTION_BIAS, "head_dim": 256}
_HYBRID_EXPERTS: Fields = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_SMOLLM3: Fields = {
    **_LLAMA,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}


def _hybrid(fields: Fields) -> NativeFamily:
    return NativeFamily(
        {**_HYBRID, **fields}, norm_offset=True, head_norms=EACH_HEAD, output_gate=True, rope=Rope(partial=0.25)
    )


FAMILIES: dict[str, NativeFamily] = {
    "arcee": NativeFamily(
        {**_LLAMA, **_FINE_NORMS, "intermediate_size": 18432, "hidden_act": "relu2"},
        activations={"relu2": RELU_SQUARED},
    ),
    "ernie4_5": NativeFamily(
        {**_TIED, **_FINE_NORMS, "intermediate_size": 3072, "use_bias": False, "head_dim": 128}, rope=Rope(500_000.0)
    ),
    "exaone4": NativeFamily(
        {**_COMMON, **_FINE_NORMS, **_WINDOWS, "intermediate_size": 16384, "sliding_window_pattern": 4},
        norms=ONLY_AFTER,
        head_norms=EACH_HEAD,
        slides=_but_every_pattern,
        rotates=lambda fields, layer, kind: kind == SLIDING or fields["sliding_window"] is None,
    ),
    "gemma": NativeFamily(
        {**_GEMMA, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 24576},
        # Older files name the exact function and mean the approximation.
        activations={"gelu_pytorch_tanh": GELU_TANH, "gelu": GELU_TANH, "silu": SILU},
        norm_offset=True,
        scaled_embedding=True,
    ),
    "gemma2": NativeFamily(
        {**_GEMMA2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        norms=AROUND,
        norm_offset=True,
        scaled_embedding=True,
        slides=_but_every(2),
    ),
    "gemma3_text": NativeFamily(
        {**_GEMMA2, "final_logit_softcapping": None, "sliding_window_pattern": 6},
        norms=AROUND,
        norm_offset=True,
        head_norms=EACH_HEAD,
        scaled_embedding=True,
        rope=Rope(by_kind={FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}),
        slides=_but_every_pattern,
    ),
    "glm": NativeFamily(_GLM, output_bias=False, rope=Rope(partial=0.5)),
    "glm4": NativeFamily(_GLM, output_bias=False, norms=AROUND_GLM4, rope=Rope(partial=0.5)),
    "gpt_oss": NativeFamily(
        _GPT_OSS,
        aliases={"num_local_experts": "num_experts"},
        rope=Rope(150_000.0, parameters=_YARN),
        slides=_but_every(2),
    ),
    "hunyuan_v1_dense": NativeFamily(
        {**_ATTENTION_BIAS, **_FINE_NORMS, "intermediate_size": 11008}, head_norms=EACH_TURNED_HEAD
    ),
    "internlm3": NativeFamily(
        {**_LLAMA, **_FINE_NORMS, "intermediate_size": 10240, "head_dim": 128},
        aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    ),
    "lfm2": NativeFamily(
        {"norm_eps": 1e-5, "tie_word_embeddings": True, "head_dim": None},
        norms=("operator_norm", None, "ffn_norm", None),
        head_norms=EACH_HEAD,
        rope=Rope(1_000_000.0),
    ),
    "llama": NativeFamily(_LLAMA),
    "ministral": NativeFamily({**_COMMON, **_WINDOWS, "intermediate_size": 14336}),
    "mistral": NativeFamily({**_COMMON, "intermediate_size": 14336, "sliding_window": 4096}),
    "mixtral": NativeFamily(
        {
            **_COMMON,
            **_FINE_NORMS,
            "intermediate_size": 14336,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        aliases={"num_local_experts": "num_experts"},
        rope=Rope(1e6),
    ),
    "olmo2": NativeFamily(
        {**_ATTENTION_BIAS, **_FINE_NORMS, "intermediate_size": 11008}, norms=ONLY_AFTER, head_norms=ALL_HEADS
    ),
    "olmo3": NativeFamily(
        {**_ATTENTION_BIAS, **_FINE_NORMS, **_WINDOWS, "intermediate_size": 11008},
        norms=ONLY_AFTER,
        head_norms=ALL_HEADS,
        rope=Rope(by_kind={FULL: ("rope_theta", 5e5), SLIDING: (None, 5e5)}),
        slides=_but_every(4),
    ),
    "phi3": NativeFamily(
        {**_COMMON, **_FINE_NORMS, "intermediate_size": 8192, "sliding_window": None}, rope=Rope(partial=1.0)
    ),
    "qwen2": NativeFamily(
        {**_COMMON, **_SWITCHED_WINDOWS, "intermediate_size": 22016}, query_key_value_bias=True, slides=_from_max_window
    ),
    "qwen2_moe": NativeFamily(
        _QWEN2_MOE, slides=lambda fields, layer: layer % 2 == 0 and layer < fields["max_window_layers"]
    ),
    "qwen3": NativeFamily(
        {**_ATTENTION_BIAS, **_SWITCHED_WINDOWS, "intermediate_size": 22016, "head_dim": 128},
        head_norms=EACH_HEAD,
        slides=_from_max_window,
    ),
    "qwen3_5_moe_text": _hybrid({**_HYBRID_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8}),
    "qwen3_5_text": _hybrid({"intermediate_size": 12288}),
    "qwen3_moe": NativeFamily(_QWEN3_MOE, aliases={"num_experts": "num_local_experts"}, head_norms=EACH_HEAD),
    "qwen3_next": _hybrid({**_HYBRID_EXPERTS, **_SPARSE_LAYERS, "intermediate_size": 5632, "norm_topk_prob": True}),
    "seed_oss": NativeFamily(
        {**_LLAMA, "intermediate_size": 27648, "attention_bias": True, "attention_out_bias": False, "head_dim": 128}
    ),
    "smollm3": NativeFamily(
        _SMOLLM3,
        rope=Rope(2e6),
        slides=lambda fields, layer: not _has_rope(fields, layer),
        rotates=_has_rope,
    ),
}
