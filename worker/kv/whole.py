"""The store of a model without a cache: each sequence is one row of one step, and attends to itself alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.kv.base import Extent, Stateless, Variant

Bias = Callable[[int], Tensor]
"""(1, heads, n, n) for a sequence of n tokens."""


@dataclass(frozen=True)
class WholeLayout:
    """Attention of sequences that are computed whole. `causal`: a position attends to none after it."""

    causal: bool
    dtype: torch.dtype
    device: torch.device


class WholeStep:
    """One step: the attention of each row over itself."""

    def __init__(self, layout: WholeLayout, extents: list[Extent]) -> None:
        self._layout, self.extents = layout, extents
        self._masks: dict[tuple[int, int], Tensor] = {}

    def part(self, rows: slice) -> tuple[slice, WholeStep]:
        """The tokens of neighbouring rows in the batch, and a step of these rows alone, for a thread of its own."""
        before = sum(extent.count for extent in self.extents[: rows.start])
        chosen = self.extents[rows]
        return slice(before, before + sum(extent.count for extent in chosen)), WholeStep(self._layout, chosen)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant, bias: Bias | None = None
    ) -> Tensor:
        """query (heads, T, dim), key and value (kv heads, T, dim) → (T, heads, dim). A window w lets a position see
        those less than w away. `bias` is added to the scores of a sequence, by its length; not beside a window."""
        if variant.softcap is not None or variant.sinks is not None:
            raise NotImplementedError("attention of whole sequences has no soft caps and no sinks")
        heads, tokens, dim = query.shape
        out = query.new_empty(tokens, heads, dim)
        start = 0
        for extent in self.extents:
            rows = slice(start, start := start + extent.count)
            windowed = variant.window is not None and variant.window < extent.count
            mask = self._mask(extent.count, variant.window or 0) if windowed else bias and bias(extent.count)
            attended = scaled_dot_product_attention(
                query[:, rows].unsqueeze(0),
                key[:, rows].unsqueeze(0),
                value[:, rows].unsqueeze(0),
                attn_mask=mask,
                is_causal=self._layout.causal and not windowed,
                scale=variant.scaling,
                enable_gqa=key.shape[0] != heads,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out

    def _mask(self, count: int, window: int) -> Tensor:
        """True where a position (row) sees another one (column)."""
        known = self._masks.get((count, window))
        if known is None:
            places = torch.arange(count, device=self._layout.device)
            behind = places[:, None] - places[None, :]
            known = behind.abs() < window
            if self._layout.causal:
                known &= behind >= 0
            self._masks[count, window] = known
        return known


class WholeStore(Stateless):
    """The lengths of the sequences, and no memory: a row is computed at once, and never continued."""

    supports_prefix_sharing = False
    block_tokens = 1

    def __init__(self, layout: WholeLayout, capacity_tokens: int) -> None:
        self._layout, self.capacity_tokens = layout, capacity_tokens
        self._lengths: dict[int, int] = {}

    @property
    def used_tokens(self) -> int:
        return sum(self._lengths.values())

    def rounded(self, tokens: int) -> int:
        return tokens

    def length(self, sid: int) -> int | None:
        return self._lengths.get(sid)

    def begin(self, extents: list[Extent], beside: Iterable[Extent] = ()) -> WholeStep:
        if any(extent.offset for extent in extents):
            raise RuntimeError("this model computes a sequence in one row, and the row does not begin at its start")
        return WholeStep(self._layout, extents)

    def commit(self, extents: list[Extent]) -> None:
        self._lengths.update({extent.sid: extent.end for extent in extents})

    def fork(self, sid: int, donor: int, count: int, *, take_over: bool, snapshots: bool = False) -> None:
        raise RuntimeError("this model has no cache that another sequence could begin with")

    def drop(self, sid: int) -> None:
        self._lengths.pop(sid, None)

    def clear(self) -> None:
        self._lengths.clear()
