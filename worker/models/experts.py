"""Fused experts: transformers keeps all experts of a layer in two tensors, the checkpoint keeps each one's matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.layers.sharding import ShardPlan, share
from worker.models.checkpoint import Checkpoint

GATE_UP, DOWN = "gate_up_proj", "down_proj"
ExpertKeys = tuple[str, str, str]


def is_fused(module: str, leaf: str) -> bool:
    """True if a parameter of the meta model is built from several tensors of the checkpoint."""
    return module.endswith(".experts") and leaf in {GATE_UP, DOWN}


def read(
    checkpoint: Checkpoint, plan: ShardPlan, module: str, leaf: str, parameter: Tensor, keys: ExpertKeys
) -> Tensor:
    """The rank's part: gate_up_proj (experts, 2 · width, hidden), gate above up, or down_proj (experts, hidden, width).
    Each expert's inner width is split, with the same columns of gate and up and rows of down on one rank."""
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
