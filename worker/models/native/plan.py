"""Which models can be stepped through in C++, and their description for it."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor, nn

from worker.kv.base import CacheLayout, LayerCache
from worker.layers.linear import NativeLinear
from worker.layers.norms import FusedRMSNorm
from worker.layers.parallel import RowParallelLinear, VocabParallelHead
from worker.models.native.deltas import Deltas, is_recurrent
from worker.models.native.mixtures import Mixtures
from worker.models.native.unsupported import NotNative, require
from worker.native.library import (
    ALL_HEADS,
    CLAMPED_SWIGLU,
    EACH_HEAD,
    EACH_TURNED_HEAD,
    GELU_TANH,
    RELU_SQUARED,
    SILU,
    Gate,
    Layer,
    Linear,
    Model,
    Norm,
    Rotary,
)
from worker.repository.families import INTERLEAVED

FAMILIES = {
    "arcee",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt_oss",
    "hunyuan_v1_dense",
    "internlm3",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
}
"""Attention or a recurrent layer, then a feed-forward network or a mixture of them, each added to its input and with an
RMS norm before or after it; rotary embeddings over a head's first numbers."""

GATED_OUTPUTS = {"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""Types whose query projection has a gate of the attention's output behind the query of each head."""

UNGATED = {"arcee"}
"""Families whose feed-forward network has no gate."""

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}

WHOLE_VECTORS = 16
"""A head's width must be a multiple of this many numbers."""


class Plan:
    """A model as the compiled step reads it. Keeps alive what the struct points to."""

    def __init__(self, model: Any, layout: CacheLayout) -> None:
        """Raises NotNative."""
        config, body = model.config, model.model
        if config.model_type not in FAMILIES:
            raise NotNative(f"{config.model_type} has parts that are not written in C++")
        require(len(layout.groups) == 1, "the heads of its layers differ in width or number")
        shared_heads, head_dim = layout.groups[0].kv_heads, layout.groups[0].head_dim
        require(head_dim % WHOLE_VECTORS == 0, f"its heads are {head_dim} wide")
        head = model.get_output_embeddings()
        self.head = _native(head.head if isinstance(head, VocabParallelHead) else head)
        self.threads = self.head.threads
        rotaries = Rotaries(body.rotary_emb, head_dim, config.model_type in INTERLEAVED)
        mixtures, deltas = Mixtures(self.threads), Deltas(layout.state)
        layers, self._biases = list[Layer](), list[Tensor]()
        attentions = [one.self_attn for one in body.layers if not is_recurrent(one)]
        for one in body.layers:
            layers.append(_layer(one, mixtures.add(one.mlp, config), self._biases))
            if is_recurrent(one):
                deltas.add(layers[-1], one.linear_attn)
            else:
                place = sum(layer.delta < 0 for layer in layers) - 1
                require(layout.layers[place].source is None, "its layers share keys and values")
                _add_attention(layers[-1], one.self_attn, layout.layers[place], rotaries, self._biases)
                layers[-1].cache = place
        self._layers, self._mixtures, self._deltas = (Layer * len(layers))(*layers), mixtures, deltas
        self._rotaries, self._frequencies = rotaries.structs, rotaries.frequencies
        self.model = Model(
            layers=ctypes.addressof(self._layers),
            depth=len(layers),
            hidden=config.hidden_size,
            heads=next(one for one in layers if one.delta < 0).attention_out.inputs // head_dim,
            shared_heads=shared_heads,
            head_dim=head_dim,
            rotaries=ctypes.addressof(self._rotaries),
            rotary_count=len(self._rotaries),
            mixtures=ctypes.addressof(mixtures.structs),
            mixture_count=len(mixtures.structs),
            deltas=ctypes.addressof(deltas.structs),
            delta_count=len(deltas.structs),
            output_gate=int(config.model_type in GATED_OUTPUTS),
            attention_scale=attentions[0].scaling,
            attention_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
            gate=_gate(config),
            last=_norm(body.norm),
            head=self.head.struct,
        )


class Rotaries:
    """The rotary embeddings of a model: one, or one for each type of layer."""

    def __init__(self, rotary: Any, head_dim: int, neighbours: bool) -> None:
        self._types: list[str] = getattr(rotary, "layer_types", [])
        prefixes = [f"{kind}_" for kind in self._types] or [""]
        self.frequencies: list[Tensor] = [
            getattr(rotary, f"{prefix}inv_freq").float().contiguous() for prefix in prefixes
        ]
        require(all(2 * one.numel() <= head_dim for one in self.frequencies), "its rotary embedding exceeds its heads")
        self.structs = (Rotary * len(prefixes))(
            *(
                Rotary(one.data_ptr(), getattr(rotary, f"{prefix}attention_scaling"), 2 * one.numel(), int(neighbours))
                for one, prefix in zip(self.frequencies, prefixes, strict=True)
            )
        )

    def index(self, attention: Any) -> int:
        """The place of an attention's embedding among `structs`; -1 where its heads are not rotated."""
        if not getattr(attention, "use_rope", True):
            return -1
        # exaone4 rotates no layer with full attention where others have a window.
        if hasattr(attention, "sliding_window_pattern") and attention.sliding_window and not attention.is_sliding:
            return -1
        kind = getattr(attention, "layer_type", None) or getattr(attention, "attention_type", None)
        return self._types.index(kind) if self._types and kind else 0


