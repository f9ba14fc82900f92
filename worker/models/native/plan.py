"""Which models can be stepped through in C++, and their description for it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.families.family import Family
from worker.families.recurrence import LINEAR
from worker.families.registry import FAMILIES
from worker.kv.base import CacheLayout, LayerCache
from worker.models.layers.linear import NativeLinear
from worker.models.layers.norms import FusedRMSNorm
from worker.models.layers.parallel import RowParallelLinear, VocabParallelHead
from worker.models.native.deltas import Deltas
from worker.models.native.mixtures import Mixtures
from worker.models.native.modules import CausalModel, LayerNorm
from worker.models.native.rotary import Rotary
from worker.models.native.unsupported import NotNative, require
from worker.native import library
from worker.native.library import (
    ALL_HEADS,
    BOTH,
    CLAMPED_SWIGLU,
    EACH_HEAD,
    EACH_TURNED_HEAD,
    KEYS_ALONE,
    NEITHER,
    WHOLE_VECTORS,
    XIELU,
    Gate,
    Layer,
    LayerInputs,
    Linear,
    Model,
    Norm,
)

_HEAD_NORMS = {
    None: EACH_HEAD,
    "each_head": EACH_HEAD,
    "each_own_head": EACH_HEAD,
    "each_turned_head": EACH_TURNED_HEAD,
    "all_heads": ALL_HEADS,
}
RECURRENT = ("conv", "linear_attn", "mamba")
"""Names of the modules of recurrent layers."""


class Plan:
    """A model as the compiled step reads it. Keeps alive what the struct points to."""

    def __init__(self, model: Any, layout: CacheLayout) -> None:
        """Raises NotNative."""
        if not isinstance(model, CausalModel):
            raise NotNative(f"the modules of its {type(model).__name__} are transformers'")
        config, body, family = model.config, model.model, FAMILIES[model.config.model_type]
        for one in layout.layers:
            require(one.head_dim % WHOLE_VECTORS == 0, f"its heads are {one.head_dim} wide")
        head = model.get_output_embeddings()
        self.head = _native(head.head if isinstance(head, VocabParallelHead) else head)
        self.threads = self.head.threads
        rotaries = Rotaries(body.rotaries, family.rope_neighbours)
        mixtures, deltas = Mixtures(self.threads), Deltas(layout.state)
        layers, self._biases, self._ones = list[Layer](), list[Tensor](), list[Tensor]()
        for one, kind, rotated in zip(body.layers, config.layer_types, config.rotated, strict=True):
            beside = None if family.experts is None else family.experts.beside
            mixture = mixtures.add(one.mlp if beside is None else one, config)
            layers.append(_layer(one, config, family, mixture, self._biases))
            if mixture >= 0 and beside is not None:
                layers[-1].beside = 1
                layers[-1].after_network, mixtures.structs[mixture].before, mixtures.structs[mixture].after = (
                    _norm(getattr(one, name)) for name in beside
                )
            if kind == LINEAR:
                module: Any = next(getattr(one, name) for name in RECURRENT if hasattr(one, name))
                deltas.add(layers[-1], module)
                layers[-1].attention_out = _summed(module.projections.out_proj, self._biases)
            else:
                place = sum(layer.delta < 0 for layer in layers) - 1
                _add_attention(layers[-1], one.self_attn, family, layout.layers[place], self._biases)
                if family.value_norm:
                    layers[-1].value = self._unweighted_norm(layers[-1].head_dim, config.rms_norm_eps)
                layers[-1].slab, layers[-1].cache = layout.places[place]
                layers[-1].rotary = rotaries.index(kind) if rotated else -1
        self._layers, self._mixtures, self._deltas = (Layer * len(layers))(*layers), mixtures, deltas
        self._rotaries, self._frequencies = rotaries.structs, rotaries.frequencies
        self.model = Model(
            layers=ctypes.addressof(self._layers),
            depth=len(layers),
            hidden=config.hidden_size,
            heads=next(one.attention_out.inputs // one.head_dim for one in layers if one.delta < 0),
            rotaries=ctypes.addressof(self._rotaries),
            rotary_count=len(self._rotaries),
            mixtures=ctypes.addressof(mixtures.structs),
            mixture_count=len(mixtures.structs),
            deltas=ctypes.addressof(deltas.structs),
            delta_count=len(deltas.structs),
            output_gate=int(family.output_gate),
            attention_scale=config.scaling,
            attention_cap=config.attention_cap,
            logit_cap=config.logit_cap,
            inputs=_layer_inputs(body, config),
            residual_scale=config.residual_scale,
            logit_scale=config.logit_scale,
            last=_norm(body.norm),
            head=self.head.struct,
        )

    def _unweighted_norm(self, width: int, eps: float) -> Norm:
        self._ones.append(torch.ones(width))
        return Norm(self._ones[-1].data_ptr(), eps)


class Rotaries:
    """The rotary embeddings of a model: one, or one for each kind of layer."""

    def __init__(self, by_kind: dict[str, Rotary], neighbours: bool) -> None:
        self._kinds = list(by_kind)
        self.frequencies = [one.inv_freq.float().contiguous() for one in by_kind.values()]
        self.structs = (library.Rotary * len(by_kind))(
            *(
                library.Rotary(
                    numbers.data_ptr(), one.attention_scaling, 2 * numbers.numel(), int(neighbours), *one.growth
                )
                for one, numbers in zip(by_kind.values(), self.frequencies, strict=True)
            )
        )

    def index(self, kind: str) -> int:
        """The place of a layer's embedding among `structs`."""
        return self._kinds.index(kind) if len(self._kinds) > 1 or kind in self._kinds else 0


