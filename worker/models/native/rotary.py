"""Frequencies of rotary embeddings, as transformers computes them (`modeling_rope_utils.py`) but for the last bit; no
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from control.errors import ModelFilesError
from worker.families.family import Family
from worker.families.fields import is_number
from worker.families.recurrence import FULL
from worker.models.native.module import require

UNTURNED = "unturned"
"""The name of what queries get in layers that don't rotate them, among the rotary embeddings of a model."""


@dataclass(frozen=True)
class Rotary:
    """A position's angles are its product with `inv_freq` (head dim / 2,) float32; their cosine and sine are multiplied
    by `attention_scaling`. The names are transformers'."""

    inv_freq: NDArray[np.float32]
    attention_scaling: float
    growth: tuple[float, float, float] = (0.0, 1.0, 0.0)
    """(β, period, offset): a query is multiplied by 1 + β · log(1 + ⌊(position + offset) / period⌋)."""


def rotaries(config: dict[str, Any], family: Family, head_dim: int, widths: Mapping[str, int]) -> dict[str, Rotary]:
    """The rotary embeddings that config.json describes: one for each kind of layers in `widths`, which has the width of
    their heads, where they differ by kind, else one alone. Raises NotNative for an embedding that is left to torch,
    ModelFilesError for a parameter that is missing or no number."""
    scaling = config.get("rope_scaling")
    rope = config.get("rope_parameters")
    for parameters in (scaling, rope):
        if not isinstance(parameters, dict | None):
            raise ModelFilesError(f"config.json has rotary parameters {parameters!r}; an object is needed.")
    if family.defaults["rope_parameters"] is None:  # the type has no positions
        return {}
    default = dict(family.defaults["rope_parameters"])
    if not family.rope_by_kind:
        theta = default.pop("rope_theta")
        partial = default.get("partial_rotary_factor")
        if "rotary_dim" in family.fields:
            width = config.get("rotary_dim")
            partial = 1.0 if width is None else width / head_dim
        if not (scaling or rope) and default.get("rope_type", default.get("type")) != "default":
            # Where the class's own parameters are whole, `rope_theta` beside them has no effect.
            rope = default if family.theta_beside_rope else {"rope_theta": theta, **default}
        rope = scaling or rope or {}
        nested = [name for name, value in rope.items() if isinstance(value, dict)]
        require(not nested, f"its rotary embeddings differ by layer ({', '.join(nested)})")
        parameters = {"rope_theta": config.get("rope_theta", theta), **rope}
        original = config.get("original_max_position_embeddings")
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        if family.latent is not None:
            # The part that is turned is a head of its own here, whatever share of a head it is for files.
            parameters["partial_rotary_factor"] = 1.0
        whole = _rotary(config, partial, parameters, head_dim)
        if family.queries_grow:
            read = _Parameters(parameters, config["max_position_embeddings"])
            period = read.number("original_max_position_embeddings", config["max_position_embeddings"])
            whole = replace(whole, growth=(read.number("llama_4_scaling_beta", 0.0), period, 0.0))
        if family.unturned_queries_grow is not None:
            return {"": whole, UNTURNED: Rotary(np.zeros(0, np.float32), 1.0, _growth(config, family))}
        return {"": whole}
    embeddings = dict[str, Rotary]()
    for kind, name in family.rope_by_kind.items():
        if kind in widths:
            theta = default[kind]["rope_theta"]
            parameters = (rope or {}).get(kind) or {"rope_type": "default"}
            if rope is None and name is None:
                parameters = default[kind]
            require(not scaling or any(family.rope_by_kind.values()), "rope_scaling beside parameters by kind of layer")
            if kind == FULL and scaling:
                parameters = {**parameters, **scaling}
            parameters = {"rope_theta": theta if name is None else config.get(name, theta), **parameters}
            defaults = default[kind]
            partial = defaults.get("partial_rotary_factor") if defaults["rope_type"] == "default" else None
            if partial is not None:
                # Without a part among the parameters, an embedding of type default turns the class's part.
                plain = parameters.get("rope_type", "default") == "default"
                parameters = {"partial_rotary_factor": partial if plain else 1.0, **parameters}
            # transformers looks for this one beside the kinds.
            parameters["truncate"] = (rope or {}).get("truncate", True)
            embeddings[kind] = _rotary(config, partial, parameters, widths[kind])
    return embeddings


def _growth(config: dict[str, Any], family: Family) -> tuple[float, float, float]:
    """Of queries in layers that don't rotate them."""
    names = "attn_scale", "floor_scale", family.unturned_queries_grow or ""
    scale, period, grows = (config.get(name, family.defaults[name]) for name in names)
    return (scale if grows else 0.0, period, 1.0)


