"""Experts in torch: transformers keeps those of a layer in few tensors, a CPU that packs them as two layers each.

They are read by the names of single experts, however a checkpoint stores them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from worker.models.shard import (
    DOWN,
    UP,
    RankWeights,
    first_leaf,
    have_biases,
    have_inputs_first,
    sizes_of,
)
from worker.models.torch.layers import Pack
from worker.tensors import as_tensor
from worker.weights.stored_matrix import StoredMatrix, Weights

Combine = Callable[[Tensor], Tensor]
"""The outputs of the first layer, gate before up → what the last matrix is multiplied by."""


class PackedExperts(nn.Module):
    """The experts of a layer as linear layers: `gate_up[i]` (hidden → 2 · width, or width
    where they have no gate) and `down[i]` (width → hidden)."""

    def __init__(self, gate_up: list[nn.Module], down: list[nn.Module], combine: Combine | None) -> None:
        """`combine` is None where C++ computes them."""
        super().__init__()
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)
        self._combine = combine

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden (T, hidden), chosen (T, k) experts with their weights (T, k) → (T, hidden)."""
        assert self._combine is not None
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            tokens, places = torch.where(chosen == expert)
            outputs = self.down[expert](self._combine(self.gate_up[expert](hidden[tokens])))
            out.index_add_(0, tokens, outputs * weights[tokens, places, None])
        return out


class PackedExpertsOfAll(PackedExperts):
    """The same of a type whose experts get every row, multiplied by its weight: 0 where an expert was not chosen."""

    def forward(self, weighted: Tensor) -> Tensor:  # type: ignore[override]  # as the module that it replaces
        """weighted (experts · T, hidden), the rows of an expert side by side → the same shape."""
        assert self._combine is not None
        rows = weighted.chunk(len(self.gate_up))
        pairs = zip(self.gate_up, self.down, rows, strict=True)
        return torch.cat([down(self._combine(first(inputs))) for first, down, inputs in pairs])


def clamped_swiglu(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """The gate of gpt_oss (transformers, models/gpt_oss/modeling_gpt_oss.py)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(slope * gate)


def packed_experts(
    weights: RankWeights, name: str, module: Any, converted: Callable[[str, Weights], Any], pack: Pack
) -> PackedExperts:
    """The rank's part of the experts `module`, named `name`, each expert read and packed by itself. `converted` takes
    a tensor's name and its part as stored, and gives what `pack` takes."""
    first = first_leaf(module)
    layers: dict[str, list[nn.Module]] = {first: [], DOWN: []}
    sizes = sizes_of(module, weights.family)
    for leaf, linears in layers.items():
        for expert in range(getattr(module, leaf).shape[0]):
            parts = weights.expert(name, leaf, sizes, expert)
            bias = torch.cat(_biases(weights, name, leaf, sizes, expert)) if have_biases(module) else None
            linears.append(pack([converted(stored, part) for stored, part in parts], bias))
    mixture = weights.family.experts
    kind = PackedExpertsOfAll if mixture is not None and mixture.weighted_inputs else PackedExperts
    return kind(layers[first], layers[DOWN], _combine(module))


def read_experts(weights: RankWeights, name: str, leaf: str, module: Any) -> Any:
    """The rank's part of what transformers' `module`, named `name`, of a layer's experts has as `leaf`."""
    role = leaf.removesuffix("_bias")
    sizes = sizes_of(module, weights.family)
    experts = range(getattr(module, leaf).shape[0])
    if leaf != role:
        return torch.stack([_in_turn(_biases(weights, name, role, sizes, expert)) for expert in experts])
    matrices = ([tensor_of(part) for _, part in weights.expert(name, role, sizes, expert)] for expert in experts)
    if have_biases(module):
        return torch.stack([_in_turn(parts).T for parts in matrices])
    stacked = torch.stack([torch.cat(parts) for parts in matrices])
    return stacked.transpose(1, 2) if have_inputs_first(module, weights.family) else stacked


def tensor_of(stored: Any) -> Any:
    """A stored array as a tensor over the same memory; a `StoredMatrix` is itself."""
    return stored if isinstance(stored, StoredMatrix | Tensor) else as_tensor(stored)


def _biases(weights: RankWeights, name: str, leaf: str, sizes: tuple[int, int], expert: int) -> list[Tensor]:
    return [tensor_of(part) for part in weights.expert_biases(name, leaf, sizes, expert)]


def _combine(module: Any) -> Combine | None:
    """None for modules without an activation of their own."""
    if hasattr(module, "alpha"):
        return partial(clamped_swiglu, slope=module.alpha, limit=module.limit)
    if not hasattr(module, "act_fn"):
        return None
    activation = module.act_fn
    if first_leaf(module) == UP:
        return activation

    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def _in_turn(parts: list[Tensor]) -> Tensor:
    """A row of each part in turn."""
    return torch.stack(parts, dim=1).flatten(0, 1)
