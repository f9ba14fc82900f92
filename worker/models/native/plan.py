"""Decides whether C++ computes a model, and describes the model for it."""

from __future__ import annotations

import ctypes
import math
from statistics import NormalDist
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from worker.families.family import Family
from worker.families.recurrence import attends, recurs
from worker.families.registry import FAMILIES
from worker.kv.base import CacheLayout, LayerCache
from worker.models.native import modules
from worker.models.native.config import Latent
from worker.models.native.linear import PackedExperts, PackedHeads, PackedLinear
from worker.models.native.module import NotNative, address_of, require
from worker.models.native.modules import CORRECTION, CausalModel
from worker.models.native.recurrent import RecurrentLayers
from worker.models.native.rotary import UNTURNED, Rotary
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
    Expert,
    Gate,
    Layer,
    LayerInputs,
    Linear,
    Mixture,
    Model,
    Norm,
    Threads,
)


class Mixtures:
    """The mixtures of a model's layers, in order. `structs` is for C++; keeps alive what they point to."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.structs = (Mixture * 0)()
        self._references: list[Any] = []

    def add(self, block: Any, config: Any) -> int:
        """The place of a layer's mixture among `structs`; -1 for a `block` without experts. It is the feed-forward
        module, or the layer where the experts are beside that. Raises NotNative."""
        experts: PackedExperts | None = getattr(block, "experts", None)
        if experts is None:
            return -1
        pairs = [
            Expert(gate_up.struct, down.struct) for gate_up, down in zip(experts.gate_up, experts.down, strict=True)
        ]
        # gpt_oss has another name for it, and a bias.
        gate = block.router if hasattr(block, "router") else block.gate
        scaled = hasattr(gate, "per_expert_scale")
        router = [gate.proj.weight if scaled else gate.weight]
        shared = getattr(block, "shared_expert", getattr(block, "shared_experts", None))
        if shared is not None:
            pairs.append(_shared(shared, experts.summed))
        shared_gate = getattr(block, "shared_expert_gate", None)
        if shared_gate is not None:
            router.append(shared_gate.weight)
        owners = (gate, block, getattr(gate, "moe_statics", None))
        correction = next((getattr(owner, CORRECTION) for owner in owners if hasattr(owner, CORRECTION)), None)
        structs = (Expert * len(pairs))(*pairs)
        routing = PackedLinear(router, getattr(gate, "bias", None), [_lossless(router)] * len(router), self._threads)
        self._references += [structs, routing, correction]
        before_router = Norm()
        if scaled:
            weight = gate.scale * np.float32(config.hidden_size**-0.5)
            before_router = Norm(weight.ctypes.data, config.rms_norm_eps)
            self._references += [weight, gate.per_expert_scale]
        self.structs = (Mixture * (len(self.structs) + 1))(
            *self.structs,
            Mixture(
                before_router=before_router,
                expert_scales=gate.per_expert_scale.ctypes.data if scaled else None,
                router=routing.struct,
                experts=ctypes.addressof(structs),
                count=len(experts.gate_up),
                chosen=config.num_experts_per_tok,
                sigmoid=int(config.sigmoid_scores),
                correction=address_of(correction),
                groups=config.expert_groups,
                chosen_groups=config.chosen_groups,
                normalized=int(config.norm_topk_prob),
                least_sum=config.least_sum,
                sparse_mixer=int(config.expert_jitter is not None),
                jitter=config.expert_jitter or 0.0,
                scale=config.expert_scale,
                weighted_inputs=int(config.weighted_inputs),
                shared=int(shared is not None),
                shared_gate=int(shared_gate is not None),
            ),
        )
        return len(self.structs) - 1


def _shared(expert: Any, summed: bool) -> Expert:
    """Raises NotNative for an expert of which each rank has the whole beside others that are split."""
    down: PackedLinear = expert.down_proj
    require(down.summed == summed, "its shared expert is whole on each rank")
    names = ("gate_up_proj", "gate_proj_up_proj", "up_proj")
    gate_up = next((getattr(expert, name) for name in names if hasattr(expert, name)), None)
    if gate_up is None:
        raise NotNative("its shared expert's layers of one input are no single product")
    return Expert(gate_up.struct, down.struct)


def _lossless(weights: list[NDArray[Any]]) -> str:
    """bfloat16 where it holds all weights exactly, else float32. A router is never quantized: an error in it would send
    tokens to other experts."""
    exact = all(np.array_equal(weight.astype(bfloat16).astype(weight.dtype), weight) for weight in weights)
    return "bfloat16" if exact else "float32"


_HEAD_NORMS = {
    None: EACH_HEAD,
    "each_head": EACH_HEAD,
    "each_own_head": EACH_HEAD,
    "each_turned_head": EACH_TURNED_HEAD,
    "all_heads": ALL_HEADS,
}
SOFTPLUS_IS_LINEAR = 20.0
"""From there on torch's softplus is its argument."""
RECURRENT = ("conv", "linear_attn", "mamba")
"""Names of the modules of recurrent layers."""


