"""This rank's part of each tensor of a checkpoint, by the role that a module has in its family; no torch."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from worker.families.family import Family
from worker.native.host import thread_count
from worker.weights.checkpoint import StoredTensors, checked
from worker.weights.sharding import OUTPUTS, ShardPlan, padded_share
from worker.weights.stored_matrix import StoredMatrix

GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class RankWeights:
    """Reads by the names of transformers' modules. What is read is as stored: arrays, or `StoredMatrix`; both may be
    views of the mapped file."""

    checkpoint: StoredTensors
    plan: ShardPlan
    family: Family

    def read(self, module: str, leaf: str, shape: tuple[int, ...]) -> Any:
        """The part of a parameter that has `shape` on all ranks together."""
        name = stored = f"{module}.{leaf}"
        for ours, theirs in self.family.stored_names:
            stored = stored.replace(ours, theirs)
        # A parameter that is no module's has a role by its own name.
        sharded = module if self.plan.role(module) is not None else name
        role, sizes = self.plan.role(sharded), list(shape)
        dim = 0 if role in OUTPUTS else 1 if role == "rowwise" and leaf == "weight" else None
        if dim is None:
            return checked(stored, self.checkpoint.read(stored), sizes)
        kept = self.plan.intervals(sharded, sizes[dim])
        sizes[dim] = sum(stop - start for start, stop in kept)
        return checked(stored, self.checkpoint.read(stored, dim, kept), sizes)

    def vocabulary(self, name: str, shape: tuple[int, ...]) -> Any:
        """The rows of a vocabulary's tensor, whose `shape` is that of all ranks together, padded with zeros to the
        number that all ranks share. A bias has the shape of its weights here."""
        start, stop, width = padded_share(shape[0], self.plan.rank, self.plan.world_size)
        whole = self.plan.world_size == 1
        rows = self.checkpoint.read(name) if whole else self.checkpoint.read(name, 0, [(start, stop)])
        checked(name, rows, [stop - start, *shape[1 : len(rows.shape)]])
        if isinstance(rows, StoredMatrix):
            return rows.padded(width)
        if missing := width - rows.shape[0]:
            return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
        return rows

    def first_row(self, rows: int) -> int:
        """The first of this rank's rows of a vocabulary."""
        return padded_share(rows, self.plan.rank, self.plan.world_size)[0]

    def expert(self, module: str, leaf: str, sizes: tuple[int, int], number: int) -> list[tuple[str, Any]]:
        """The matrices of one expert of the module `module`, gate and up, or down, with the names of the tensors.
        `sizes`: (hidden, inner width) of the whole model. The inner width is split, with the same columns of gate and
        up and rows of down on one rank."""
        hidden, width = sizes
        start, stop = self.plan.feed_forward_share(width)
        gate, up, down = self._names(module, number)
        if leaf == DOWN:
            return [(down, checked(down, self.checkpoint.read(down, 1, [(start, stop)]), [hidden, stop - start]))]
        shape = [stop - start, hidden]
        return [(key, checked(key, self.checkpoint.read(key, 0, [(start, stop)]), shape)) for key in (gate, up)]

    def expert_biases(self, module: str, leaf: str, sizes: tuple[int, int], number: int) -> list[Any]:
        """The biases of one expert: of gate and up, or of down."""
        hidden, width = sizes
        start, stop = self.plan.feed_forward_share(width)
        gate, up, down = (key.removesuffix("weight") + "bias" for key in self._names(module, number))
        if leaf == DOWN:
            bias = checked(down, self.checkpoint.read(down), [hidden])
            # The ranks' outputs are summed: one of them adds the bias.
            return [bias if self.plan.rank == 0 else np.zeros_like(bias)]
        return [checked(key, self.checkpoint.read(key, 0, [(start, stop)]), [stop - start]) for key in (gate, up)]

    def _names(self, module: str, number: int) -> list[str]:
        layer = re.match(r".*\blayers\.\d+\.", module)
        assert layer is not None and self.family.experts is not None
        return [layer[0] + key.format(number) for key in self.family.experts.tensors]


def are_experts(module: str) -> bool:
    """True if a module of the meta model holds the experts of a layer."""
    return module.endswith(".experts")


def have_biases(experts: Any) -> bool:
    """True for experts of gpt_oss. transformers keeps their matrices with the inputs first, gate and up in turn."""
    return hasattr(experts, f"{GATE_UP}_bias")


def sizes_of(experts: Any) -> tuple[int, int]:
    """(hidden, inner width) of each expert of the whole model."""
    _, first, second = experts.down_proj.shape
    return (second, first) if have_biases(experts) else (first, second)


def rounded(weights: Any, storage: np.dtype[Any] | None) -> Any:
    """Plain numbers in the type of 16 bits `storage`, saturated rather than infinite; others stay what they are."""
    if storage is None or isinstance(weights, StoredMatrix):
        return weights
    most = LARGEST[storage.name]
    rows = np.atleast_1d(weights)
    result = np.empty(rows.shape, storage)

    def fill(first: int) -> None:
        part = rows[first : first + step]
        wide = part if part.dtype.itemsize >= 4 else part.astype(np.float32)
        result[first : first + step] = np.clip(wide, -most, most)

    # Blocks that stay in the processor's caches, in threads: numpy needs no lock of Python's for them.
    step = max(1, _BLOCK * len(rows) // max(1, rows.size))
    with ThreadPoolExecutor(thread_count()) as threads:
        list(threads.map(fill, range(0, len(rows), step)))
    return result.reshape(weights.shape)


_BLOCK = 1 << 18
"""Numbers that a thread rounds at a time."""
LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127}
"""Of each type of 16 bits the largest number."""
