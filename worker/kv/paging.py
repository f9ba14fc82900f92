"""The inputs of attention over pages, by table row and position, and the interface of its two implementations.

Keys of one layer lie in pages, shape (blocks, kv heads, block tokens, dim), values alike. A sequence owns a row of
`tables`; entry i of it is the block of its positions i · block tokens and on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from worker.kv.variant import Variant


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The tokens of one step. Everything that a kernel reads is on the device, so that a graph can be replayed."""

    tables: Tensor
    """Block tables: (rows, width) int32."""
    owners: Tensor
    """(T,) int32: each token's row of `tables`, or -1 where it only fills up a bucket: it is not stored, and attends
    nothing."""
    positions: Tensor
    """Positions of the tokens in their sequences: (T,) integers."""
    singles: Tensor | None
    """(B,) int32: the tokens of sequences that add one token; None where that is every token of the batch."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(first token, count) of each sequence that adds more than one."""
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    @property
    def decoding(self) -> int:
        """How many sequences add one token."""
        return self.owners.shape[0] if self.singles is None else self.singles.shape[0]

    def tiles(self, tokens: int) -> Tensor:
        """The chunks cut into pieces of at most `tokens`, (pieces, 2) int32: first token and count."""
        if tokens not in self._tiles:
            pieces = [
                (first + done, min(tokens, count - done))
                for first, count in self.chunks
                for done in range(0, count, tokens)
            ]
            self._tiles[tokens] = torch.tensor(pieces, dtype=torch.int32).to(self.owners.device, non_blocking=True)
        return self._tiles[tokens]


class PagedAttention(Protocol):
    """Stores the new keys and values into pages, then attends each token to its own sequence."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pages: tuple[Tensor, Tensor],
        batch: PagedBatch,
        variant: Variant,
    ) -> Tensor:
        """query (heads, T, dim), key and value (kv heads, T, dim), `pages` of keys and of values → (T, heads, dim)."""
        ...
