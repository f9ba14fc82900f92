"""Mixtures of experts as the compiled step reads them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from worker.models.experts import PackedExperts
from worker.models.layers.linear import NativeLinear
from worker.models.layers.parallel import ReducedExperts, RowParallelLinear
from worker.models.native.unsupported import NotNative, require
from worker.native.library import Expert, Linear, Mixture, Norm, Threads

CORRECTION = "e_score_correction_bias"
"""The buffer, of a mixture or of its router, with what is added to scores for the choice of experts."""


class Mixtures:
    """The mixtures of a model's layers, in order. `structs` is for C++; keeps alive what they point to."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.structs = (Mixture * 0)()
        self._kept: list[Any] = []

    def add(self, block: Any, config: Any) -> int:
        """The place of a layer's mixture among `structs`; -1 for a `block` without experts. It is the feed-forward
        module, or the layer where the experts are beside that. Raises NotNative."""
        experts = getattr(block, "experts", None)
        if experts is None:
            return -1
        if isinstance(experts, ReducedExperts):
            experts = experts.experts
        if not isinstance(experts, PackedExperts):
            raise NotNative(f"its {type(experts).__name__} is torch's")
        pairs = [
            Expert(_struct(gate_up), _struct(down)) for gate_up, down in zip(experts.gate_up, experts.down, strict=True)
        ]
        # gpt_oss has another name for it, and a bias.
        gate = block.router if hasattr(block, "router") else block.gate
        scaled = hasattr(gate, "per_expert_scale")
        router = [gate.proj.weight if scaled else gate.weight]
        shared = getattr(block, "shared_expert", getattr(block, "shared_experts", None))
        if shared is not None:
            pairs.append(_shared(shared, sharded=experts is not block.experts))
        shared_gate = getattr(block, "shared_expert_gate", None)
        if shared_gate is not None:
            router.append(shared_gate.weight)
        correction = getattr(gate, CORRECTION, getattr(block, CORRECTION, None))
        structs = (Expert * len(pairs))(*pairs)
        routing = NativeLinear(router, getattr(gate, "bias", None), [_lossless(router)] * len(router), self._threads)
        self._kept += [structs, routing, correction]
        before_router = Norm()
        if scaled:
            weight = gate.scale * config.hidden_size**-0.5
            before_router = Norm(weight.data_ptr(), config.rms_norm_eps)
            self._kept += [weight, gate.per_expert_scale]
        self.structs = (Mixture * (len(self.structs) + 1))(
            *self.structs,
            Mixture(
                before_router=before_router,
                expert_scales=gate.per_expert_scale.data_ptr() if scaled else None,
                router=routing.struct,
                experts=ctypes.addressof(structs),
                count=len(experts.gate_up),
                chosen=config.num_experts_per_tok,
                sigmoid=int(config.sigmoid_scores),
                correction=None if correction is None else correction.data_ptr(),
                groups=config.expert_groups,
                chosen_groups=config.chosen_groups,
                normalized=int(config.norm_topk_prob),
                scale=config.expert_scale,
                shared=int(shared is not None),
                shared_gate=int(shared_gate is not None),
            ),
        )
        return len(self.structs) - 1


def _shared(expert: Any, sharded: bool) -> Expert:
    down = expert.down_proj
    if sharded:
        require(isinstance(down, RowParallelLinear), "its shared expert is whole on each rank")
        down = down.partial
    both = expert.gate_up_proj if hasattr(expert, "gate_up_proj") else expert.gate_proj_up_proj.linear
    return Expert(_struct(both), _struct(down))


def _struct(linear: nn.Module) -> Linear:
    if not isinstance(linear, NativeLinear):
        raise NotNative(f"its {type(linear).__name__} is torch's")
    return linear.struct


def _lossless(weights: list[Tensor]) -> torch.dtype:
    """bfloat16 where it holds all weights exactly, else float32. A router is never quantized: an error in it would send
    tokens to other experts."""
    exact = all(torch.equal(weight.bfloat16().to(weight.dtype), weight) for weight in weights)
    return torch.bfloat16 if exact else torch.float32
