"""Sizes that attention kernels are compiled for, and the arguments that all of them take."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from worker.kv.base import Variant
from worker.kv.torch.pages import PagedBatch

LOG2_E = 1.4426950408889634
"""Kernels compute powers of two: exp(x) = 2 ** (x · log2 e)."""

SMALLEST = 16
"""Rows and columns of the smallest matrix product that tensor cores have."""

NO_WINDOW = 2**30

PLACES = ("owners", "positions", "singles")
"""Arguments that are parts of one tensor and begin anywhere in it. A kernel that relied on where they begin would be
compiled anew in the middle of serving."""


def padded(size: int) -> int:
    """The power of two that holds `size`, large enough for a matrix product."""
    return max(SMALLEST, triton.next_power_of_2(size))


def keys_at_once(dim: int, dtype: torch.dtype) -> int:
    """Keys that a program holds in shared memory at once, so that two stages of keys and values fit on any GPU."""
    bytes_per_key = padded(dim) * dtype.itemsize
    return 64 if bytes_per_key <= 256 else 32 if bytes_per_key <= 512 else 16


def widened(tensor: Tensor) -> bool:
    """True if products need float32 copies, because Triton's interpreter multiplies bfloat16 as integers. Tensor cores
    give the same result: they sum exact products in float32."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16


def arguments(query: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch, variant: Variant) -> dict[str, Any]:
    """By name, what prefill and decode alike are launched with."""
    heads, _, dim = query.shape
    _, kv_heads, block_tokens, _ = pages[0].shape
    return {
        "query": query,
        "key_pages": pages[0],
        "value_pages": pages[1],
        "tables": batch.tables,
        "owners": batch.owners,
        "positions": batch.positions,
        "sinks": query if variant.sinks is None else variant.sinks,
        "query_head": query.stride(0),
        "query_token": query.stride(1),
        "table_row": batch.tables.stride(0),
        "scale": variant.scaling,
        "cap": variant.softcap or 1.0,
        "window": variant.window or NO_WINDOW,
        "CAPPED": variant.softcap is not None,
        "SINKS": variant.sinks is not None,
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "PADDED_DIM": padded(dim),
        "PAGE": block_tokens,
        "KEYS": keys_at_once(dim, query.dtype),
        "WIDENED": widened(query),
        "LOG2_E": LOG2_E,
    }
