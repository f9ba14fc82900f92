"""Writes the new keys and values of a step into their pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.kv.torch.kernels.tiles import PLACES
from worker.kv.torch.pages import PagedBatch


# fmt: off
@triton.jit(do_not_specialize_on_alignment=PLACES)
def _store(key, value, key_pages, value_pages, tables, owners, positions,
           key_head, key_token, value_head, value_token, table_row,
           HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
           PADDED_HEADS: tl.constexpr, PADDED_DIM: tl.constexpr):
    """One token, all of its heads. A token without an owner is stored nowhere."""
    token = tl.program_id(0)
    owner = tl.load(owners + token)
    real = owner >= 0
    position = tl.load(positions + token).to(tl.int32)
    block = tl.load(tables + owner * table_row + position // PAGE, mask=real, other=0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    place = tl.arange(0, PADDED_DIM)[None, :]
    inside = (head < tl.where(real, HEADS, 0)) & (place < DIM)
    target = ((block * HEADS + head) * PAGE + position % PAGE) * DIM + place
    wide = token.to(tl.int64)
    new_key = tl.load(key + head * key_head + wide * key_token + place, mask=inside, other=0.0)
    tl.store(key_pages + target, new_key, mask=inside)
    new_value = tl.load(value + head * value_head + wide * value_token + place, mask=inside, other=0.0)
    tl.store(value_pages + target, new_value, mask=inside)
# fmt: on


def store(key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch) -> None:
    """key and value (kv heads, T, dim), dense along dim, into pages (blocks, kv heads, block tokens, dim)."""
    heads, tokens, dim = key.shape
    _store[(tokens,)](
        key,
        value,
        *pages,
        batch.tables,
        batch.owners,
        batch.positions,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        batch.tables.stride(0),
        HEADS=heads,
        DIM=dim,
        PAGE=pages[0].shape[2],
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED_DIM=triton.next_power_of_2(dim),
    )
