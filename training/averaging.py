"""Averages the gradients of training processes, each on one thread with its own text, once a step."""

import torch
import torch.distributed as dist
from torch import nn


class Shared:
    """The membership of one process in the group. Raises torch.distributed's error when another process is gone.

    Processes wait for each other once a step; threads of one process would once an operation, which costs more on
    cores with other work.
    """

    def __init__(self, rank: int, size: int, meeting: str) -> None:
        self.rank, self.size = rank, size
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)

    def average(self, model: nn.Module, *values: float) -> list[float]:
        """Averages all gradients in place and `values` by the way, in one all-reduce; equal bits in every process."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients] + [torch.tensor(values)])
        dist.all_reduce(flat)
        flat /= self.size
        parts = flat[: -len(values)].split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return flat[-len(values) :].tolist()

    def close(self) -> None:
        """Leaves the group."""
        dist.destroy_process_group()