class Plan:
    """A model as the compiled step reads it. Keeps alive what the struct points to."""

    def __init__(self, model: Any, layout: CacheLayout) -> None:
        """Raises NotNative."""
        if not isinstance(model, CausalModel):
            raise NotNative(f"the modules of its {type(model).__name__} are transformers'")
        config = model.config
        body = model.model
        family = FAMILIES[model.config.model_type]
        for layer in layout.layers:
            require(layer.head_dim % WHOLE_VECTORS == 0, f"its heads are {layer.head_dim} wide")
        self.head = _packed(model.lm_head)
        self.threads = self.head.threads
        rotaries = Rotaries(body.rotaries, config.rope_neighbours)
        self._latents = list[Any]()
        self._alternations = list[Any]()
        mixtures = Mixtures(self.threads)
        recurrent = RecurrentLayers(layout.state)
        layers = list[Layer]()
        self._ones = list[NDArray[Any]]()
        for layer, kind, rotated in zip(body.layers, config.layer_types, config.rotated, strict=True):
            beside = None if family.experts is None else family.experts.beside
            mixture = mixtures.add(getattr(layer, "mlp", None) if beside is None else layer, config)
            layers.append(_layer(layer, config, family, mixture))
            if config.alternation is not None:
                self._add_alternation(layers[-1], layer, config)
            sparsity = config.sparsity[len(layers) - 1]
            if sparsity > 0:
                layers[-1].sparse = 1
                layers[-1].cutoff = NormalDist().inv_cdf(sparsity)
                layers[-1].whole_inner = config.feed_forward_widths[len(layers) - 1]
            if mixture >= 0 and beside is not None:
                layers[-1].beside = 1
                layers[-1].after_network, mixtures.structs[mixture].before, mixtures.structs[mixture].after = (
                    _norm(getattr(layer, name)) for name in beside
                )
            if recurs(kind):
                module: Any = next(getattr(layer, name) for name in RECURRENT if hasattr(layer, name))
                recurrent.add(layers[-1], module)
                layers[-1].attention_out = _packed(module.out_proj).struct
            if attends(kind):
                place = sum(map(attends, config.layer_types[: len(layers) - 1]))
                if config.latent is None:
                    _add_attention(layers[-1], layer.self_attn, family, layout.layers[place], config.v_head_dim)
                else:
                    self._add_latent(layers[-1], layer.self_attn, config.latent)
                if family.value_norm:
                    layers[-1].value = self._unweighted_norm(layers[-1].head_dim, config.rms_norm_eps)
                layers[-1].slab, layers[-1].cache = layout.places[place]
                layers[-1].rotary = rotaries.index(kind) if rotated else rotaries.unturned
                if rotated and config.unweighted_head_norms:
                    norm = self._unweighted_norm(layers[-1].head_dim, config.rms_norm_eps)
                    layers[-1].query = layers[-1].key = norm
                    layers[-1].head_norms = EACH_TURNED_HEAD
        self._layers = (Layer * len(layers))(*layers)
        self._mixtures = mixtures
        self._recurrent = recurrent
        self._rotaries = rotaries.structs
        self._frequencies = rotaries.frequencies
        self.model = Model(
            layers=ctypes.addressof(self._layers),
            depth=len(layers),
            hidden=config.hidden_size,
            heads=_heads(layers, config),
            rotaries=ctypes.addressof(self._rotaries),
            rotary_count=len(self._rotaries),
            mixtures=ctypes.addressof(mixtures.structs),
            mixture_count=len(mixtures.structs),
            recurrent=ctypes.addressof(recurrent.structs),
            recurrent_count=len(recurrent.structs),
            cached=library.NUMBERS["float32" if layout.stored is None else layout.stored.kind],
            output_gate=int(family.output_gate),
            attention_scale=config.scaling,
            attention_cap=config.attention_cap,
            logit_cap=config.logit_cap,
            inputs=_layer_inputs(body, config),
            **self._streams(body, config),
            logit_scale=config.logit_scale,
            last=_norm(body.norm),
            head=self.head.struct,
        )

    def _add_latent(self, to: Layer, attention: Any, widths: Latent) -> None:
        matrices: PackedHeads = attention.kv_b_proj
        heads = len(matrices.keys)
        keys = (Linear * heads)(*(matrix.struct for matrix in matrices.keys))
        values = (Linear * heads)(*(matrix.struct for matrix in matrices.values))
        latent = library.Latent(
            down=_joined(attention, "q_a_proj_kv_a_proj_with_mqa", "kv_a_proj_with_mqa"),
            queries=_joined(attention, "q_b_proj", "q_proj"),
            query=_norm(getattr(attention, "q_a_layernorm", None)),
            shared=_norm(attention.kv_a_layernorm),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            query_rank=widths.query_rank,
            rank=widths.rank,
            turned=widths.turned,
            plain=widths.plain,
            value_dim=widths.value_dim,
        )
        self._latents += [keys, values, latent]
        to.latent = ctypes.addressof(latent)
        to.stored = KEYS_ALONE
        to.query_key_value = Linear(outputs=(heads + 1) * widths.row)
        to.attention_out = _packed(attention.o_proj).struct
        to.shared_heads = 1
        to.head_dim = widths.row
        to.value_dim = widths.row

    def _add_alternation(self, to: Layer, layer: Any, config: Any) -> None:
        by = layer.altup
        scaled = np.ascontiguousarray(by.router_norm.weight / np.float32(config.hidden_size))
        numbers = [linear.weight for linear in (by.modality_router, by.prediction_coefs, by.correction_coefs)]
        router, prediction, correction = (np.ascontiguousarray(matrix, np.float32) for matrix in numbers)
        alternation = library.Alternation(
            routed=Norm(scaled.ctypes.data, by.router_norm.eps),
            router=router.ctypes.data,
            prediction=prediction.ctypes.data,
            correction=correction.ctypes.data,
            output_scale=by.correct_output_scale.ctypes.data if config.alternation.scaled else None,
            narrow=_packed(layer.laurel.linear_left).struct,
            widen=_packed(layer.laurel.linear_right).struct,
            widened=_norm(layer.laurel.post_laurel_norm),
        )
        self._alternations += [scaled, router, prediction, correction, alternation]
        to.alternation = ctypes.addressof(alternation)

    def _streams(self, body: Any, config: Any) -> dict[str, Any]:
        """The fields of a model whose hidden rows are several streams."""
        if config.alternation is None:
            return {}
        further = config.alternation.streams - 1
        into, out_of = (
            (Linear * further)(*(_packed(getattr(owner, str(number))).struct for number in range(further)))
            for owner in (body.altup_projections, body.altup_unembed_projections)
        )
        self._alternations += [into, out_of]
        return {
            "streams": config.alternation.streams,
            "active": config.alternation.active,
            "into_streams": ctypes.addressof(into),
            "out_of_streams": ctypes.addressof(out_of),
        }

    def _unweighted_norm(self, width: int, eps: float) -> Norm:
        self._ones.append(np.ones(width, np.float32))
        return Norm(self._ones[-1].ctypes.data, eps)


