"""Fused kernels equal transformers' code: which they replace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")

from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from worker.models.torch.kernels.fused import GELU_TANH, SILU, gated, rms_norm, rotate

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TYPES = list(TOLERANCE)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    tolerance = TOLERANCE[theirs.dtype]
    assert ours.shape == theirs.shape
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
def test_norm_equals_torch(dtype: torch.dtype, kind: type, device: torch.device) -> None:
    """Both kinds of weight, over a width that is no power of two."""
    torch.manual_seed(0)
    norm = kind(90, eps=1e-3).to(device=device, dtype=dtype).requires_grad_(False)
    norm.weight.normal_()
    inputs = torch.randn(1, 5, 90, device=device).to(dtype)
    assert_near(rms_norm(inputs, norm.weight, 1e-3, one_added=kind is Gemma2RMSNorm), norm(inputs))


def test_norm_of_heads_in_a_wider_tensor(device: torch.device) -> None:
    """The heads of a query that is a part of a fused projection's output are read where they lie."""
    torch.manual_seed(0)
    norm = LlamaRMSNorm(16).to(device).requires_grad_(False)
    inputs = torch.randn(1, 3, 7 * 16, device=device)[..., 16 : 5 * 16].view(1, 3, 4, 16)
    assert not inputs.is_contiguous()
    assert_near(rms_norm(inputs, norm.weight, 1e-6, one_added=False), norm(inputs))
    assert rms_norm(inputs[:, :0], norm.weight, 1e-6, one_added=False).shape == (1, 0, 4, 16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_gate_equals_torch_without_overflow(dtype: torch.dtype, activation: str, device: torch.device) -> None:
    """Gate and up as halves of one tensor, with values far out, where an exponential overflows."""
    torch.manual_seed(0)
    both = (torch.randn(1, 3, 2 * 1100, device=device) * 30).to(dtype)
    gate, up = both[..., :1100], both[..., 1100:]
    active = functional.silu(gate) if activation == SILU else functional.gelu(gate, approximate="tanh")
    assert_near(gated(gate, up, activation), active * up)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [16, 80])
def test_rotary_turns_query_and_key_in_place(dtype: torch.dtype, dim: int, device: torch.device) -> None:
    """Query and key, as their projections leave them, turn in place; what lies beside them stays."""
    torch.manual_seed(0)
    both = torch.randn(3, 7, dim, device=device).to(dtype)
    query, key = both[:, :4].transpose(0, 1), both[:, 4:6].transpose(0, 1)
    angles = torch.randn(3, dim // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    theirs = apply_rotary_pos_emb(query[None], key[None], cos[None], sin[None])
    beside = both[:, 6].clone()
    rotate(query, key, cos, sin)
    tolerance = TOLERANCE[dtype]
    for ours, expected in zip((query, key), theirs, strict=True):
        torch.testing.assert_close(ours, expected[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(both[:, 6], beside)
