"""Names and fields of GGUF files: what several architectures share. A family's own are in its file.

Names and keys are llama.cpp's (github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from control.errors import ModelFilesError

FACTORS = "rope_freqs.weight"
"""By how much each frequency of rotary embeddings is divided."""

OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The matrices of a feed-forward network with a gate."""


def gated_names(module: str, kind: str = "", projections: tuple[str, str, str] = PROJECTIONS) -> dict[str, str]:
    """The names of a feed-forward network with a gate. `kind`: `_exps` of experts, `_shexp` of one that all tokens go
    through."""
    stored = (f"ffn_gate{kind}", f"ffn_up{kind}", f"ffn_down{kind}")
    return {f"{module}.{name}": stored_name for name, stored_name in zip(projections, stored, strict=True)}


LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    **gated_names("mlp"),
}
EXPERT_LAYER_NAMES = LAYER_NAMES | gated_names("mlp.experts", "_exps") | {"mlp.gate": "ffn_gate_inp"}
WEIGHTS_BY_NUMBER = ("w1", "w3", "w2")
"""The names of `PROJECTIONS` in some types."""
MIXTRAL_LAYER_NAMES = {
    **LAYER_NAMES,
    **gated_names("block_sparse_moe.experts", "_exps", WEIGHTS_BY_NUMBER),
    "block_sparse_moe.gate": "ffn_gate_inp",
}
ROUTED_LAYER_NAMES = {
    **EXPERT_LAYER_NAMES,
    **gated_names("mlp.shared_experts", "_shexp"),
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
"""Of types with experts that all tokens go through, and a correction of scores."""
WITH_SHARED_EXPERT = {
    **EXPERT_LAYER_NAMES,
    **gated_names("mlp.shared_expert", "_shexp"),
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
AROUND_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Of types with norms behind attention and feed-forward network."""
MAMBA_NAMES = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
"""Of Mamba-2 layers."""
FUSED_LAYER_NAMES = {
    **{module: name for module, name in LAYER_NAMES.items() if module not in ("mlp.gate_proj", "mlp.up_proj")},
    "mlp.gate_up_proj": "ffn_up",
}
"""Of types whose gate and up projection are one matrix."""
RATES = ".ssm_ba.weight"
"""Beta and alpha of recurrent layers in one tensor: for each key head the rows of beta, then those of alpha."""
# What files have for `kv_b_proj`: a matrix of each head, of keys (latent, head) and of values (head, latent).
KEYS_OF_HEADS = "k_b_proj"
VALUES_OF_HEADS = "v_b_proj"
_FUSED = {"ffn_gate_exps.weight": 0, "ffn_up_exps.weight": 1}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Metadata(Protocol):
    """The metadata of a GGUF model (weights/gguf.py). Readers raise ModelFilesError naming key and value."""

    @property
    def architecture(self) -> str: ...
    @property
    def fields(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    def whole(self, key: str, default: Any = ..., least: int = 1) -> Any: ...
    def real(self, key: str, default: Any = ...) -> Any: ...
    def flag(self, key: str, default: bool) -> bool: ...
    def array(self, key: str) -> Any: ...
    def numbers(self, key: str, default: int) -> list[int]: ...
    def factors(self, width: int) -> tuple[float, ...]: ...
    def wrong(self, key: str, value: Any, needed: str) -> ModelFilesError: ...


@dataclass(frozen=True)
class Gguf:
    """An architecture of GGUF files."""

    architecture: str
    config: Callable[[Metadata, dict[str, Any]], dict[str, Any]]
    """The fields of config.json that are special of the type, from the metadata and the fields that all types have."""
    names: Mapping[str, str]
    """The names within a layer, by transformers' modules; whole names of parameters that are no module's."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER_NAMES)
    """The names of the modules that are in no layer."""
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Parameters of a layer that files have as numbers of their metadata, by layer: the names within a layer, and the
    keys."""
    halves: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Matrices that files have as two: the parameters within a layer, and the names within a layer of the upper and the
    lower half of their rows."""
    partial: bool = False
    """True if only a part of each head may be turned by its position."""
    layers_differ: bool = False
    """True if layers may differ in the width and number of heads and of feed-forward networks: `config` reads lists of
    them, and the factors of frequencies; what all types have is that of the first layer."""
    when: Callable[[Metadata], bool] | None = None
    """True for a file with a model of the type, where others have the architecture too; None: of what is left."""
    yarn_logarithm: bool = False
    """True if a file of type yarn may say how attention grows with the logarithm of the factor; `config` reads it."""
    permuted: bool = False
    """True if the rows of query and key projections are stored in the order of adjacent pairs."""

    def stored_name(self, name: str) -> str | None:
        """The name in the file of transformers' parameter `name`; None if the architecture has none. The experts of a
        layer are one tensor."""
        stem, _, leaf = _EXPERT.sub(".experts.", name).rpartition(".")
        if stem.startswith("model.layers."):
            index, _, rest = stem.removeprefix("model.layers.").partition(".")
            if (whole := self.names.get(f"{rest}.{leaf}")) is not None:
                return f"blk.{index}.{whole}"
            inner = self.names.get(rest)
            return None if inner is None else f"blk.{index}.{inner}.{leaf}"
        outer = self.outer.get(stem)
        return None if outer is None else f"{outer}.{leaf}"


def mamba_described(model: Metadata) -> tuple[int, int, int, int, int, bool]:
    """Of Mamba-2 layers: inputs of the convolution, heads, numbers of all heads, groups, rows of a state, and if the
    convolution has a bias."""
    name = f"{model.architecture}.ssm"
    taps, heads, inner, groups, state = (
        model.whole(f"{name}.{key}")
        for key in ("conv_kernel", "time_step_rank", "inner_size", "group_count", "state_size")
    )
    return taps, heads, inner, groups, state, any(key.endswith(".ssm_conv1d.bias") for key in model.tensors)


def has_query_bias(model: Metadata) -> bool:
    return "blk.0.attn_q.bias" in model.tensors


def biases_described(model: Metadata) -> dict[str, Any]:
    """The fields for biases of attention and feed-forward network, by the tensors of the first layer."""
    return {"attention_bias": has_query_bias(model), "mlp_bias": "blk.0.ffn_up.bias" in model.tensors}


def has_experts(model: Metadata) -> bool:
    return model.whole(f"{model.architecture}.expert_count", 0, least=0) > 0


def expert_of(name: str) -> int | None:
    """The number of the expert that transformers' parameter `name` belongs to."""
    match = _EXPERT.search(name)
    return None if match is None else int(match[1])


def fused_name(name: str) -> tuple[str, int] | None:
    """The tensor that holds the experts' `name` beside another one in files that were converted with fused gates, and
    the half of each expert's rows that it is; None for a tensor that is never fused."""
    stem, dot, leaf = name.partition("ffn_")
    half = _FUSED.get(dot + leaf)
    return None if half is None else (f"{stem}ffn_gate_up_exps.weight", half)


def rotation_described(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` with the part of each head that is turned."""
    rotated = model.whole(f"{model.architecture}.rope.dimension_count", common["head_dim"])
    return {"rope_parameters": common["rope_parameters"] | {"partial_rotary_factor": rotated / common["head_dim"]}}


def experts_described(model: Metadata) -> dict[str, Any]:
    """The fields of a mixture of experts that all architectures name alike."""
    experts = f"{model.architecture}.expert"
    return {
        "num_experts": model.whole(f"{experts}_count"),
        "num_experts_per_tok": model.whole(f"{experts}_used_count"),
        "moe_intermediate_size": model.whole(f"{experts}_feed_forward_length"),
    }


def local_experts_described(model: Metadata) -> dict[str, Any]:
    """As `experts_described`, of types with another name for their number, and no width of their own."""
    experts = f"{model.architecture}.expert"
    return {
        "num_local_experts": model.whole(f"{experts}_count"),
        "num_experts_per_tok": model.whole(f"{experts}_used_count"),
    }


def routed_experts_described(model: Metadata) -> dict[str, Any]:
    """The fields of types with experts that all tokens go through."""
    return {
        "n_routed_experts": model.whole(f"{model.architecture}.expert_count"),
        "n_shared_experts": model.whole(f"{model.architecture}.expert_shared_count"),
        **routing_described(model),
    }


def routing_described(model: Metadata) -> dict[str, Any]:
    """The fields of the choice of experts that several architectures name alike."""
    name = model.architecture
    return {
        "num_experts_per_tok": model.whole(f"{name}.expert_used_count"),
        "moe_intermediate_size": model.whole(f"{name}.expert_feed_forward_length"),
        "first_k_dense_replace": model.whole(f"{name}.leading_dense_block_count", 0, least=0),
        "n_group": model.whole(f"{name}.expert_group_count", 1),
        "topk_group": model.whole(f"{name}.expert_group_used_count", 1),
        "routed_scaling_factor": model.real(f"{name}.expert_weights_scale", 1.0),
        "norm_topk_prob": model.flag(f"{name}.expert_weights_norm", False),
    }


def sparse_layers(model: Metadata, layers: range) -> list[str]:
    """`mlp_layer_types`: a layer with a router has experts."""
    return ["sparse" if f"blk.{layer}.ffn_gate_inp.weight" in model.tensors else "dense" for layer in layers]


def layers_described(model: Metadata, layers: int) -> range:
    """The layers of a list by layer: as many as the file has tensors for, at most. A damaged number must not become a
    list of that length."""
    return range(min(layers, len(model.tensors)))