def _rotary(config: dict[str, Any], partial: float | None, rope: dict[str, Any], head_dim: int) -> Rotary:
    """`partial`: the share of a head that is rotated where config.json has none; None: the whole head, always."""
    most = config["max_position_embeddings"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(kind in _KINDS or kind == "proportional", f"its rotary embedding is of type {kind}")
    parameters = _Parameters({"original_max_position_embeddings": most, **rope}, most)
    share = config.get("partial_rotary_factor")
    if kind == "proportional":
        return _finite(rope, _proportional(parameters, head_dim))
    part = parameters.number("partial_rotary_factor", share if share is not None else partial or 1.0)
    require(partial is not None or part == 1, f"only {part} of its heads is rotated")
    return _finite(rope, _KINDS[kind](parameters, int(head_dim * part)))


def _finite(parameters: dict[str, Any], rotary: Rotary) -> Rotary:
    if np.isfinite(rotary.inv_freq).all() and math.isfinite(rotary.attention_scaling):
        return rotary
    shown = {name: value for name, value in parameters.items() if value is not None}
    raise ModelFilesError(
        f"config.json has rotary parameters {shown!r:.200}, by which a frequency is no number. Download the file again."
    )


@dataclass(frozen=True)
class _Parameters:
    values: dict[str, Any]
    max_positions: int

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not is_number(value):
            raise ModelFilesError(f"config.json has {name} = {value!r} among the rotary parameters; give a number.")
        return value


def _plain(theta: float, head_dim: int) -> NDArray[np.float32]:
    return np.float32(1.0) / _periods(theta, head_dim, head_dim)


def _periods(theta: float, rotated: int, head_dim: int) -> NDArray[np.float32]:
    """The powers of θ by which the numbers of the first `rotated` of a head turn, less a factor of 2 π: the nearest
    float32, where transformers' may differ in the last bit, as the vectors of the processor have it."""
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(float(theta), exponents.astype(np.float64)).astype(np.float32)


def _default(parameters: _Parameters, head_dim: int) -> Rotary:
    return Rotary(_plain(parameters.number("rope_theta"), head_dim), 1.0)


def _linear(parameters: _Parameters, head_dim: int) -> Rotary:
    return Rotary(_plain(parameters.number("rope_theta"), head_dim) / parameters.number("factor"), 1.0)


def _stretched(parameters: _Parameters, head_dim: int) -> Rotary:
    """A base that is stretched once for all lengths, as in Hunyuan's files of type `dynamic`."""
    base = parameters.number("rope_theta") * parameters.number("alpha") ** (head_dim / (head_dim - 2))
    return Rotary(_plain(base, head_dim), 1.0)


def _proportional(parameters: _Parameters, head_dim: int) -> Rotary:
    """The first part of the whole head's frequencies; the others are 0."""
    angles = int(parameters.number("partial_rotary_factor", 1.0) * head_dim // 2)
    theta = parameters.number("rope_theta")
    frequencies = np.zeros(head_dim // 2, np.float32)
    frequencies[:angles] = np.float32(1.0) / _periods(theta, 2 * angles, head_dim)
    return Rotary(frequencies / parameters.number("factor", 1.0), 1.0)


def _llama3(parameters: _Parameters, head_dim: int) -> Rotary:
    """Low frequencies divided by `factor`, high ones as they are, a smooth passage between."""
    frequencies = _plain(parameters.number("rope_theta"), head_dim)
    factor = parameters.number("factor")
    length = parameters.number("original_max_position_embeddings")
    low = parameters.number("low_freq_factor")
    high = parameters.number("high_freq_factor")
    wavelengths = np.float32(2 * math.pi) / frequencies
    scaled = np.where(wavelengths > length / low, frequencies / factor, frequencies)
    if high == low:  # no passage
        return Rotary(scaled, 1.0)
    smooth = (np.float32(length) / wavelengths - low) / (high - low)
    between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    return Rotary(np.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled), 1.0)


def _yarn(parameters: _Parameters, head_dim: int) -> Rotary:
    """YaRN, https://arxiv.org/abs/2309.00071: interpolated frequencies, and a scale for attention."""
    theta = parameters.number("rope_theta")
    length = parameters.number("original_max_position_embeddings")
    factor = parameters.number("factor", parameters.max_positions / length)
    scale = parameters.values.get("attention_factor")
    if scale is None:
        part = parameters.values.get("mscale")
        every = parameters.values.get("mscale_all_dim")
        scale = mscale(factor, part) / mscale(factor, every) if part and every else mscale(factor)

    def border(rotations: float) -> float:
        return (head_dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low = border(parameters.number("beta_fast") if parameters.values.get("beta_fast") else 32)
    high = border(parameters.number("beta_slow") if parameters.values.get("beta_slow") else 1)
    if parameters.values.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    weight = (1 - ramp).astype(np.float32)
    periods = _periods(theta, head_dim, head_dim)
    frequencies = 1 / (np.float32(factor) * periods) * (1 - weight) + 1 / periods * weight
    return Rotary(frequencies.astype(np.float32), float(scale))


def mscale(factor: float, part: float = 1) -> float:
    """By what YaRN scales attention for a context that is `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * part * math.log(factor) + 1.0


_KINDS: dict[str, Callable[[_Parameters, int], Rotary]] = {
    "default": _default,
    "dynamic": _stretched,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
