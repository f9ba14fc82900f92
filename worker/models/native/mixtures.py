"""Mixtures of experts as the compiled step reads them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from worker.models.native.linear import PackedExperts, PackedLinear
from worker.models.native.modules import CORRECTION
from worker.models.native.unsupported import NotNative, require
from worker.native.library import Expert, Mixture, Norm, Threads


class Mixtures:
    """The mixtures of a model's layers, in order. `structs` is for C++; keeps alive what they point to."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.structs = (Mixture * 0)()
        self._kept: list[Any] = []

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
        correction = getattr(gate, CORRECTION, getattr(block, CORRECTION, None))
        structs = (Expert * len(pairs))(*pairs)
        routing = PackedLinear(router, getattr(gate, "bias", None), [_lossless(router)] * len(router), self._threads)
        self._kept += [structs, routing, correction]
        before_router = Norm()
        if scaled:
            weight = gate.scale * np.float32(config.hidden_size**-0.5)
            before_router = Norm(weight.ctypes.data, config.rms_norm_eps)
            self._kept += [weight, gate.per_expert_scale]
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
                correction=None if correction is None else correction.ctypes.data,
                groups=config.expert_groups,
                chosen_groups=config.chosen_groups,
                normalized=int(config.norm_topk_prob),
                scale=config.expert_scale,
                shared=int(shared is not None),
                shared_gate=int(shared_gate is not None),
            ),
        )
        return len(self.structs) - 1


def _shared(expert: Any, summed: bool) -> Expert:
    """Raises NotNative for an expert of which each rank has the whole beside others that are split."""
    down: PackedLinear = expert.down_proj
    require(down.summed == summed, "its shared expert is whole on each rank")
    both = getattr(expert, "gate_up_proj", getattr(expert, "gate_proj_up_proj", None))
    if both is None:
        raise NotNative("its shared expert's layers of one input are no single product")
    return Expert(both.struct, down.struct)


def _lossless(weights: list[NDArray[Any]]) -> str:
    """bfloat16 where it holds all weights exactly, else float32. A router is never quantized: an error in it would send
    tokens to other experts."""
    exact = all(np.array_equal(weight.astype(bfloat16).astype(weight.dtype), weight) for weight in weights)
    return "bfloat16" if exact else "float32"
