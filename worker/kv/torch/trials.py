"""Trials of attention over pages: the store of new keys and values, decode rows and chunks, in the model's variants."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from worker.kv.base import Extent, Variant
from worker.kv.torch import plain_attention
from worker.kv.torch.pages import BLOCK_TOKENS, PagedBatch, paged_batch
from worker.selftest.trial import TrialCase, TrialRequest

SEQUENCES = 8


class Scene:
    """Pages with random keys and values, in random order, and new tokens for some sequences."""

    def __init__(self, request: TrialRequest, extents: list[Extent]) -> None:
        shapes = request.shapes
        self.extents = extents
        width = -(-max(extent.end for extent in extents) // BLOCK_TOKENS)
        count = width * len(extents)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).int()
        tables = order.view(len(extents), width).to(request.device)
        self.batch: PagedBatch = paged_batch(tables, list(range(len(extents))), extents)
        tokens = sum(extent.count for extent in extents)
        # As projections leave them: (T, heads, dim) seen as (heads, T, dim).
        self.query, self.key, self.value = (
            request.random(tokens, heads, shapes.head_dim).transpose(0, 1)
            for heads in (shapes.heads, shapes.kv_heads, shapes.kv_heads)
        )
        self.memory = request.random(2, count, shapes.kv_heads, BLOCK_TOKENS, shapes.head_dim)
        self.sinks = request.random(shapes.heads) if shapes.sinks else None
        self.context_bytes = sum(extent.end for extent in extents) * 2 * shapes.kv_heads * shapes.head_dim
        self.context_bytes *= self.memory.element_size()

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return self.memory[0], self.memory[1]

    def exact(self, variant: Variant) -> tuple[Tensor, Tensor]:
        """The result and the memory after it, by plain torch in float64 on the host."""
        query, key, value, memory = (
            tensor.double().cpu() for tensor in (self.query, self.key, self.value, self.memory)
        )
        batch = self.batch
        there = PagedBatch(
            batch.tables.cpu(), batch.owners.cpu(), batch.positions.cpu(), batch.singles.cpu(), batch.chunks
        )
        sinks = None if variant.sinks is None else variant.sinks.double().cpu()
        plain = Variant(variant.scaling, variant.window, variant.softcap, sinks)
        return plain_attention.attend(query, key, value, (memory[0], memory[1]), there, plain), memory


def _variants(request: TrialRequest, sinks: Tensor | None) -> Iterator[tuple[str, Variant]]:
    shapes = request.shapes
    for window in shapes.windows:
        # A window of the model may be longer than the context of a trial, which would not show it.
        window_tokens = min(window, request.tokens // 2) or None
        own_sinks = sinks if window_tokens or not shapes.sinks_in_windows else None
        name = "".join(
            (
                f", window {window_tokens}" if window_tokens else "",
                ", cap" if shapes.softcap else "",
                ", sinks" if own_sinks is not None else "",
            )
        )
        yield name, Variant(shapes.head_dim**-0.5, window_tokens, shapes.softcap or None, own_sinks)


def store(request: TrialRequest) -> Iterator[TrialCase]:
    """The whole memory afterwards: new places have the new numbers, all others what they had."""
    from worker.kv.torch.paged_kernels import store as stored

    scene = Scene(request, [Extent(1, 3, request.tokens), Extent(2, request.tokens, 1), Extent(3, 0, 1)])
    _, expected = scene.exact(Variant(1.0))

    def compute() -> Tensor:
        stored(scene.key, scene.value, scene.pages, scene.batch)
        return scene.memory

    shape = f"{scene.key.shape[1]} x {scene.key.shape[0]} x {scene.key.shape[2]}"
    yield TrialCase(shape, scene.memory.dtype, compute, expected, bytes=4 * scene.key.nbytes)


def decode(request: TrialRequest) -> Iterator[TrialCase]:
    """One token for each of several sequences, with few and with many parts of the keys."""
    from worker.kv.torch.paged_kernels import decode as decoded

    extents = [Extent(sid, max(0, request.tokens - 1 - 7 * sid), 1) for sid in range(SEQUENCES)]
    scene = Scene(request, extents)
    for name, variant in _variants(request, scene.sinks):
        expected, memory = scene.exact(variant)
        scene.memory.copy_(memory)
        for splits in (1, None):

            def compute(variant: Variant = variant, splits: int | None = splits) -> Tensor:
                out = scene.query.new_empty(scene.query.shape[1], scene.query.shape[0], scene.query.shape[2])
                decoded(scene.query, out, scene.pages, scene.batch, variant, splits)
                return out

            parts = "one part" if splits == 1 else "parts"
            shape = f"{SEQUENCES} x {request.tokens}, {parts}{name}"
            yield TrialCase(shape, scene.query.dtype, compute, expected, bytes=scene.context_bytes)


def prefill(request: TrialRequest) -> Iterator[TrialCase]:
    """A first chunk and one that goes on, beside each other."""
    from worker.kv.torch.paged_kernels import prefill as filled

    half = max(2, request.tokens // 2)
    scene = Scene(request, [Extent(1, 0, request.tokens), Extent(2, half + 1, half)])
    for name, variant in _variants(request, scene.sinks):
        expected, memory = scene.exact(variant)
        scene.memory.copy_(memory)

        def compute(variant: Variant = variant) -> Tensor:
            out = scene.query.new_empty(scene.query.shape[1], scene.query.shape[0], scene.query.shape[2])
            filled(scene.query, out, scene.pages, scene.batch, variant)
            return out

        pairs = sum((extent.offset + extent.end) * extent.count // 2 for extent in scene.extents)
        flops = 4 * pairs * request.shapes.heads * request.shapes.head_dim
        yield TrialCase(f"{request.tokens} and {half} tokens{name}", scene.query.dtype, compute, expected, flops=flops)
