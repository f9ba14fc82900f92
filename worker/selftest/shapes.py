"""The shapes of a model that its kernels are tried on; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from worker.families.family import Family, one_for_all
from worker.families.parts import SLIDING
from worker.families.recurrence import FULL
from worker.families.registry import FAMILIES

WIDEST = 65536
"""No model is wider. With the numbers of a damaged config.json a check would take minutes, before its load finds that
tensors have others."""


class Shapes(msgspec.Struct, frozen=True):
    """One rank's part of a model. `windows` has the different ones, 0 for none."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    windows: tuple[int, ...] = (0,)
    softcap: float = 0.0
    sinks: bool = False
    sinks_in_windows: bool = False
    """True if only layers with a window have sinks."""
    gelu: bool = False
    one_added: bool = False
    """Gemma's norms keep the difference of a weight to one."""

    @property
    def on_cpu(self) -> tuple[int, ...]:
        """Arguments of the C++ library's own check: heads, those of keys, their width, then widths of inputs. None is
        above WIDEST."""
        heads = min(self.heads, WIDEST)
        head_dim = min(self.head_dim, WIDEST // heads)
        widths = (min(width, WIDEST) for width in (self.hidden, heads * head_dim, self.inner))
        return (heads, min(self.kv_heads, heads), head_dim, *dict.fromkeys(widths))

    def described(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in self.__struct_fields__}


def of_config(config: dict[str, Any], dtype: str, tp: int = 1) -> Shapes:
    """The shapes of a rank of `tp` of the model with this config.json."""
    family = FAMILIES.get(str(config.get("model_type")))
    fields = config if family is None else {**family.defaults, **config}
    heads = int(config["num_attention_heads"])
    shared = fields.get("num_key_value_heads")
    hidden = int(config["hidden_size"])
    activation = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    dense = config.get("intermediate_size") if family is None else family.feed_forward_width(config)
    expert = config.get("moe_intermediate_size")
    if family is not None:
        expert = one_for_all("moe_intermediate_size", expert, family)
    sinks = family is not None and "self_attn.sinks" in family.roles
    return Shapes(
        hidden=hidden,
        inner=-(-int(expert or dense or 4 * hidden) // tp),
        heads=max(1, heads // tp),
        kv_heads=max(1, int(shared if shared is not None else heads) // tp),
        head_dim=int(fields.get("head_dim") or hidden // heads),
        dtype=dtype,
        windows=_windows(config, family, fields),
        softcap=float(config.get("attn_logit_softcapping") or 0.0),
        sinks=sinks,
        sinks_in_windows=sinks and family is not None and not family.has_sinks(FULL),
        gelu="gelu" in activation,
        one_added=family is not None and family.norm_offset,
    )


def _windows(config: dict[str, Any], family: Family | None, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The different ones of the layers, 0 for none. `fields`: config.json with the defaults of transformers' class."""
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if not window:
        return (0,)
    kinds: list[str] | None = config.get("layer_types")
    period = fields.get("sliding_window_pattern", 1)
    follows = isinstance(period, int) and period > 0  # else torch's classes say which layers have one
    if family is not None and (family.recurrent is not None or not (kinds or follows)):
        kinds = [FULL, SLIDING]
    elif family is not None and family.layer_kinds is not None:
        kinds = family.layer_kinds(config)
    elif family is not None and not kinds:
        slides = (family.slides(fields, layer) for layer in range(int(config["num_hidden_layers"])))
        kinds = [SLIDING if sliding else FULL for sliding in slides]
    of_kinds = {int(window) if kind == SLIDING else 0 for kind in kinds or [SLIDING]}
    return tuple(sorted(of_kinds))


DEFAULT: tuple[Shapes, ...] = (
    Shapes(hidden=1024, inner=3072, heads=16, kv_heads=8, head_dim=128, dtype="auto"),
    Shapes(
        hidden=640,
        inner=2048,
        heads=4,
        kv_heads=1,
        head_dim=256,
        dtype="auto",
        windows=(0, 512),
        softcap=50.0,
        gelu=True,
        one_added=True,
    ),
    Shapes(hidden=2880, inner=2880, heads=64, kv_heads=8, head_dim=64, dtype="auto", windows=(0, 128), sinks=True),
)
"""Shapes for a self-test without a model: those of a Qwen3, a Gemma and a gpt-oss."""