class Rotaries:
    """The rotary embeddings of a model: one, or one for each kind of layer."""

    def __init__(self, by_kind: dict[str, Rotary], neighbours: bool) -> None:
        self._kinds = list(by_kind)
        self.frequencies = [np.ascontiguousarray(rotary.inv_freq, np.float32) for rotary in by_kind.values()]
        self.structs = (library.Rotary * len(by_kind))(
            *(
                library.Rotary(
                    numbers.ctypes.data, rotary.attention_scaling, 2 * numbers.size, int(neighbours), *rotary.growth
                )
                for rotary, numbers in zip(by_kind.values(), self.frequencies, strict=True)
            )
        )

    def index(self, kind: str) -> int:
        """The place of a layer's embedding among `structs`."""
        if kind in self._kinds or len(self._kinds) == 1:
            return self._kinds.index(kind) if kind in self._kinds else 0
        return self._kinds.index("")

    @property
    def unturned(self) -> int:
        """That of layers that don't rotate queries; -1 where they get nothing."""
        return self._kinds.index(UNTURNED) if UNTURNED in self._kinds else -1


def _heads(layers: list[Layer], config: Any) -> int:
    """Query heads of this rank."""
    first = next(layer for layer in layers if layer.shared_heads)
    return first.attention_out.inputs // (first.value_dim if config.latent is None else config.latent.value_dim)


