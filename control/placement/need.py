"""The memory that a model needs, beside what hosts have: the KV memory of sequences, as all processes count it, and
the memory of a rank, as `worker/models/need.py` finds it. Data in, data out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

CHUNK_TOKENS = 512
"""The most tokens of a sequence that one step adds on a CPU."""
FREED_TOKENS = 256
"""Positions behind a window that are freed together, at most."""
AHEAD_TOKENS = 256
"""Positions that ranks may have cached of a running sequence beyond those that its leader knows of."""


class KVCost(msgspec.Struct, frozen=True):
    """Memory is counted in tokens: one is a position of all layers. A layer with a sliding window keeps only the last
    positions of a sequence, so that a long one takes fewer tokens than it has positions."""

    block_tokens: int = 1
    """Memory is handed out in blocks of so many positions."""
    state_tokens: int = 0
    """Those of the recurrent state of a sequence."""
    window: int = 0
    """Positions that a layer with a window sees; 0: memory of such layers is not freed."""
    windowed_bytes: int = 0
    """Of a position in the layers with windows."""
    bytes: int = 1
    """Of a position in all layers."""

    @property
    def _together(self) -> int:
        """Positions that are freed together."""
        return min(FREED_TOKENS, self.window)

    @property
    def _in_windows(self) -> int:
        """The most positions that layers with windows keep of a sequence: those between two steps, and a step's own."""
        return self.window + 2 * self._together + CHUNK_TOKENS

    def rounded(self, positions: int) -> int:
        """The tokens that a sequence of `positions` takes; 0 for none."""
        if not positions:
            return 0
        taken = positions
        if self.window and positions > self._in_windows:
            whole = positions - self._in_windows
            taken = self._in_windows - -whole * (self.bytes - self.windowed_bytes) // self.bytes
        return -(-taken // self.block_tokens) * self.block_tokens + self.state_tokens

    def longest(self, tokens: int, context: int) -> int:
        """The positions of the longest sequence that `tokens` hold, at most `context`."""
        rest = tokens - self.state_tokens
        if not self.window or rest <= self._in_windows:
            return max(0, min(rest, context))
        each = self.bytes - self.windowed_bytes
        return context if not each else min(context, self._in_windows + (rest - self._in_windows) * self.bytes // each)

    def freed(self, positions: int) -> int:
        """Of a sequence of `positions`, how many of the first ones layers with windows keep no more."""
        if not self.window:
            return 0
        return max(0, (positions - self.window - self._together) // self._together * self._together)

    @property
    def copy_tokens(self) -> int:
        """The tokens of a copy with which another sequence can begin where the sequence itself has gone on: of the
        recurrent state, and of what layers with windows keep."""
        positions = self.window + 2 * self._together if self.window else 0
        return self.state_tokens - -positions * self.windowed_bytes // self.bytes


PLAIN = KVCost()
"""Each position takes one token."""


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
