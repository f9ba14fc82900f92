"""Which models can be stepped through in C++, and their description for it."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor, nn

from worker.kv.base import CacheLayout
from worker.layers.linear import NativeLinear
from worker.layers.norms import FusedRMSNorm
from worker.layers.parallel import RowParallelLinear, VocabParallelHead
from worker.native.library import Layer, Linear, Model, Norm

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
"""Norm, attention, sum, norm, gated feed-forward, sum; rotary embeddings over whole heads, halves as pairs."""

WHOLE_VECTORS = 16
"""A head's width must be a multiple of this many numbers."""


class NotNative(Exception):
    """A model that is left to torch; the message says why."""


class Plan:
    """A model as the compiled step reads it. Keeps alive what the struct points to."""

    def __init__(self, model: Any, layout: CacheLayout) -> None:
        """Raises NotNative."""
        config, body = model.config, model.model
        if config.model_type not in FAMILIES:
            raise NotNative(f"{config.model_type} has parts that are not written in C++")
        _require(config.hidden_act == "silu", f"its activation is {config.hidden_act}")
        _require(layout.head_dim % WHOLE_VECTORS == 0, f"its heads are {layout.head_dim} wide")
        head = model.get_output_embeddings()
        self.head = _native(head.head if isinstance(head, VocabParallelHead) else head)
        self.threads = self.head.threads
        self._layers = (Layer * layout.layers)(
            *(_layer(one, window) for one, window in zip(body.layers, layout.windows, strict=True))
        )
        rotary, attention = body.rotary_emb, body.layers[0].self_attn
        self._frequencies: Tensor = rotary.inv_freq.float().contiguous()
        _require(2 * self._frequencies.numel() == layout.head_dim, "only a part of its heads is rotated")
        self.model = Model(
            layers=ctypes.addressof(self._layers),
            depth=layout.layers,
            hidden=config.hidden_size,
            heads=self._layers[0].attention_out.inputs // layout.head_dim,
            shared_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            inner=self._layers[0].down.inputs,
            frequencies=self._frequencies.data_ptr(),
            rotary_scale=rotary.attention_scaling,
            attention_scale=attention.scaling,
            last=_norm(body.norm),
            head=self.head.struct,
        )


def _layer(layer: Any, window: int | None) -> Layer:
    attention, feed_forward = layer.self_attn, layer.mlp
    return Layer(
        before_attention=_norm(layer.input_layernorm),
        before_feed_forward=_norm(layer.post_attention_layernorm),
        query=_norm(getattr(attention, "q_norm", None)),
        key=_norm(getattr(attention, "k_norm", None)),
        query_key_value=_joined(attention, "q_proj_k_proj_v_proj"),
        attention_out=_native(attention.o_proj).struct,
        gate_up=_joined(feed_forward, "gate_proj_up_proj"),
        down=_native(feed_forward.down_proj).struct,
        window=window or 0,
    )


def _norm(norm: nn.Module | None) -> Norm:
    if norm is None:
        return Norm(None, 0.0)
    if not isinstance(norm, FusedRMSNorm):
        raise NotNative(f"its {type(norm).__name__} is not torch's")
    return Norm(norm.weight.data_ptr(), norm.eps)


def _joined(parent: Any, name: str) -> Linear:
    return _native(getattr(getattr(parent, name, None), "linear", None)).struct


def _native(linear: Any) -> NativeLinear:
    if isinstance(linear, RowParallelLinear):
        _require(linear.bias is None, "a bias is added after the ranks' sum")
        linear = linear.partial
    _require(isinstance(linear, NativeLinear), f"its {type(linear).__name__} is torch's")
    return linear


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise NotNative(otherwise)
