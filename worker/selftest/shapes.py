"""The shapes of a model that its kernels are tried on; no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from worker.families.family import one_for_all
from worker.families.registry import FAMILIES


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
    gelu: bool = False
    one_added: bool = False
    """Gemma's norms keep the difference of a weight to one."""

    @property
    def on_cpu(self) -> tuple[int, ...]:
        """Arguments of the C++ library's own check: heads, those of keys, their width, then widths of inputs."""
        widths = (self.hidden, self.heads * self.head_dim, self.inner)
        return (self.heads, self.kv_heads, self.head_dim, *dict.fromkeys(widths))

    def described(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in self.__struct_fields__}


def of_config(config: dict[str, Any], dtype: str, tp: int = 1) -> Shapes:
    """The shapes of a rank of `tp` of the model with this config.json."""
    heads = int(config["num_attention_heads"])
    shared = config.get("num_key_value_heads")
    hidden = int(config["hidden_size"])
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    mixed = window and (config.get("layer_types") or str(config.get("model_type")).startswith(("gemma", "cohere2")))
    activation = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    family = FAMILIES.get(str(config.get("model_type")))
    dense = config.get("intermediate_size") if family is None else family.feed_forward_width(config)
    expert = config.get("moe_intermediate_size")
    if family is not None:
        expert = one_for_all("moe_intermediate_size", expert, family)
    return Shapes(
        hidden=hidden,
        inner=-(-int(expert or dense or 4 * hidden) // tp),
        heads=max(1, heads // tp),
        kv_heads=max(1, int(shared if shared is not None else heads) // tp),
        head_dim=int(config.get("head_dim") or hidden // heads),
        dtype=dtype,
        windows=((0, int(window)) if mixed else (int(window),)) if window else (0,),
        softcap=float(config.get("attn_logit_softcapping") or 0.0),
        sinks=family is not None and "self_attn.sinks" in family.roles,
        gelu="gelu" in activation,
        one_added=family is not None and family.norm_offset,
    )


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
