"""Experts: transformers keeps those of a layer in few tensors, a CPU as two packed layers each. They are read by the
names of single experts, however a checkpoint stores them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from worker.models.layers.packing import Pack
from worker.weights.checkpoint import StoredTensors, checked
from worker.weights.sharding import ShardPlan
from worker.weights.stored_matrix import Weights

GATE_UP, DOWN = "gate_up_proj", "down_proj"
ExpertKeys = tuple[str, str, str]
Combine = Callable[[Tensor, Tensor], Tensor]
"""(gate, up) → what the third matrix is multiplied by."""


def are_in_model(config: Any) -> bool:
    """True if a model of transformers' configuration has experts."""
    return hasattr(config, "num_experts_per_tok") or bool(getattr(config, "enable_moe_block", False))


def are_in(module: str) -> bool:
    """True if a module of the meta model holds the experts of a layer."""
    return module.endswith(".experts")


def have_biases(module: Any) -> bool:
    """True for experts of gpt_oss. transformers keeps their matrices with the inputs first, gate and up in turn."""
    return hasattr(module, f"{GATE_UP}_bias")


class PackedExperts(nn.Module):
    """The experts of a layer as linear layers: `gate_up[i]` (hidden → 2 · width) and `down[i]` (width → hidden)."""

    def __init__(self, gate_up: list[nn.Module], down: list[nn.Module], combine: Combine | None) -> None:
        """`combine` is None where C++ computes them."""
        super().__init__()
        self.gate_up, self.down, self._combine = nn.ModuleList(gate_up), nn.ModuleList(down), combine

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden (T, hidden), chosen (T, k) experts with their weights (T, k) → (T, hidden)."""
        assert self._combine is not None
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            tokens, places = torch.where(chosen == expert)
            gate, up = self.gate_up[expert](hidden[tokens]).chunk(2, dim=-1)
            found = self.down[expert](self._combine(gate, up))
            out.index_add_(0, tokens, found * weights[tokens, places, None])
        return out


def clamped_swiglu(gate: Tensor, up: Tensor, slope: float, limit: float) -> Tensor:
    """The gate of gpt_oss (transformers, models/gpt_oss/modeling_gpt_oss.py)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(slope * gate)


def packed(
    checkpoint: StoredTensors,
    plan: ShardPlan,
    name: str,
    module: Any,
    keys: ExpertKeys,
    converted: Callable[[str, Weights], Weights],
    pack: Pack,
) -> PackedExperts:
    """The rank's part of the experts `module`, named `name`, each expert read and packed by itself. `converted` takes
    a tensor's name and its part as stored."""
    layers: dict[str, list[nn.Module]] = {GATE_UP: [], DOWN: []}
    for leaf, kept in layers.items():
        parameter = getattr(module, leaf)
        for expert in range(parameter.shape[0]):
            parts = _matrices(checkpoint, plan, name, leaf, module, keys, expert)
            bias = (
                torch.cat(_biases(checkpoint, plan, name, leaf, module, keys, expert)) if have_biases(module) else None
            )
            kept.append(pack([converted(stored, part) for stored, part in parts], bias))
    return PackedExperts(layers[GATE_UP], layers[DOWN], _combine(module))


def read(
    checkpoint: StoredTensors, plan: ShardPlan, module_name: str, leaf: str, module: Any, keys: ExpertKeys
) -> Tensor:
    """The rank's part of what transformers' `module` of a layer's experts has as `leaf`. Each expert's inner width is
    split, with the same columns of gate and up and rows of down on one rank."""
    what, experts = leaf.removesuffix("_bias"), range(getattr(module, leaf).shape[0])
    if leaf != what:
        biases = (_biases(checkpoint, plan, module_name, what, module, keys, expert) for expert in experts)
        return torch.stack([_in_turn(parts) for parts in biases])
    matrices = (_matrices(checkpoint, plan, module_name, what, module, keys, expert) for expert in experts)
    if have_biases(module):
        return torch.stack([_in_turn([part for _, part in parts]).T for parts in matrices])
    return torch.stack([torch.cat([part for _, part in parts]) for parts in matrices])


def _combine(module: Any) -> Combine | None:
    """None for modules that are not transformers': they have no forward."""
    if hasattr(module, "alpha"):
        return partial(clamped_swiglu, slope=module.alpha, limit=module.limit)
    if not hasattr(module, "act_fn"):
        return None
    activation = module.act_fn
    return lambda gate, up: activation(gate) * up


def _sizes(module: Any) -> tuple[int, int]:
    """(hidden, inner width) of each expert of the whole model."""
    _, first, second = module.down_proj.shape
    return (second, first) if have_biases(module) else (first, second)


def _matrices(
    checkpoint: StoredTensors, plan: ShardPlan, module_name: str, leaf: str, module: Any, keys: ExpertKeys, expert: int
) -> list[tuple[str, Tensor]]:
    """The rank's part of one expert as stored, gate and up, or down, with the names of the tensors."""
    hidden, width = _sizes(module)
    start, stop = plan.feed_forward_share(width)
    gate, up, down = _names(module_name, keys, expert)
    if leaf == DOWN:
        return [(down, checked(down, checkpoint.read(down, 1, [(start, stop)]), [hidden, stop - start]))]
    shape = [stop - start, hidden]
    return [(key, checked(key, checkpoint.read(key, 0, [(start, stop)]), shape)) for key in (gate, up)]


def _biases(
    checkpoint: StoredTensors, plan: ShardPlan, module_name: str, leaf: str, module: Any, keys: ExpertKeys, expert: int
) -> list[Tensor]:
    """The rank's part of one expert's biases: of gate and up, or of down."""
    hidden, width = _sizes(module)
    start, stop = plan.feed_forward_share(width)
    gate, up, down = (key.removesuffix("weight") + "bias" for key in _names(module_name, keys, expert))
    if leaf == DOWN:
        bias = checked(down, checkpoint.read(down), [hidden])
        # The ranks' outputs are summed: one of them adds the bias.
        return [bias if plan.rank == 0 else torch.zeros_like(bias)]
    return [checked(key, checkpoint.read(key, 0, [(start, stop)]), [stop - start]) for key in (gate, up)]


def _names(module_name: str, keys: ExpertKeys, expert: int) -> list[str]:
    layer = re.match(r".*\blayers\.\d+\.", module_name)
    assert layer is not None
    return [layer[0] + key.format(expert) for key in keys]


def _in_turn(parts: list[Tensor]) -> Tensor:
    """A row of each part in turn."""
    return torch.stack(parts, dim=1).flatten(0, 1)
