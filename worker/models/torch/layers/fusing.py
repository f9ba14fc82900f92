"""Linear layers of one input as one product: query, key and value, gate and up, and those of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from worker.models.shard import LinearGroup, groups_of


def linear_groups(model: nn.Module, head: nn.Module) -> Iterator[LinearGroup]:
    """Every linear layer but the head and those of UNPACKED, once. Siblings are joined where both all or none have a
    bias."""
    for path, parent in model.named_modules():
        linears: dict[str, Any] = {
            name: child for name, child in parent.named_children() if type(child) is nn.Linear and child is not head
        }
        # nn.Linear declares its bias as a parameter, and holds None.
        yield from groups_of(path, {name: (one.in_features, one.bias is not None) for name, one in linears.items()})


class FusedLinear(nn.Module):
    """One product for siblings: whoever is asked first multiplies for all, the others take their part of the result."""

    def __init__(self, linear: nn.Module, widths: list[int]) -> None:
        super().__init__()
        self.linear = linear
        self._widths = widths
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
            self._inputs = None
            self._parts = ()
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
