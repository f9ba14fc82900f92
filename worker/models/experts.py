"""Experts: transformers keeps those of a layer in few tensors, most checkpoints as three matrices each, a CPU as two
packed layers each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from worker.layers.blocks import Weights
from worker.layers.packing import Pack
from worker.layers.sharding import ShardPlan, share
from worker.models.checkpoint import StoredTensors, checked

GATE_UP, DOWN = "gate_up_proj", "down_proj"
GATE_UP_BIAS, DOWN_BIAS = "gate_up_proj_bias", "down_proj_bias"
ExpertKeys = tuple[str, str, str]


def are_in(module: str) -> bool:
    """True if a module of the meta model holds the experts of a layer."""
    return module.endswith(".experts")


class PackedExperts(nn.Module):
    """The experts of a layer as linear layers: `gate_up[i]` (hidden → 2 · width) and `down[i]` (width → hidden)."""

    def __init__(self, gate_up: list[nn.Module], down: list[nn.Module], activation: Any) -> None:
        super().__init__()
        self.gate_up, self.down, self._activation = nn.ModuleList(gate_up), nn.ModuleList(down), activation

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden (T, hidden), chosen (T, k) experts with their weights (T, k) → (T, hidden)."""
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            tokens, places = torch.where(chosen == expert)
            gate, up = self.gate_up[expert](hidden[tokens]).chunk(2, dim=-1)
            found = self.down[expert](self._activation(gate) * up)
            out.index_add_(0, tokens, found * weights[tokens, places, None])
        return out


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
            parts = _matrices(checkpoint, plan, name, leaf, parameter, keys, expert)
            kept.append(pack([converted(stored, part) for stored, part in parts], None))
    return PackedExperts(layers[GATE_UP], layers[DOWN], getattr(module, "act_fn", None))


def read(
    checkpoint: StoredTensors, plan: ShardPlan, module: str, leaf: str, parameter: Tensor, keys: ExpertKeys | None
) -> Tensor:
    """The rank's part of what a layer's experts have as `leaf`. Each expert's inner width is split, with the same
    columns of gate and up and rows of down on one rank. `keys` is None where they are stored together."""
    if keys is None:
        return _read_together(checkpoint, plan, f"{module}.{leaf}", leaf, parameter)
    return _read_each(checkpoint, plan, module, leaf, parameter, keys)


def _read_each(
    checkpoint: StoredTensors, plan: ShardPlan, module: str, leaf: str, parameter: Tensor, keys: ExpertKeys
) -> Tensor:
    """gate_up_proj (experts, 2 · width, hidden), gate above up, or down_proj (experts, hidden, width)."""
    experts = range(parameter.shape[0])
    matrices = (_matrices(checkpoint, plan, module, leaf, parameter, keys, expert) for expert in experts)
    return torch.stack([torch.cat([part for _, part in parts]) for parts in matrices])


def _matrices(
    checkpoint: StoredTensors, plan: ShardPlan, module: str, leaf: str, parameter: Tensor, keys: ExpertKeys, expert: int
) -> list[tuple[str, Tensor]]:
    """The rank's part of one expert as stored, gate and up, or down, with the names of the tensors."""
    layer = module[: module.index(".mlp.") + 1]
    gate, up, down = (layer + key.format(expert) for key in keys)
    _, rows, columns = parameter.shape
    start, stop = plan.feed_forward_share(columns if leaf == DOWN else rows // 2)
    if leaf == DOWN:
        return [(down, checked(down, checkpoint.read(down, 1, [(start, stop)]), [rows, stop - start]))]
    shape = [stop - start, columns]
    return [(key, checked(key, checkpoint.read(key, 0, [(start, stop)]), shape)) for key in (gate, up)]


def _read_together(checkpoint: StoredTensors, plan: ShardPlan, name: str, leaf: str, parameter: Tensor) -> Tensor:
    """gate_up_proj (experts, hidden, 2 · width), gate and up in turn, down_proj (experts, width, hidden), and their
    biases (experts, outputs)."""
    if leaf in {GATE_UP, GATE_UP_BIAS}:
        last = parameter.dim() - 1
        start, stop = share(parameter.shape[last] // 2, plan.rank, plan.world_size)
        return checkpoint.read(name, last, [(2 * start, 2 * stop)])
    if leaf == DOWN:
        return checkpoint.read(name, 1, [share(parameter.shape[1], plan.rank, plan.world_size)])
    stored = checkpoint.read(name)
    # The ranks' outputs are summed: one of them adds the bias.
    return stored if plan.rank == 0 else torch.zeros_like(stored)
