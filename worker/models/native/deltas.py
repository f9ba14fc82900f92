"""Recurrent layers as the compiled step reads them."""

from __future__ import annotations

from typing import Any

from worker.kv.base import StateLayout
from worker.models.native.linear import PackedLinear
from worker.models.native.recurrent import GatedConvolution, GatedDelta, MambaLayer
from worker.models.native.unsupported import NotNative
from worker.native.library import DELTA_RULE, MAMBA, SHORT_CONVOLUTION, Delta, Layer, Linear, Norm, Place


class Deltas:
    """The recurrent layers of a model, in order. `structs` is for C++; keeps alive what they point to."""

    def __init__(self, layout: StateLayout | None) -> None:
        self._layout = layout
        self.structs = (Delta * 0)()
        self._kept: list[Any] = []

    def add(self, to: Layer, module: Any) -> None:
        """Make `to` a layer with the recurrence `module`, but for its last product. Raises NotNative."""
        struct = _STRUCTS.get(type(module))
        if struct is None or self._layout is None:
            raise NotNative(f"its {type(module).__name__} is torch's")
        to.delta = len(self.structs)
        self._kept.append(module)
        self.structs = (Delta * (to.delta + 1))(*self.structs, struct(module, self._layout))


def _convolution(module: GatedConvolution, layout: StateLayout) -> Delta:
    return Delta(
        projections=_linear(module.in_proj),
        filter_bias=None if module.bias is None else module.bias.ctypes.data,
        filter=module.filter.ctypes.data,
        value_heads=1,
        value_dim=layout.channels,
        taps=layout.window + 1,
        state=module.layer * layout.layer_numbers,
        kind=SHORT_CONVOLUTION,
    )


def _mamba(module: MambaLayer, layout: StateLayout) -> Delta:
    inner, of_groups = module.heads * module.head_dim, module.groups * module.state
    share = module.heads // module.groups
    bias = module.filter_bias
    return Delta(
        projections=_linear(module.in_proj),
        gate=Place(0, share * module.head_dim),
        value=Place(inner, share * module.head_dim),
        key=Place(2 * inner, module.state),
        query=Place(2 * inner + of_groups, module.state),
        learning=Place(2 * (inner + of_groups), share),
        filter_bias=None if bias is None else bias.ctypes.data,
        filter=module.filter.ctypes.data,
        decay=module.decay.ctypes.data,
        decay_bias=module.step_bias.ctypes.data,
        skip=module.skip.ctypes.data,
        norm=Norm(module.norm_weight.ctypes.data, module.eps),
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


def _delta(module: GatedDelta, layout: StateLayout) -> Delta:
    return Delta(
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


_STRUCTS = {GatedConvolution: _convolution, GatedDelta: _delta, MambaLayer: _mamba}


def _places(module: GatedDelta) -> dict[str, Place]:
    """Where the outputs of the projections lie: by key head, or those of all heads together."""
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
