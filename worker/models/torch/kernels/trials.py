"""Trials of the fused kernels: RMS norm, feed-forward gate, rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from worker.selftest.trial import TrialCase, TrialRequest


def norm(request: TrialRequest) -> Iterator[TrialCase]:
    """Over hidden rows, and over the heads of a query that is a part of a wider tensor."""
    from worker.models.torch.kernels.fused import rms_norm

    shapes = request.shapes
    rows = request.tokens
    wide = request.random(1, rows, (shapes.heads + 2) * shapes.head_dim)
    heads = wide[..., shapes.head_dim : (shapes.heads + 1) * shapes.head_dim].view(1, rows, shapes.heads, -1)
    for inputs in (request.random(1, rows, shapes.hidden), heads):
        weight = request.random(inputs.shape[-1])

        def compute(inputs: Tensor = inputs, weight: Tensor = weight) -> Tensor:
            return rms_norm(inputs, weight, 1e-6, one_added=shapes.one_added)

        exact = inputs.double().cpu()
        factor = weight.double().cpu() + (1.0 if shapes.one_added else 0.0)
        expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * factor
        shape = f"{inputs.numel() // inputs.shape[-1]} x {inputs.shape[-1]}"
        yield TrialCase(shape, inputs.dtype, compute, expected, bytes=2 * inputs.nbytes)


def gate(request: TrialRequest) -> Iterator[TrialCase]:
    """Gate and up as the halves of one product, with values far out."""
    from worker.models.torch.kernels.fused import GELU_TANH, SILU, gated

    width = request.shapes.inner
    gate_up = request.random(1, request.tokens, 2 * width) * 8
    first = gate_up[..., :width]
    second = gate_up[..., width:]
    exact = first.double().cpu()
    up = second.double().cpu()
    gelu = request.shapes.gelu
    expected = (functional.gelu(exact, approximate="tanh") if gelu else functional.silu(exact)) * up

    def compute() -> Tensor:
        return gated(first, second, GELU_TANH if gelu else SILU)

    yield TrialCase(f"{request.tokens} x {width}", gate_up.dtype, compute, expected, bytes=gate_up.nbytes * 3 // 2)


def rotary(request: TrialRequest) -> Iterator[TrialCase]:
    """In place, of query and key as their projections leave them."""
    from worker.models.torch.kernels.fused import rotate

    shapes = request.shapes
    tokens = request.tokens
    half = shapes.head_dim // 2
    angles = torch.arange(tokens).double().unsqueeze(1) * 100.0 ** -torch.linspace(0, 1, half).double()
    cos, sin = (request.sent(table.repeat(1, 2)) for table in (angles.cos(), angles.sin()))
    joined = request.random(tokens, shapes.heads + shapes.kv_heads, shapes.head_dim)
    work = joined.clone()

    def compute() -> Tensor:
        work.copy_(joined)
        rotate(work[:, : shapes.heads].transpose(0, 1), work[:, shapes.heads :].transpose(0, 1), cos, sin)
        return work

    exact, wide_cos, wide_sin = (tensor.double().cpu() for tensor in (joined, cos, sin))
    turned = torch.cat([-exact[..., half:], exact[..., :half]], -1)
    expected = exact * wide_cos.unsqueeze(1) + turned * wide_sin.unsqueeze(1)
    yield TrialCase(f"{tokens} x {shapes.heads}+{shapes.kv_heads} x {shapes.head_dim}", joined.dtype, compute, expected,
               bytes=4 * joined.nbytes)  # fmt: skip
