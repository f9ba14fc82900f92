"""The memory that a rank needs, as `worker/models/need.py` finds it, and whether hosts have it. Data in, data out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from control.placement.kv_cost import KVCost


class RankNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank. `weights` and `kv` are those that the rank reports."""

    weights: int
    kv: int
    """Keys, values and states of `kv_tokens` positions."""
    step: int
    """Bytes of scratch memory of the largest step."""
    process: int
    exact: bool = True
    """False where the weights are estimated."""
    kv_tokens: int = 0
    bytes_per_token: int = 0
    cost: KVCost = KVCost()
    """The KV tokens that sequences take."""

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.step + self.process

    @property
    def least(self) -> int:
        """Without KV memory."""
        return self.total - self.kv


LEAST_TOKENS = 4096
"""A model without `kv_tokens` is placed where it has KV memory for so many, or for its context if that is shorter."""


class ModelNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The need of each rank of a replica at a revision; `context`: the most positions of a sequence."""

    revision: int
    context: int
    ranks: list[RankNeed]
    """Of a host's memory, on CPUs; where the specification names accelerators for a rank, of theirs."""
    gpu_ranks: list[RankNeed] = []
    """Of an accelerator's memory, about; empty where the model can't be on one, or where that is not known."""
    unit_ranks: list[RankNeed] = []
    """Of a rank on CPUs that has one, two … of the `units` of all heads and widths; empty where ranks have even shares
    alone, or where that was not asked."""
    units: int = 0

    def rank_on(self, rank: int, device: str) -> RankNeed | None:
        """The need of a rank on a device; None where it is not known."""
        ranks = self.ranks if device == "cpu" else self.gpu_ranks
        return ranks[rank] if rank < len(ranks) else None

    def with_units(self, units: int) -> RankNeed | None:
        """The need of a rank on a CPU that has so many units; None where it is not known."""
        return self.unit_ranks[units - 1] if units <= len(self.unit_ranks) else None

    def bytes_with(self, kv_tokens: int) -> list[int]:
        """Of each rank, with so many KV tokens."""
        return [rank.least + kv_tokens * rank.bytes_per_token for rank in self.ranks]

    def with_tokens(self, kv_tokens: int) -> ModelNeed:
        """The same with so many KV tokens."""
        several = (
            [msgspec.structs.replace(rank, kv=kv_tokens * rank.bytes_per_token, kv_tokens=kv_tokens) for rank in ranks]
            for ranks in (self.ranks, self.gpu_ranks)
        )
        ranks, gpu_ranks = several
        return msgspec.structs.replace(self, ranks=ranks, gpu_ranks=gpu_ranks)

    @property
    def least_tokens(self) -> int:
        return min(self.context, LEAST_TOKENS)

    @property
    def context_tokens(self) -> int:
        """Those of one sequence of the whole context, with its recurrent state."""
        return max(rank.cost.rounded(self.context) for rank in self.ranks)


class DeviceRoom(NamedTuple):
    """The bytes that ranks may still take of a device of a host; of `cpu` all CPU ranks together."""

    host: str
    left: int
    device: str = "cpu"


class HostFit(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a host's CPUs, or of an accelerator, beside the need of a replica's ranks there; in bytes."""

    host: str
    device: str = "cpu"
    needs: int
    has: int

    @property
    def fits(self) -> bool:
        return self.needs <= self.has


def fits_on(need: ModelNeed, devices: Sequence[str], rooms: Iterable[DeviceRoom]) -> list[HostFit]:
    """Of hosts with accelerators each of these, unless the specification names other `devices`; of the others their
    memory."""
    rooms = list(rooms)
    accelerated = set[str]() if devices else {room.host for room in rooms if room.device != "cpu"}
    named = set(devices)
    fits = list[HostFit]()
    for room in rooms:
        ranks = need.ranks if room.device == "cpu" else need.gpu_ranks
        if (
            not ranks
            or room.host in (accelerated if room.device == "cpu" else ())
            or (named and room.device not in named)
        ):
            continue
        sizes = [rank.total for rank in ranks]
        needs = sum(sizes) if room.device == "cpu" else max(sizes)
        fits.append(HostFit(host=room.host, device=room.device, needs=needs, has=room.left))
    return fits


def is_enough(fits: Iterable[HostFit], tp: int) -> bool:
    """True if one host has the memory for all ranks, on its CPUs or on as many accelerators."""
    fitting = Counter((one.host, one.device == "cpu") for one in fits if one.fits)
    return any(on_cpus or count >= tp for (_, on_cpus), count in fitting.items())


def most_kv_tokens(ranks: Sequence[RankNeed], free: int) -> int:
    """The most KV tokens with which all ranks fit in `free` bytes; 0 where not one does, or where there is no cache."""
    each = sum(rank.bytes_per_token for rank in ranks)
    left = free - sum(rank.least for rank in ranks)
    return max(0, left // each) if each else 0
