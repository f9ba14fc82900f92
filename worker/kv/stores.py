"""Which store a rank keeps its keys and values in, and how large: slabs on a CPU, pages on a GPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import psutil
import structlog

from worker.kv import slabs
from worker.kv.base import CacheLayout, KVStore, WholeLayout
from worker.kv.whole import WholeStore
from worker.selftest import switches

if TYPE_CHECKING:
    from worker.kv.pages import PagedAttention  # it imports torch

log = structlog.get_logger()

KERNEL_TYPES = {"float32", "bfloat16", "float16"}

WHOLE_TOKENS = 65_536
"""Tokens of sequences without a cache that a leader holds at a time."""

GPU_SHARE = 0.9
"""KV memory's part of the memory that is free after the weights; the rest allows for fragmentation."""
GPU_WORKSPACE = 2**30
"""Bytes kept for what a step computes meanwhile, sampling above all: 256 rows of logits with their noise in 64 bits."""


def store_for(layout: CacheLayout | WholeLayout, kv_tokens: int | None, max_context: int, ranks: int) -> KVStore:
    """A store of `kv_tokens`, or as many as this rank's part of the free memory holds; `ranks` share a host's memory.
    Raises ValueError if not one block fits, NotMappable where a CPU can't map that much."""
    if isinstance(layout, WholeLayout):
        return WholeStore(layout, kv_tokens or max(max_context, WHOLE_TOKENS))
    if not layout.device.startswith("cuda"):
        free = psutil.virtual_memory().available // (2 * ranks)
        tokens = kv_tokens or slabs.mappable_tokens(layout, slabs.tokens_that_fit(free, layout), max_context)
        slabs.check_mappable(layout, tokens, max_context)
        return slabs.SlabStore(layout, tokens)
    import torch  # only here and below: slabs are numpy's, pages are torch's

    from worker.kv import pages

    torch.cuda.empty_cache()
    budget = gpu_budget(torch.cuda.mem_get_info(layout.device)[0])
    return pages.PagedStore(
        layout, kv_tokens or pages.tokens_that_fit(budget, layout), max_context, attention_for(layout)
    )


def gpu_budget(free_bytes: int) -> int:
    """Bytes for keys and values, of those that are free on the device; never less than half of them."""
    return max(int(GPU_SHARE * free_bytes) - GPU_WORKSPACE, free_bytes // 2)


def attention_for(layout: CacheLayout) -> PagedAttention:
    """Triton's kernels where they can be had for these numbers, else plain torch, which is right but slow."""
    reason = switches.reason_off(*switches.ATTENTION)
    if importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed"
    elif layout.dtype.name not in KERNEL_TYPES:
        reason = f"the kernels have no {layout.dtype}"
    if reason is not None:
        from worker.kv import gathered

        log.warning("attention runs without its kernels", reason=reason, action="choose_kernels")
        return gathered.attend
    from worker.kv.kernels import attention as paged  # only here: on a CPU neither Triton nor its kernels are loaded

    return paged.attend
