from worker.families.family import Family, Fields
from worker.families.parts import DENSE, WINDOWS, WITH_BIASES
from worker.formats.recurrence import FULL


def _has_rope(fields: Fields, layer: int, kind: str = FULL) -> bool:
    given = fields["no_rope_layers"]
    return bool(given[layer]) if given is not None else (layer + 1) % fields["no_rope_layer_interval"] != 0


FAMILIES = [
    Family(
        "smollm3",
        DENSE,
        (*WITH_BIASES, *WINDOWS, "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"),
        slides=lambda fields, layer: not _has_rope(fields, layer),
        rotates=_has_rope,
    )
]
