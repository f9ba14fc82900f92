"""The temporary memory of a step, by the formulas of native/source/scratch.h, from the sizes of a model alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from worker.families.registry import FAMILIES
from worker.kv.base import CacheLayout
from worker.models.native.config import Latent
from worker.models.native.linear import PackedExperts
from worker.models.native.modules import CausalModel
from worker.models.native.plan import RECURRENT
from worker.models.native.recurrent import GatedConvolution, GatedDelta, MambaLayer

LINE = 64
"""Bytes of a line of the cache, at which each part begins."""
BLOCK = 32
"""Inputs of a row that share a scale."""
TOGETHER = 16
"""Tokens of a chunk whose heads share the reading of keys."""
VALUE_BYTES = 16 * 1024
"""Cached rows that are read together, as floats."""
COLUMNS = 4
"""Vectors of columns of a state that a thread takes at once."""


class _Widths:
    """The largest numbers of a token among a model's layers, as C++ finds them in `Model`."""

    def __init__(self, model: CausalModel, layout: CacheLayout, lanes: int) -> None:
        config = model.config
        family = FAMILIES[model.config.model_type]
        beside = family.experts is not None and family.experts.beside is not None
        self.width = self.rates = self.attended = self.inner = self.groups = self.held = self.sum_rows = 0
        self.heads = 0
        self.mixtures: list[Any] = []
        place = 0
        layer: Any
        for layer in model.model.layers:
            network = getattr(layer, "mlp", None)
            mixture = layer if hasattr(layer, "experts") else network if hasattr(network, "experts") else None
            if mixture is not None:
                self.mixtures.append(mixture)
            if network is not None and (mixture is None or hasattr(layer, "experts")):
                self.inner = max(self.inner, network.down_proj.inputs)
            recurrent = next((getattr(layer, name) for name in RECURRENT if hasattr(layer, name)), None)
            attends = hasattr(layer, "self_attn")
            sums_branches = family.parallel or (recurrent is not None and attends)
            sums_branches = sums_branches or config.alternation is not None
            self.sum_rows = max(self.sum_rows, 2 if mixture is not None and beside else int(sums_branches))
            if recurrent is not None:
                self._add_recurrent(recurrent, layout, lanes)
            if not attends:
                continue
            cache, place = layout.layers[place], place + 1
            if config.latent is not None:
                self.heads = len(layer.self_attn.kv_b_proj.keys)
                self.width = (self.heads + 1) * cache.head_dim
            else:
                self.width = max(self.width, _projected(layer.self_attn))
                self.heads = self.heads or layer.self_attn.o_proj.inputs // (config.v_head_dim or cache.head_dim)
            self.attended = max(self.attended, self.heads * cache.head_dim)
        self.inner = max(
            self.inner, config.hidden_size_per_layer_input, config.alternation.rank if config.alternation else 0
        )

    def _add_recurrent(self, module: Any, layout: CacheLayout, lanes: int) -> None:
        assert layout.state is not None
        rates = groups = key_dim = 0
        match module:
            case GatedConvolution():
                projections = module.in_proj
                values = layout.state.channels
            case GatedDelta():
                projections = module.projections
                values = module.value_heads * module.value_dim
                rates = module.rates.outputs
                key_dim = module.key_dim
            case MambaLayer():
                projections = module.in_proj
                values = module.heads * module.head_dim
                rates = module.heads
                key_dim = module.state
                groups = module.norm_groups
            case _:
                raise NotImplementedError(type(module).__name__)
        self.width = max(self.width, projections.outputs)
        self.rates, self.groups = max(self.rates, rates), max(self.groups, groups)
        self.attended = max(self.attended, values)
        self.held = max(self.held, lanes * max(layout.state.window, COLUMNS * key_dim))


def _projected(attention: Any) -> int:
    """The outputs of the product of queries, keys and values."""
    names = ("q_proj_k_proj_v_proj_g_proj", "q_proj_k_proj_v_proj", "qkv_proj", "q_proj_k_proj", "q_proj")
    return next(getattr(attention, name).outputs for name in names if hasattr(attention, name))


