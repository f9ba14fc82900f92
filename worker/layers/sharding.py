"""The part of each parameter that a rank keeps: transformers' tensor-parallel plan, with key-value heads by head.

A column-parallel layer keeps rows of its weight (outputs), a row-parallel one keeps columns (inputs) and sums over the
ranks. Parameters that the plan does not name are kept whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from control.errors import UnsupportedArchitecture

WHOLE_ROLES = {"replicated_with_grad_allreduce", "replicated"}
ROLES = {"colwise", "rowwise", "packed_colwise", "moe_tp_experts"} | WHOLE_ROLES


def share(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rank's interval of `size` things; intervals differ by at most one where it does not divide."""
    return size * rank // world_size, size * (rank + 1) // world_size


def padded_share(size: int, rank: int, world_size: int) -> tuple[int, int, int]:
    """(start, stop, width): intervals of equal `width`, the last ones short or empty. For what is gathered."""
    width = -(-size // world_size)
    return min(size, rank * width), min(size, (rank + 1) * width), width


@dataclass(frozen=True)
class ShardPlan:
    """The plan of one rank. `plan` maps patterns of module or parameter names below the base model to roles."""

    plan: dict[str, str]
    kv_heads: int
    rank: int
    world_size: int

    @classmethod
    def of_config(cls, config: Any, kv_heads: int, rank: int, world_size: int) -> ShardPlan:
        """From a transformers configuration; raises UnsupportedArchitecture for a role that is not known here."""
        plan = dict(config.base_model_tp_plan or {})
        if world_size > 1:
            if not plan:
                raise UnsupportedArchitecture(
                    f"Model type '{config.model_type}' has no tensor-parallel plan. Use --tp 1."
                )
            if strange := sorted(set(plan.values()) - ROLES):
                raise UnsupportedArchitecture(
                    f"Model type '{config.model_type}' needs {', '.join(strange)} to be sharded. Use --tp 1."
                )
        return cls(plan, kv_heads, rank, world_size)

    def role(self, name: str) -> str | None:
        """The role of a module or parameter by its full name, e.g. `model.layers.3.mlp.up_proj`."""
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("model."))
        role = self.plan.get(generic)
        return None if role in WHOLE_ROLES else role

    def interval(self, module: str, size: int) -> tuple[int, int]:
        """The interval that this rank keeps of `size` outputs (or inputs) of a sharded module."""
        if module.endswith((".k_proj", ".v_proj")) and self.kv_heads < self.world_size:
            # Fewer key-value heads than ranks: neighbours share one, each with a full copy of it.
            head, width = self.rank * self.kv_heads // self.world_size, size // self.kv_heads
            return head * width, (head + 1) * width
        return share(size, self.rank, self.world_size)

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.world_size)
