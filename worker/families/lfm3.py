"""lfm3: short convolutions, attention with and without a window, norms around both, and a gate for each head."""

from __future__ import annotations

from typing import Any, cast

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.families.family import BATCHABLE_ROPE, Family
from worker.families.parts import ATTENTION, SLIDING
from worker.families.recurrence import CONVOLUTION, FULL, LINEAR, ShortConvolution, size, switch
from worker.families.roles import Roles

_ROLES: Roles = {
    **ATTENTION,
    "self_attn.g_proj": "colwise",
    "conv.in_proj": "regions",
    "conv.conv": "colwise",
    "conv.out_proj": "rowwise",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}
_PERIOD = 4
"""Of layers without a list of kinds: the third of four attends to all positions, the first one, but for that of the
model, to those of a window."""


def layers_of(config: dict[str, Any]) -> ShortConvolution:
    """The layers of a model. Raises ModelFilesError or UnsupportedArchitecture naming a field and its value."""
    taps = size(config, "conv_L_cache", 7)
    if taps < 2:
        raise ModelFilesError(f"config.json has conv_L_cache = {taps}; at least 2 is needed.")
    switch(config, "conv_bias", False)
    layers = config["num_hidden_layers"]
    listed = config.get("layer_types")
    kinds = [_kind(layer) for layer in range(layers)] if listed is None else _checked(listed, layers)
    if FULL not in kinds:
        raise UnsupportedArchitecture(f"config.json has no layer of type {FULL}: a model without one is not served.")
    if SLIDING in kinds and not config.get("sliding_window", 1):
        raise ModelFilesError(
            f"config.json has sliding_window = {str(config['sliding_window'])[:60]}; a width is needed, as there are "
            f"layers of type {SLIDING}."
        )
    return ShortConvolution(
        tuple(LINEAR if kind == CONVOLUTION else kind for kind in kinds), taps, width=config["hidden_size"]
    )


def _kind(layer: int) -> str:
    if layer % _PERIOD == 2:
        return FULL
    return SLIDING if layer > 0 and layer % _PERIOD == 0 else CONVOLUTION


def _checked(listed: Any, layers: int) -> list[str]:
    if not isinstance(listed, list) or len(cast(list[Any], listed)) != layers:
        raise ModelFilesError(
            f"config.json has layer_types = {str(listed)[:60]}; a list of num_hidden_layers = {layers} kinds is needed."
        )
    kinds = [str(kind) for kind in cast(list[Any], listed)]
    for kind in kinds:
        if kind not in (CONVOLUTION, FULL, SLIDING):
            raise UnsupportedArchitecture(
                f"config.json has a layer of type {kind[:60]!r} in layer_types. Served are {CONVOLUTION}, {FULL} and "
                f"{SLIDING}."
            )
    return kinds


FAMILIES = [
    Family(
        "lfm3",
        _ROLES,
        (
            *("norm_eps", "tie_word_embeddings", "head_dim", "intermediate_size", "attention_bias"),
            *("sliding_window", "use_sandwich_norm", "use_attention_gate"),
        ),
        aliases={"norm_eps": "rms_norm_eps"},
        norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
        after_norm_switch="use_sandwich_norm",
        head_norms="each_head",
        head_gates="use_attention_gate",
        rope_by_kind={FULL: None, SLIDING: None},
        rope_types=BATCHABLE_ROPE | {"proportional"},
        recurrent=layers_of,
        stored_names=((".self_attn.g_proj.", ".self_attn.gate_proj."),),
        native_names=(
            (".mlp.gate_proj", ".feed_forward.w1"),
            (".mlp.up_proj", ".feed_forward.w3"),
            (".mlp.down_proj", ".feed_forward.w2"),
            ("model.norm.", "model.embedding_norm."),
        ),
    )
]