def _gate(config: Any) -> Gate:
    if config.model_type == "gpt_oss":
        return Gate(CLAMPED_SWIGLU, config.swiglu_alpha, config.swiglu_limit)
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if config.model_type in UNGATED:
        require(activation == "relu2", f"its activation is {activation}, without a gate")
        return Gate(RELU_SQUARED)
    require(activation in ACTIVATIONS, f"its activation is {activation}")
    return Gate(ACTIVATIONS[activation])


def _layer(layer: Any, mixture: int, biases: list[Tensor]) -> Layer:
    """A layer but for its attention, or what it has instead. `biases` keeps alive those that only the struct points
    to."""
    feed_forward = layer.mlp
    before_attention, after_attention, before_feed_forward, after_feed_forward = _norms_of(layer)
    return Layer(
        before_attention=before_attention,
        after_attention=after_attention,
        before_feed_forward=before_feed_forward,
        after_feed_forward=after_feed_forward,
        gate_up=_joined(feed_forward, "gate_proj_up_proj", "gate_up_proj", "up_proj") if mixture < 0 else Linear(),
        down=_summed(feed_forward.down_proj, biases) if mixture < 0 else Linear(),
        mixture=mixture,
        delta=-1,
    )


def _add_attention(to: Layer, attention: Any, cache: LayerCache, rotaries: Rotaries, biases: list[Tensor]) -> None:
    sinks = getattr(attention, "sinks", None)
    to.query, to.key, to.head_norms = _head_norms(attention, cache.head_dim)
    to.query_key_value = _joined(attention, "q_proj_k_proj_v_proj", "qkv_proj")
    to.attention_out = _summed(attention.o_proj, biases)
    to.sinks = None if sinks is None else sinks.data_ptr()
    to.window, to.rotary = cache.window or 0, rotaries.index(attention)


NORMS = (
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", None, "post_attention_layernorm", None),
)
"""transformers' names of the norms before and after attention, and before and after the feed-forward network, by kind
of family; the first kind whose norms a layer has is its own."""


def _norms_of(layer: Any) -> list[Norm]:
    """The norms before and after attention, and before and after the feed-forward network."""
    own = {name for name, _ in layer.named_children() if "norm" in name}
    names = next((kind for kind in NORMS if {name for name in kind if name} == own), None)
    if names is None:
        raise NotNative(f"its layers have the norms {', '.join(sorted(own))}")
    return [_norm(getattr(layer, name) if name else None) for name in names]


def _head_norms(attention: Any, head_dim: int) -> tuple[Norm, Norm, int]:
    """The norms of query and key, and what they take together."""
    if hasattr(attention, "query_layernorm"):
        return _norm(attention.query_layernorm), _norm(attention.key_layernorm), EACH_TURNED_HEAD
    query, key = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if query is None or key is None:
        return _norm(None), _norm(None), EACH_HEAD
    return _norm(query), _norm(key), EACH_HEAD if query.weight.numel() == head_dim else ALL_HEADS


def _norm(norm: nn.Module | None) -> Norm:
    if norm is None:
        return Norm(None, 0.0)
    if not isinstance(norm, FusedRMSNorm) or norm.weight is None:
        raise NotNative(f"its {type(norm).__name__} is not torch's, or has no weight")
    return Norm(norm.weight.data_ptr(), norm.eps)


def _joined(parent: Any, fused: str, *stored: str) -> Linear:
    """The product that loading joined as `fused`, else the one that has a name of `stored`."""
    if hasattr(parent, fused):
        return _native(getattr(parent, fused).linear).struct
    return _native(next((getattr(parent, name) for name in stored if hasattr(parent, name)), None)).struct


def _summed(linear: Any, biases: list[Tensor]) -> Linear:
    """A layer whose outputs are summed over the ranks: the first rank's product has the bias."""
    if not isinstance(linear, RowParallelLinear):
        return _native(linear).struct
    partial = _native(linear.partial)
    if linear.bias is None or not linear.is_first:
        return partial.struct
    biases.append(partial.padded(linear.bias))
    struct = Linear.from_buffer_copy(partial.struct)
    struct.bias = biases[-1].data_ptr()
    return struct


def _native(linear: Any) -> NativeLinear:
    require(isinstance(linear, NativeLinear), f"its {type(linear).__name__} is torch's")
    return linear
