"""Recurrent layers of models whose forward is C++: their weights as the compiled step reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.families.mamba import Mamba
from worker.families.recurrence import LINEAR, DeltaRule, Recurrence
from worker.families.short_convolution import ShortConvolution
from worker.models.native.linear import PackedLinear
from worker.models.native.module import Module
from worker.weights.sharding import ShardPlan


class GatedConvolution(Module):
    """C · convolution(B · x) of this rank's channels. `layer` counts the recurrent layers."""

    def __init__(self, loaded: Any, layer: int) -> None:
        self.layer = layer
        self.in_proj: PackedLinear = loaded.in_proj
        self.out_proj: PackedLinear = loaded.out_proj
        self.filter = _filter(loaded.conv.weight)
        self.bias: NDArray[Any] | None = getattr(loaded.conv, "bias", None)


class GatedDelta(Module):
    """The gated delta rule of this rank's heads. `layer` counts the recurrent layers."""

    def __init__(self, loaded: Any, config: Any, layer: int, tiled: bool) -> None:
        """`tiled`: value head h belongs to key head h mod `key_heads`."""
        self.layer, self.tiled = layer, tiled
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.value_heads = int(loaded.A_log.size)
        self.key_heads = self.value_heads * config.linear_num_key_heads // config.linear_num_value_heads
        self.by_head = hasattr(loaded, "in_proj_qkvz")
        """True if the outputs of the projections lie by key head; else those of all heads lie together."""
        self.projections: Any = loaded.in_proj_qkvz if self.by_head else _joined(loaded, "in_proj_qkv_in_proj_z")
        self.rates: Any = loaded.in_proj_ba if self.by_head else _joined(loaded, "in_proj_b_in_proj_a")
        self.out_proj: PackedLinear = loaded.out_proj
        self.filter = _filter(loaded.conv1d.weight)
        self.decay = _decay(loaded.A_log)
        self.decay_bias, self.norm_weight = loaded.dt_bias, loaded.norm.weight
        self.eps: float = config.rms_norm_eps

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads


class MambaLayer(Module):
    """Mamba-2 of this rank's heads. `layer` counts the recurrent layers."""

    def __init__(self, loaded: Any, config: Any, shape: Mamba, layer: int, plan: ShardPlan) -> None:
        self.layer, self.head_dim, self.state = layer, shape.head_dim, shape.state
        self.heads, self.groups = shape.heads // plan.world_size, max(1, shape.groups // plan.world_size)
        self.group_width = shape.heads * shape.head_dim // shape.groups
        """Numbers of a group of heads, on all ranks that share it."""
        shared = shape.groups % plan.world_size != 0
        self.norm_groups = shape.groups if shared else self.groups
        self.first_group = plan.rank * shape.groups // plan.world_size if shared else 0
        """The first of this rank's groups among the `norm_groups` whose squares are summed."""
        self.in_proj: PackedLinear = loaded.in_proj
        self.out_proj: PackedLinear = loaded.out_proj
        self.filter = _filter(loaded.conv1d.weight)
        self.filter_bias: NDArray[Any] | None = getattr(loaded.conv1d, "bias", None)
        self.decay = _decay(loaded.A_log)
        self.step_bias, self.skip, self.norm_weight = loaded.dt_bias, loaded.D, loaded.norm.weight
        self.eps: float = config.rms_norm_eps


def install(model: Any, recurrent: Recurrence, plan: ShardPlan) -> None:
    """Replace the recurrent layers' modules, which hold this rank's weights."""
    number = 0
    for layer, kind in zip(model.model.layers, recurrent.kinds, strict=True):
        if kind == LINEAR:
            match recurrent:
                case DeltaRule():
                    layer.linear_attn = GatedDelta(layer.linear_attn, model.config, number, recurrent.tiled)
                case ShortConvolution():
                    layer.conv = GatedConvolution(layer.conv, number)
                case Mamba():
                    layer.mamba = MambaLayer(layer.mamba, model.config, recurrent, number, plan)
                case _:
                    raise NotImplementedError(type(recurrent).__name__)
            number += 1


def _joined(loaded: Any, name: str) -> PackedLinear | None:
    """The product that loading joined; None where it could not, as their kinds of weights differ."""
    return getattr(loaded, name, None)


def _filter(weight: NDArray[Any]) -> NDArray[Any]:
    """Of a convolution: (channels, 1, taps) → (taps, channels), the newest input last."""
    return np.ascontiguousarray(weight[:, 0].T)


def _decay(logarithms: NDArray[Any]) -> NDArray[np.float32]:
    return (-np.exp(logarithms.astype(np.float64))).astype(np.float32)
