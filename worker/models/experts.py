"""Fused experts: transformers keeps all experts of a layer in few tensors, most checkpoints the matrices of each."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.layers.sharding import ShardPlan, share
from worker.models.checkpoint import StoredTensors

GATE_UP, DOWN = "gate_up_proj", "down_proj"
GATE_UP_BIAS, DOWN_BIAS = "gate_up_proj_bias", "down_proj_bias"
ExpertKeys = tuple[str, str, str]


def are_in(module: str) -> bool:
    """True if a module of the meta model holds the experts of a layer."""
    return module.endswith(".experts")


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
    layer = module[: module.index(".mlp.") + 1]
    gate, up, down = (layer + key for key in keys)
    count = parameter.shape[0]
    if leaf == DOWN:
        kept = share(parameter.shape[2], plan.rank, plan.world_size)
        return torch.stack([checkpoint.read(down.format(expert), 1, [kept]) for expert in range(count)])
    kept = share(parameter.shape[1] // 2, plan.rank, plan.world_size)
    return torch.stack(
        [torch.cat([checkpoint.read(key.format(expert), 0, [kept]) for key in (gate, up)]) for expert in range(count)]
    )


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
