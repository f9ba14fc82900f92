"""The one attention function that every served model calls, in place of transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from worker.kv.base import Attention, Variant

NAME = "furrow"

WINDOW = "masked_window"
"""The attribute with the width of the window of a module of attention that leaves it to the mask."""
GROWTH = "growing_queries"
"""The attribute with β, period and offset by which queries of a module grow (native/rotary.py), where transformers'
module would take a step's tokens for one sequence."""
CHUNKED = "masked_in_chunks"
"""The attribute that says if that is the length of chunks."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache_step: Attention | None = None,
    ends: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a flat batch: query (1, heads, T, dim), key and value (1, kv heads, T, dim) → (1, T, heads, dim).

    T counts the tokens of all sequences in order. `cache_step` stores the new keys and values, and attends each token
    to its own sequence. There is never a mask: the cache keeps causality, but for tokens that see as far as `ends`.
    """
    if cache_step is None:
        raise RuntimeError("the furrow attention needs the step's cache: call the model through ServedModel.forward")
    variant = Variant(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=getattr(module, WINDOW, None) if sliding_window is None else sliding_window,
        chunked=getattr(module, CHUNKED, False),
        softcap=softcap,
        sinks=s_aux,
        ends=ends,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    if (growth := getattr(module, GROWTH, None)) is not None:
        query = query * _grown(growth, cache_step, query)
    width = value.shape[-1]
    if width != key.shape[-1]:  # the cache has one width for both
        most = max(width, key.shape[-1])
        query, key, value = (pad(one, (0, most - one.shape[-1])) for one in (query, key, value))
    return cache_step.attend(layer, query[0], key[0], value[0], variant)[..., :width].unsqueeze(0), None


def _grown(growth: tuple[float, float, float], step: Any, like: Tensor) -> Tensor:
    """The factors of the queries of a step's tokens: (T, 1)."""
    scale, period, offset = growth
    places = [torch.arange(extent.offset, extent.end, dtype=torch.float64) for extent in step.extents]
    factors = 1 + scale * torch.log1p(((torch.cat(places) + offset) / period).floor())
    return factors.unsqueeze(1).to(like)
