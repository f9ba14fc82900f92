"""Kernels are tried on the shapes of a model's layers; config.json may omit fields."""

from __future__ import annotations

from typing import Any

import pytest

from worker.selftest.shapes import of_config

CONFIG: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4}
KINDS = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mimo_v2_flash"}, (0, 129)),
        ({"model_type": "mimo_v2_flash", "layer_types": KINDS[:1] * 4}, (129,)),
        ({"model_type": "gpt_oss"}, (0, 128)),
        ({"model_type": "gemma3_text", "layer_types": KINDS, "sliding_window": 12}, (0, 12)),
        ({"model_type": "mistral", "sliding_window": 12}, (12,)),
        ({"model_type": "mistral", "sliding_window": None}, (0,)),
        ({"model_type": "qwen3", "sliding_window": 12}, (0,)),
        ({"model_type": "qwen3", "sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2}, (0, 12)),
        ({"model_type": "llama"}, (0,)),
        ({"model_type": "lfm3"}, (0, 256)),
        ({"model_type": "exaone4", "sliding_window": 12, "sliding_window_pattern": 2}, (0, 12)),
        ({"model_type": "exaone4", "sliding_window": 12, "sliding_window_pattern": 0}, (0, 12)),
        ({"model_type": "exaone4", "sliding_window": 12, "sliding_window_pattern": "LLLG"}, (0, 12)),
    ],
)
def test_windows_of_the_layers(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    """Kernels are tried with the windows that layers have, and without one where a layer has none."""
    assert of_config(CONFIG | changes, "float32").windows == windows


def test_fields_that_a_file_omits() -> None:
    """Heads have the width and number of transformers' class; null means what follows from other fields."""
    shapes = of_config(CONFIG | {"model_type": "mimo_v2_flash"}, "float32")
    assert (shapes.head_dim, shapes.kv_heads) == (192, 4)
    shapes = of_config(CONFIG | {"model_type": "qwen3", "head_dim": None, "num_key_value_heads": None}, "float32")
    assert (shapes.head_dim, shapes.kv_heads) == (32, 8)


def test_sinks_of_the_layers() -> None:
    """Sinks are tried where layers have them: in windows alone, in all layers, or nowhere."""
    sinks = {
        kind: of_config(CONFIG | {"model_type": kind}, "float32") for kind in ("mimo_v2_flash", "gpt_oss", "llama")
    }
    assert {kind: (one.sinks, one.sinks_in_windows) for kind, one in sinks.items()} == {
        "mimo_v2_flash": (True, True),
        "gpt_oss": (True, False),
        "llama": (False, False),
    }


@pytest.mark.parametrize(
    "damaged", [{"hidden_size": 2**31 - 1}, {"intermediate_size": 2**31 - 1}, {"head_dim": 2**31 - 1}], ids=str
)
def test_a_check_on_a_cpu_has_bounded_widths(damaged: dict[str, int]) -> None:
    """The library's check with the numbers of a damaged file takes no longer than that of the widest model."""
    heads, shared, width, *widths = of_config(CONFIG | {"model_type": "llama"} | damaged, "float32").on_cpu
    assert (heads, shared) == (8, 8)
    assert heads * width <= 65536 and max(widths) == 65536
