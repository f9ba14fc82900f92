"""The memory that a rank needs, as `worker/models/need.py` finds it, and whether hosts have it. Data in, data out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class RankNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank. `weights` and `kv` are those that the rank reports."""

    weights: int
    kv: int
    """Keys, values and states of `kv_tokens` positions."""
    step: int
    """What the largest step works in."""
    process: int
    exact: bool = True
    """False where the weights are estimated."""
    kv_tokens: int = 0
    bytes_per_token: int = 0
    state_tokens: int = 0
    """Those of the KV tokens whose memory one sequence takes for its recurrent state."""

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

    def bytes_with(self, kv_tokens: int) -> list[int]:
        """Of each rank, with so many KV tokens."""
        return [rank.least + kv_tokens * rank.bytes_per_token for rank in self.ranks]

    def with_tokens(self, kv_tokens: int) -> list[RankNeed]:
        """Each rank with so many KV tokens."""
        return [
            msgspec.structs.replace(rank, kv=kv_tokens * rank.bytes_per_token, kv_tokens=kv_tokens)
            for rank in self.ranks
        ]

    @property
    def least_tokens(self) -> int:
        return min(self.context, LEAST_TOKENS)

    @property
    def context_tokens(self) -> int:
        """Those of one sequence of the whole context, with its recurrent state."""
        return self.context + max(rank.state_tokens for rank in self.ranks)


class HostFit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the ranks of one replica fit on one host, in bytes."""

    host: str
    needs: int
    has: int

    @property
    def fits(self) -> bool:
        return self.needs <= self.has


def fits_on(ranks: Sequence[RankNeed], hosts: Iterable[tuple[str, int]]) -> list[HostFit]:
    """For each host by name and free bytes: all ranks of a replica there."""
    needs = sum(rank.total for rank in ranks)
    return [HostFit(host=name, needs=needs, has=free) for name, free in hosts]


def most_kv_tokens(ranks: Sequence[RankNeed], free: int) -> int:
    """The most KV tokens with which all ranks fit in `free` bytes; 0 where not one does, or where there is no cache."""
    each = sum(rank.bytes_per_token for rank in ranks)
    left = free - sum(rank.least for rank in ranks)
    return max(0, left // each) if each else 0
