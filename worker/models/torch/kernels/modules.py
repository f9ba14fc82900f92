"""The replacement of transformers' modules by fused kernels, in a model that is loaded on a GPU.

A module is recognised by the modelling code's names, and replaced only in forms that the parity tests cover.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from worker.families.registry import FAMILIES
from worker.models.torch.kernels.fused import GELU_TANH, SILU, gated, rms_norm, rotate
from worker.selftest import switches

TYPES = {torch.float32, torch.bfloat16, torch.float16}

ROTARY = "apply_rotary_pos_emb"
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}


class FusedNorm(nn.Module):
    """An RMS norm; `one_added`: it keeps the weight's difference to one."""

    def __init__(self, norm: Any, one_added: bool) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        self._one_added = one_added

    def forward(self, inputs: Tensor) -> Tensor:
        return rms_norm(inputs, self.weight, self._eps, one_added=self._one_added)


class FusedFeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)) with the model's own projections."""

    def __init__(self, layer: Any, activation: str) -> None:
        super().__init__()
        self.gate_proj = layer.gate_proj
        self.up_proj = layer.up_proj
        self.down_proj = layer.down_proj
        # Where gate and up are one product, those two are only ways to ask for it: the weights are here.
        self.both = getattr(layer, "gate_proj_up_proj", None)
        self._activation = activation

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(inputs), self.up_proj(inputs), self._activation))


def fuse(model: Any) -> int:
    """Replace norms, feed-forward gates and rotary embeddings, but for what is switched off; how many modules were
    replaced."""
    if next(model.parameters()).dtype not in TYPES:
        return 0
    family = FAMILIES[model.config.model_type]
    activation = ACTIVATIONS.get(getattr(model.config, "hidden_activation", None) or model.config.hidden_act)
    norms = switches.reason_off("triton.norm") is None
    gates = switches.reason_off("triton.gate") is None
    replaced = 0
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        fused = None
        if norms and kind.endswith("RMSNorm") and hasattr(module, "weight"):
            fused = FusedNorm(module, family.norm_offset)
        elif gates and activation is not None and _is_gated(module):
            fused = FusedFeedForward(module, activation)
        if fused is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, fused)
            replaced += 1
    if not family.rope_neighbours and not family.rotates_apart and switches.reason_off("triton.rotary") is None:
        _fuse_rotary(sys.modules[type(model).__module__], frozenset({"cuda"}) | {model.device.type})
    return replaced


def _is_gated(module: Any) -> bool:
    """True of a feed-forward network with a gate that is nothing but its activation; gemma3n has layers that clear most
    of the gate's outputs before."""
    is_network = type(module).__name__.endswith("MLP") and hasattr(module, "gate_proj")
    return is_network and not getattr(module, "activation_sparsity", 0.0)


def _fuse_rotary(modelling: Any, devices: frozenset[str]) -> None:
    """The modelling code calls a function of its module, so that is where the kernel is put, for fitting tensors."""
    plain: Callable[..., tuple[Tensor, Tensor]] | None = getattr(modelling, ROTARY, None)
    if plain is None or getattr(plain, "fused", False):
        return

    def apply_rotary(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        one_batch = query.dim() == 4 and query.shape[0] == cos.shape[0] == 1 and query.device.type in devices
        dense = query.stride(-1) == key.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
        if not (one_batch and dense and cos.shape[-1] == query.shape[-1] and query.dtype in TYPES):
            return plain(query, key, cos, sin, *args, **kwargs)
        rotate(query[0], key[0], cos[0], sin[0])
        return query, key

    apply_rotary.fused = True  # type: ignore[attr-defined]
    setattr(modelling, ROTARY, apply_rotary)
