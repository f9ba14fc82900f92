"""Linear layers of one input, which are computed as one product: query, key and value, gate and up, and those of
recurrent layers; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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


def groups_of(parent: str, linears: Mapping[str, tuple[int, bool]]) -> Iterator[LinearGroup]:
    """The groups of the linear layers of one module, but for those of UNPACKED. `linears`: by name their number of
    inputs, and whether they have a bias: siblings are joined where both are equal."""
    alone = dict(linears)
    for names in SIBLINGS:
        forms = [alone[name] for name in names if name in alone]
        if len(forms) == len(names) and len(set(forms)) == 1:
            yield LinearGroup(parent, names)
            for name in names:
                del alone[name]
    for name in alone:
        if f"{parent.rpartition('.')[2]}.{name}" not in UNPACKED:
            yield LinearGroup(parent, (name,))