def scratch_bytes(
    model: CausalModel,
    layout: CacheLayout,
    tokens: int,
    rows: int,
    longest: int,
    threads: int,
    reduced: bool,
    lanes: int,
) -> int:
    """As `furrow_step_room`, for a step of `tokens`, of which `rows` give logits, in sequences of at most `longest`
    positions. `reduced`: sums of several ranks; `lanes`: floats of the processor's vectors."""
    hidden = model.config.hidden_size
    most = max(tokens, rows)
    sizes = _Widths(model, layout, lanes)
    rotaries = model.model.rotaries.values()
    turn = max((2 * rotary.inv_freq.size for rotary in rotaries), default=0)
    streams = model.config.alternation.streams if model.config.alternation else 0
    per_layer = model.config.hidden_size_per_layer_input * model.config.num_hidden_layers
    attention = max(
        (
            sizes.heads // layer.kv_heads * min(tokens, TOGETHER) * (layer.head_dim + longest + 2 * lanes)
            + (0 if layout.element == np.float32 else max(lanes, VALUE_BYTES // (4 * layer.head_dim)) * layer.head_dim)
            for layer in layout.layers
        ),
        default=0,
    )
    floats = (
        most * hidden,
        sizes.sum_rows * tokens * hidden,
        tokens * per_layer,
        streams * tokens * hidden,
        max(sizes.groups, 2 if reduced or streams else 0) * tokens,
        tokens * sizes.width,
        tokens * sizes.rates,
        tokens * sizes.attended,
        tokens * 2 * sizes.inner,
        tokens * sizes.inner,
        tokens * len(rotaries) * turn,
        -(-attention // 16) * 16 * threads,
        sizes.held * threads,
    )
    latent: Latent | None = model.config.latent
    widest = max(hidden, sizes.attended, sizes.inner, 0 if latent is None else latent.query_rank)
    mixture = _mixture(model, sizes, tokens, lanes) if sizes.mixtures else 0
    return (
        sum(_lines(4 * count) for count in floats)
        + _quantized(most, widest, lanes)
        + mixture
        + _latent(latent, sizes, tokens, lanes)
    )


def _latent(widths: Latent | None, sizes: _Widths, tokens: int, lanes: int) -> int:
    """The scratch memory of attention over compressed keys and values."""
    if widths is None:
        return 0
    heads = sizes.heads
    inputs = max(widths.plain, widths.rank)
    by_token = (
        widths.query_rank + widths.rank + widths.turned,
        widths.query_rank,
        heads * (widths.plain + widths.turned),
        heads * inputs,
        heads * max(widths.rank, widths.value_dim),
    )
    return sum(_lines(4 * tokens * count) for count in by_token) + _quantized(tokens * heads, inputs, lanes)


def _mixture(model: CausalModel, sizes: _Widths, tokens: int, lanes: int) -> int:
    """The scratch memory of the largest mixture of experts."""
    config = model.config
    hidden = model.config.hidden_size
    shared = max(int(_shared(mixture) is not None) for mixture in sizes.mixtures)
    width = max(max(_widths_of(mixture)) for mixture in sizes.mixtures)
    experts = config.num_experts + shared
    slots = tokens * (config.num_experts_per_tok + shared)
    sizes_in_bytes = (
        *(4 * tokens * experts, 4 * slots, 4 * slots, 4 * slots, 4 * slots, 4 * slots),
        *(8 * (experts + 2), 8 * (experts + 1), 8 * (experts + 1)),
        *(4 * slots * hidden, 4 * slots * 2 * width, 4 * slots * width),
    )
    return sum(map(_lines, sizes_in_bytes)) + _quantized(slots, max(hidden, width), lanes)


def _shared(mixture: Any) -> Any:
    """The expert that every token goes through; None where there is none."""
    return getattr(mixture, "shared_expert", getattr(mixture, "shared_experts", None))


def _widths_of(mixture: Any) -> list[int]:
    """The inner widths of the experts."""
    experts: PackedExperts = mixture.experts
    shared = _shared(mixture)
    return [experts.down[0].inputs] + ([] if shared is None else [shared.down_proj.inputs])


def _lines(size: int) -> int:
    """`size` rounded up to whole lines."""
    return -(-size // LINE) * LINE


def _quantized(rows: int, width: int, lanes: int) -> int:
    """As `quantized_room` of native/source/inputs.h."""
    blocks = rows * -(-width // BLOCK)
    codes = _lines(rows * (-(-width // 4) * 4) + lanes) + _lines(rows * 4)
    return _lines(codes + _lines(blocks * BLOCK) + 3 * _lines(blocks * 4) + 2 * _lines(blocks * 8))
