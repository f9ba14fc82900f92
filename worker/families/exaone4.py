from typing import Any

from worker.families.family import ONLY_AFTER, Family
from worker.families.gguf import AROUND_LAYER_NAMES, Gguf, Metadata, layers_described
from worker.families.parts import DENSE, GATED, SLIDING, WINDOWS, all_but_every_pattern
from worker.families.recurrence import FULL

_WINDOWED_LAYERS = 64
"""The one size of older files that has windows, in three of four layers."""


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    layers = layers_described(model, common["num_hidden_layers"])
    window = model.whole("exaone4.attention.sliding_window", None)
    if "exaone4.attention.sliding_window_pattern" in model.fields:
        slides = [bool(one) for one in model.array("exaone4.attention.sliding_window_pattern").numbers()]
    else:
        windowed = len(layers) == _WINDOWED_LAYERS and window is not None
        slides = [windowed and (layer + 1) % 4 != 0 for layer in layers]
    return {
        "hidden_act": "silu",
        "sliding_window": window if any(slides) else None,
        "sliding_window_pattern": None,
        "layer_types": [SLIDING if one else FULL for one in slides],
    }


FAMILIES = [
    Family(
        "exaone4",
        DENSE,
        (*GATED, *WINDOWS, "sliding_window_pattern"),
        norms=ONLY_AFTER,
        head_norms="each_head",
        slides=all_but_every_pattern,
        rotates=lambda fields, layer, kind: kind == SLIDING or fields["sliding_window"] is None,
        gguf=(Gguf("exaone4", _from_gguf, AROUND_LAYER_NAMES),),
    )
]
