"""torch's attention of sequences that are computed whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.kv.base import Extent, Variant, WholeLayout

Bias = Callable[[int], Tensor]
"""(1, heads, n, n) for a sequence of n tokens."""


class WholeAttention:
    """One step: the attention of each row over itself."""

    def __init__(self, layout: WholeLayout, extents: list[Extent]) -> None:
        self._layout = layout
        self.extents = extents
        self._masks: dict[tuple[int, int], Tensor] = {}

    def part(self, rows: slice) -> tuple[slice, WholeAttention]:
        """The tokens of neighbouring rows in the batch, and a step of these rows alone, for a thread of its own."""
        before = sum(extent.count for extent in self.extents[: rows.start])
        chosen = self.extents[rows]
        return slice(before, before + sum(extent.count for extent in chosen)), WholeAttention(self._layout, chosen)

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
        mask = self._masks.get((count, window))
        if mask is None:
            places = torch.arange(count, device=self._layout.device)
            behind = places[:, None] - places[None, :]
            mask = behind.abs() < window
            if self._layout.causal:
                mask &= behind >= 0
            self._masks[count, window] = mask
        return mask