def _layer(layer: Any, config: Any, family: Family, mixture: int) -> Layer:
    """The description of a layer without its attention, or the layer that it has instead."""
    feed_forward = getattr(layer, "mlp", None)
    beside = family.experts is not None and family.experts.beside is not None
    dense = feed_forward is not None and (mixture < 0 or beside)
    has_input = hasattr(layer, "per_layer_input_gate")
    norms = [_norm(getattr(layer, name) if name else None) for name in config.norms]
    before_attention, after_attention, before_feed_forward, after_feed_forward = norms
    return Layer(
        before_attention=before_attention,
        after_attention=after_attention,
        before_feed_forward=before_feed_forward,
        after_feed_forward=after_feed_forward,
        gate_up=_joined(feed_forward, "gate_proj_up_proj", "gate_up_proj", "up_proj") if dense else Linear(),
        down=_packed(feed_forward.down_proj).struct if feed_forward is not None and dense else Linear(),
        gate=_gate(feed_forward, config, family),
        mixture=mixture,
        recurrent=-1,
        parallel=int(family.parallel),
        input_gate=_packed(layer.per_layer_input_gate).struct if has_input else Linear(),
        input_projection=_packed(layer.per_layer_projection).struct if has_input else Linear(),
        after_input=_norm(layer.post_per_layer_input_norm if has_input else None),
        attended_scale=config.attended_scale,
        fed_scale=config.fed_scale,
        scale=layer.layer_scalar.item() if family.layer_scales else 1.0,
    )


def _layer_inputs(body: Any, config: Any) -> LayerInputs:
    """The inputs that layers have of their own."""
    width = config.hidden_size_per_layer_input
    if not width:
        return LayerInputs()
    return LayerInputs(
        width=width,
        projection=_packed(body.per_layer_model_projection).struct,
        norm=_norm(body.per_layer_projection_norm),
        projected_scale=config.hidden_size**-0.5,
        scale=2**-0.5,
    )


def _gate(feed_forward: Any, config: Any, family: Family) -> Gate:
    if hasattr(feed_forward, "act_fn"):
        return _xielu(feed_forward.act_fn)
    clamp: tuple[float, float] | None = getattr(config, "clamp", None)
    if clamp is not None:
        return Gate(CLAMPED_SWIGLU, *clamp, scale=1.0)
    return Gate(config.activation, alone=int(not family.is_gated), scale=config.gate_scale)


def _xielu(learned: Any) -> Gate:
    """As transformers' `XIELUActivation` has it."""
    positive, negative = (_softplus(parameter.item()) for parameter in (learned.alpha_p, learned.alpha_n))
    linear = learned.beta.item()
    least = learned.eps.item()
    return Gate(XIELU, alone=1, positive=positive, negative=linear + negative, linear=linear, least=least, scale=1.0)


def _softplus(number: float) -> float:
    return number if number > SOFTPLUS_IS_LINEAR else math.log1p(math.exp(number))


def _add_attention(to: Layer, attention: Any, family: Family, cache: LayerCache, value_dim: int | None) -> None:
    query, key = (getattr(attention, name, None) for name in family.head_norm_names)
    to.query = _norm(query)
    to.key = _norm(key)
    to.head_norms = _HEAD_NORMS[family.head_norms]
    to.head_norm_step = query.weight.shape[-1] if query is not None and family.head_norms == "each_own_head" else 0
    if cache.source is not None:
        to.stored = NEITHER
        to.query_key_value = _packed(attention.q_proj).struct
    elif hasattr(attention, "q_proj_k_proj"):
        to.stored = KEYS_ALONE
        to.query_key_value = _packed(attention.q_proj_k_proj).struct
    else:
        to.stored = BOTH
        with_gates = "q_proj_k_proj_v_proj_g_proj"
        to.query_key_value = _joined(attention, with_gates, "q_proj_k_proj_v_proj", "qkv_proj")
        to.head_gates = int(hasattr(attention, with_gates))
    to.attention_out = _packed(attention.o_proj).struct
    to.sinks = address_of(getattr(attention, "sinks", None))
    to.window = cache.window or 0
    to.chunk = to.window if cache.chunked else 0
    to.shared_heads = cache.kv_heads
    to.head_dim = cache.head_dim
    to.value_dim = value_dim or cache.head_dim


def _norm(norm: modules.Norm | None) -> Norm:
    if norm is None:
        return Norm(None, 0.0)
    weight, bias = (address_of(numbers) for numbers in (norm.weight, norm.bias))
    return Norm(weight, norm.eps, centered=int(norm.centered), bias=bias)


def _joined(parent: Any, *names: str) -> Linear:
    """The product that has a name of `names`: that which loading joined, or one that is stored so. Raises NotNative for
    layers of one input that could not be joined."""
    return _packed(next((getattr(parent, name) for name in names if hasattr(parent, name)), None)).struct


def _packed(linear: Any) -> PackedLinear:
    require(isinstance(linear, PackedLinear), "its layers of one input are no single product")
    return linear
