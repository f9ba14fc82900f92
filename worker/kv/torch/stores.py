"""The pages of a GPU: how many there are, and which attention reads them."""

from __future__ import annotations

import importlib.util

import structlog
import torch

from worker.kv.base import CacheLayout
from worker.kv.torch import pages, plain_attention
from worker.selftest import switches

log = structlog.get_logger()

KERNEL_TYPES = {"float32", "bfloat16", "float16"}

GPU_SHARE = 0.9
"""KV memory's part of the memory that is free after the weights; the rest allows for fragmentation."""
GPU_WORKSPACE = 2**30
"""Bytes kept for what a step computes meanwhile, sampling above all: 256 rows of logits with their noise in 64 bits."""


def paged_store(
    layout: CacheLayout, kv_tokens: int | None, max_context: int, *, at_most: bool = False
) -> pages.PagedStore:
    """As `store_for` of worker/kv/stores.py, on a GPU."""
    torch.cuda.empty_cache()
    budget = gpu_budget(torch.cuda.mem_get_info(layout.device)[0])
    fitting = pages.tokens_that_fit(budget, layout)
    tokens = kv_tokens or fitting
    if at_most:
        tokens = min(tokens, fitting)
    return pages.PagedStore(layout, tokens, max_context, attention_for(layout))


def gpu_budget(free_bytes: int) -> int:
    """Bytes for keys and values, of those that are free on the device; never less than half of them."""
    return max(int(GPU_SHARE * free_bytes) - GPU_WORKSPACE, free_bytes // 2)


def attention_for(layout: CacheLayout) -> pages.PagedAttention:
    """Triton's kernels where they can be had for these numbers, else plain torch, which is right but slow."""
    reason = switches.reason_off(*switches.ATTENTION)
    if importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed"
    elif layout.dtype.name not in KERNEL_TYPES:
        reason = f"the kernels have no {layout.dtype}"
    if reason is not None:
        log.warning("attention runs without its kernels", reason=reason, action="choose_kernels")
        return plain_attention.attend
    from worker.kv.torch import paged_kernels as paged  # only here: Triton may be missing

    return paged.attend
