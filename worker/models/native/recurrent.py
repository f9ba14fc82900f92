"""Recurrent layers of models whose forward is C++: their weights, and the structs that the compiled step reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.families.recurrence import DeltaRule, Mamba, Recurrence, ShortConvolution, recurs
from worker.kv.base import StateLayout
from worker.models.native.linear import PackedLinear
from worker.models.native.module import Module, NotNative, address_of
from worker.native.library import DELTA_RULE, MAMBA, SHORT_CONVOLUTION, Layer, Linear, Norm, Place, RecurrentLayer
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
        self.layer = layer
        self.tiled = tiled
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.value_heads = int(loaded.A_log.size)
        self.key_heads = self.value_heads * config.linear_num_key_heads // config.linear_num_value_heads
        self.by_head = hasattr(loaded, "in_proj_qkvz")
        """True if the outputs of the projections lie by key head; else those of all heads lie together."""
        self.projections: Any = loaded.in_proj_qkvz if self.by_head else _joined(loaded, "in_proj_qkv_in_proj_z")
        self.rates: Any = loaded.in_proj_ba if self.by_head else _joined(loaded, "in_proj_b_in_proj_a")
        self.out_proj: PackedLinear = loaded.out_proj
        self.filter = _filter(loaded.conv1d.weight)
        self.decay = _decay(loaded.A_log)
        self.decay_bias = loaded.dt_bias
        self.norm_weight = loaded.norm.weight
        self.eps: float = config.rms_norm_eps

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads


class MambaLayer(Module):
    """Mamba-2 of this rank's heads. `layer` counts the recurrent layers."""

    def __init__(self, loaded: Any, config: Any, shape: Mamba, layer: int, plan: ShardPlan) -> None:
        self.layer = layer
        self.head_dim = shape.head_dim
        self.state = shape.state
        self.heads = shape.heads // plan.world_size
        self.groups = max(1, shape.groups // plan.world_size)
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
        self.step_bias = loaded.dt_bias
        self.skip = loaded.D
        self.norm_weight: NDArray[Any] | None = None if shape.norm is None else loaded.norm.weight
        self.gate_last = shape.norm == "before_gate"
        self.eps: float = config.rms_norm_eps
        self.output_scales = _output_scales(shape, self.heads, self.groups)
        self.out_scale = shape.out_scale


def _output_scales(shape: Mamba, heads: int, groups: int) -> NDArray[np.float32] | None:
    """By output of the first projection, of a rank with so many heads and groups; None where all are 1."""
    scales = [shape.in_scale * scale for scale in shape.scales]
    if all(scale == 1 for scale in scales):
        return None
    widths = heads * shape.head_dim, heads * shape.head_dim, groups * shape.state, groups * shape.state, heads
    return np.repeat(np.asarray(scales, np.float32), widths)


def install(model: Any, recurrent: Recurrence, plan: ShardPlan) -> None:
    """Replace the recurrent layers' modules, which hold this rank's weights."""
    number = 0
    for layer, kind in zip(model.model.layers, recurrent.kinds, strict=True):
        if recurs(kind):
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


class RecurrentLayers:
    """The recurrent layers of a model, in order. `structs` is for C++; keeps alive what they point to."""

    def __init__(self, layout: StateLayout | None) -> None:
        self._layout = layout
        self.structs = (RecurrentLayer * 0)()
        self._references: list[Any] = []

    def add(self, to: Layer, module: Any) -> None:
        """Make `to` a layer with the recurrence `module`, but for its last product. Raises NotNative."""
        struct = _STRUCTS.get(type(module))
        if struct is None or self._layout is None:
            raise NotNative(f"its {type(module).__name__} is torch's")
        to.recurrent = len(self.structs)
        self._references.append(module)
        self.structs = (RecurrentLayer * (to.recurrent + 1))(*self.structs, struct(module, self._layout))


def _convolution(module: GatedConvolution, layout: StateLayout) -> RecurrentLayer:
    return RecurrentLayer(
        projections=_linear(module.in_proj),
        filter_bias=address_of(module.bias),
        filter=module.filter.ctypes.data,
        value_heads=1,
        value_dim=layout.channels,
        taps=layout.window + 1,
        state=module.layer * layout.layer_numbers,
        kind=SHORT_CONVOLUTION,
    )


def _mamba(module: MambaLayer, layout: StateLayout) -> RecurrentLayer:
    inner = module.heads * module.head_dim
    of_groups = module.groups * module.state
    share = module.heads // module.groups
    return RecurrentLayer(
        projections=_linear(module.in_proj),
        gate=Place(0, share * module.head_dim),
        value=Place(inner, share * module.head_dim),
        key=Place(2 * inner, module.state),
        query=Place(2 * inner + of_groups, module.state),
        learning=Place(2 * (inner + of_groups), share),
        filter_bias=address_of(module.filter_bias),
        filter=module.filter.ctypes.data,
        decay=module.decay.ctypes.data,
        decay_bias=module.step_bias.ctypes.data,
        skip=module.skip.ctypes.data,
        norm=Norm(address_of(module.norm_weight), module.eps),
        gate_last=int(module.gate_last),
        output_scales=address_of(module.output_scales),
        out=module.out_proj.struct,
        out_scale=module.out_scale,
        key_heads=module.groups,
        value_heads=module.heads,
        key_dim=module.state,
        value_dim=module.head_dim,
        taps=layout.window + 1,
        state=module.layer * layout.layer_numbers,
        kind=MAMBA,
        norm_groups=module.norm_groups,
        first_group=module.first_group,
        norm_width=module.group_width,
    )


def _delta_rule(module: GatedDelta, layout: StateLayout) -> RecurrentLayer:
    return RecurrentLayer(
        projections=_linear(module.projections),
        rates=_linear(module.rates),
        **_places(module),
        filter=module.filter.ctypes.data,
        decay=module.decay.ctypes.data,
        decay_bias=module.decay_bias.ctypes.data,
        norm=Norm(module.norm_weight.ctypes.data, module.eps),
        key_heads=module.key_heads,
        value_heads=module.value_heads,
        key_dim=module.key_dim,
        value_dim=module.value_dim,
        taps=layout.window + 1,
        state=module.layer * layout.layer_numbers,
        kind=DELTA_RULE,
        tiled=int(module.tiled),
    )


_STRUCTS = {GatedConvolution: _convolution, GatedDelta: _delta_rule, MambaLayer: _mamba}


def _places(module: GatedDelta) -> dict[str, Place]:
    """The places of the projections' outputs: by key head, or those of all heads together."""
    group = module.group
    widths = [module.key_dim, module.key_dim, group * module.value_dim, group * module.value_dim]
    heads = 1 if module.by_head else module.key_heads
    starts = [heads * sum(widths[:part]) for part in range(4)]
    steps = [sum(widths)] * 4 if module.by_head else widths
    query, key, value, gate = (Place(start, step) for start, step in zip(starts, steps, strict=True))
    step = 2 * group if module.by_head else group
    return {
        "query": query,
        "key": key,
        "value": value,
        "gate": gate,
        "learning": Place(0, step),
        "keeping": Place(heads * group, step),
    }


def _linear(linear: PackedLinear | None) -> Linear:
    """Raises NotNative for projections of one input that could not be joined."""
    if linear is None:
        raise NotNative("its projections of one input are no single product")
    return linear.struct
