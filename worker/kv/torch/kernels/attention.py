"""Attention over pages by Triton kernels: single tokens and chunks of one batch each in a launch of their own."""

from __future__ import annotations

from torch import Tensor

from worker.kv.base import Variant
from worker.kv.torch.kernels.decode import decode
from worker.kv.torch.kernels.pages import store
from worker.kv.torch.kernels.prefill import prefill
from worker.kv.torch.pages import PagedBatch


def attend(
    query: Tensor, key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch, variant: Variant
) -> Tensor:
    """See `PagedAttention`. float32, bfloat16 or float16; sums are float32. Waits for nothing on the device."""
    heads, tokens, dim = query.shape
    query, key, value = (one if one.stride(2) == 1 else one.contiguous() for one in (query, key, value))
    store(key, value, pages, batch)
    out = query.new_empty(tokens, heads, dim)
    if batch.singles.shape[0]:
        decode(query, out, pages, batch, variant)
    if batch.chunks:
        prefill(query, out, pages, batch, variant)
    return out
