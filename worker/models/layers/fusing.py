"""Linear layers of one input as one product: query, key and value, gate and up, and those of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "k_proj"),  # where the values are the keys
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)

UNPACKED = {"mlp.shared_expert_gate", "router.proj"}
"""Layers that stay as they are: with one output, or whose scores choose experts."""


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers `names` of the module `parent` (dotted): one, or several that always get the same input."""

    parent: str
    names: tuple[str, ...]

    def full_names(self) -> list[str]:
        return [f"{self.parent}.{name}" for name in self.names]


def linear_groups(model: nn.Module, head: nn.Module) -> Iterator[LinearGroup]:
    """Every linear layer but the head and those of UNPACKED, once. Siblings are joined where both all or none have a
    bias."""
    for path, parent in model.named_modules():
        alone = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for names in SIBLINGS:
            found = [alone[name] for name in names if name in alone]
            if len(found) == len(names) and len({(one.in_features, _has_bias(one)) for one in found}) == 1:
                yield LinearGroup(path, names)
                for name in names:
                    del alone[name]
        for name, child in alone.items():
            if child is not head and f"{path.rpartition('.')[2]}.{name}" not in UNPACKED:
                yield LinearGroup(path, (name,))


def _has_bias(linear: Any) -> bool:
    return linear.bias is not None  # nn.Linear declares a parameter, and holds None


class FusedLinear(nn.Module):
    """One product for siblings: whoever is asked first multiplies for all, the others take their part of the result."""

    def __init__(self, linear: nn.Module, widths: list[int]) -> None:
        super().__init__()
        self.linear, self._widths = linear, widths
        self._inputs: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._unread = 0

    def part(self, index: int, inputs: Tensor) -> Tensor:
        """The outputs of sibling `index`, a view. The same input is known by its identity, so any order is right."""
        if inputs is not self._inputs:
            self._parts = self.linear(inputs).split(self._widths, -1)
            self._inputs, self._unread = inputs, len(self._widths)
        result = self._parts[index]
        self._unread -= 1
        if not self._unread:
            # Nothing outlives its layer, and no tensor is ever taken for a later one.
            self._inputs, self._parts = None, ()
        return result


def install(model: nn.Module, group: LinearGroup, linear: nn.Module, widths: list[int]) -> None:
    """Put `linear`, which holds the whole group, where the group's layers were."""
    parent: Any = model.get_submodule(group.parent)
    if len(group.names) == 1:
        setattr(parent, group.names[0], linear)
        return
    fused = FusedLinear(linear, widths)
    setattr(parent, "_".join(group.names), fused)
    for index, name in enumerate(group.names):
        delattr(parent, name)
        # Not a module: saves a look-up and a call through torch's hooks, per layer and step.
        setattr(parent, name, partial(fused.part, index))