def _layer(layer: Any, config: Any, family: Family, mixture: int, biases: list[Tensor]) -> Layer:
    """A layer but for its attention, or what it has instead. `biases` keeps alive those that only the struct points
    to."""
    feed_forward = layer.mlp
    dense = mixture < 0 or (family.experts is not None and family.experts.beside is not None)
    has_input = hasattr(layer, "per_layer_input_gate")
    norms = [_norm(getattr(layer, name) if name else None) for name in family.norms]
    before_attention, after_attention, before_feed_forward, after_feed_forward = norms
    return Layer(
        before_attention=before_attention,
        after_attention=after_attention,
        before_feed_forward=before_feed_forward,
        after_feed_forward=after_feed_forward,
        gate_up=_joined(feed_forward, "gate_proj_up_proj", "gate_up_proj", "up_proj") if dense else Linear(),
        down=_summed(feed_forward.down_proj, biases) if dense else Linear(),
        gate=_gate(feed_forward, config, family),
        mixture=mixture,
        delta=-1,
        parallel=int(family.parallel),
        input_gate=_native(layer.per_layer_input_gate).struct if has_input else Linear(),
        input_projection=_native(layer.per_layer_projection).struct if has_input else Linear(),
        after_input=_norm(layer.post_per_layer_input_norm if has_input else None),
        scale=float(layer.layer_scalar) if family.layer_scales else 1.0,
    )


def _layer_inputs(body: Any, config: Any) -> LayerInputs:
    """The inputs that layers have of their own."""
    width = config.hidden_size_per_layer_input
    if not width:
        return LayerInputs()
    return LayerInputs(
        width=width,
        projection=_native(body.per_layer_model_projection).struct,
        norm=_norm(body.per_layer_projection_norm),
        projected_scale=config.hidden_size**-0.5,
        scale=2**-0.5,
    )


def _gate(feed_forward: Any, config: Any, family: Family) -> Gate:
    if hasattr(feed_forward, "act_fn"):
        return _xielu(feed_forward.act_fn)
    clamp: tuple[float, float] | None = getattr(config, "clamp", None)
    if clamp is not None:
        return Gate(CLAMPED_SWIGLU, *clamp)
    return Gate(config.activation, alone=int(not family.is_gated))


def _xielu(learned: Any) -> Gate:
    """As transformers' `XIELUActivation` has it."""
    positive, negative = (float(functional.softplus(one.double())) for one in (learned.alpha_p, learned.alpha_n))
    linear, least = float(learned.beta), float(learned.eps)
    return Gate(XIELU, alone=1, positive=positive, negative=linear + negative, linear=linear, least=least)


def _add_attention(to: Layer, attention: Any, family: Family, cache: LayerCache, biases: list[Tensor]) -> None:
    sinks = getattr(attention, "sinks", None)
    query, key = (getattr(attention, name, None) for name in family.head_norm_names)
    to.query, to.key = _norm(query), _norm(key)
    to.head_norms = _HEAD_NORMS[family.head_norms]
    to.head_norm_step = query.weight.shape[-1] if query is not None and family.head_norms == "each_own_head" else 0
    if cache.source is not None:
        to.stored, to.query_key_value = NEITHER, _native(attention.q_proj).struct
    elif hasattr(attention, "q_proj_k_proj"):
        to.stored, to.query_key_value = KEYS_ALONE, _native(attention.q_proj_k_proj.linear).struct
    else:
        to.stored, to.query_key_value = BOTH, _joined(attention, "q_proj_k_proj_v_proj", "qkv_proj")
    to.attention_out = _summed(attention.o_proj, biases)
    to.sinks = None if sinks is None else sinks.data_ptr()
    to.window = cache.window or 0
    to.shared_heads, to.head_dim = cache.kv_heads, cache.head_dim


def _norm(norm: nn.Module | None) -> Norm:
    if norm is None:
        return Norm(None, 0.0)
    if isinstance(norm, LayerNorm):
        bias = None if norm.bias is None else norm.bias.data_ptr()
        return Norm(norm.weight.data_ptr(), norm.eps, centered=1, bias=bias)
    if not isinstance(norm, FusedRMSNorm) or norm.weight is None:
        raise NotNative(f"its {type(norm).__name__} is torch's")
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
