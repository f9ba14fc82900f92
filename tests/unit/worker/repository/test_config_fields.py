"""Hostile and odd configurations: each is accepted, or refused by field and value."""

from __future__ import annotations

import random
from typing import Any

import pytest

from control.errors import ModelFilesError, UnsupportedArchitecture
from tests.models import FAMILY_SHAPES, SHAPE
from worker.repository import validation
from worker.repository.families import FAMILIES
from worker.repository.multimodal import TEXT_PARTS, text_config

HOSTILE: tuple[Any, ...] = (
    *(None, 0, -1, 1, 3, 10**9, 10**30, 2.5, float("nan"), float("inf"), True, "", "x", [], [None], [[]], {}),
    *({"rope_type": []}, {"rope_type": "x"}, {"full_attention": {"factor": -1}}, ["full_attention"]),
)


def config_of(family: str) -> dict[str, Any]:
    return {"model_type": family, **SHAPE, **FAMILY_SHAPES[family]}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_any_value_in_any_field_is_judged(family: str) -> None:
    """A value of any type in any field, and in several at once, is served or refused, and never another error."""
    whole, chance = config_of(family), random.Random(0)
    validation.check(whole, 2)
    names = sorted({*whole, "layer_types", "sliding_window", "rope_scaling", "quantization_config", "text_config"})
    refused = 0
    changes = [{name: value} for name in names for value in HOSTILE]
    changes += [{name: chance.choice(HOSTILE) for name in chance.sample(names, 3)} for _ in range(100)]
    for change in changes:
        try:
            validation.check(whole | change, 2, max_context=16)
            validation.eos_ids(whole | change, change)
        except (ModelFilesError, UnsupportedArchitecture) as error:
            assert len(str(error)) < 1200
            refused += 1
    assert refused > len(changes) / 4


@pytest.mark.parametrize("kind", sorted(TEXT_PARTS))
def test_any_text_part_is_judged(kind: str) -> None:
    """The same of the fields within text_config and beside it."""
    text = {"model_type": "mistral", **SHAPE}
    for name in [*text, "rope_scaling", "rope_parameters"]:
        for value in HOSTILE:
            for config in (
                {"text_config": text | {name: value}},
                {"text_config": text, name: value},
                {"text_config": value},
            ):
                try:
                    validation.check(text_config({"model_type": kind, **config}), 1)
                except (ModelFilesError, UnsupportedArchitecture):
                    continue


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; .*at most 4096"),
        ("llama", {"num_attention_heads": 10**30}, "num_attention_heads = 1"),
        ("llama", {"vocab_size": -1}, "vocab_size = -1"),
        ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads = '2'"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps = 'small'; a number above 0"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'; true or false"),
        ("llama", {"rope_scaling": 8.0}, r"rope_scaling = 8\.0; an object"),
        ("llama", {"rope_scaling": {"rope_type": "spiral"}}, "Rotary embedding 'spiral' is not known"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "Rotary embedding 'longrope' depends"),
        ("phi", {"rope_parameters": {"partial_rotary_factor": 1.5}}, r"partial_rotary_factor = 1\.5"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types = .* num_hidden_layers = 3 kinds"),
        ("gpt_oss", {"layer_types": ["full_attention", "linear_attention", "x"]}, "a layer of type 'linear_attention'"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window = None; a width, as layer_types has sliding"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5; at most num_local_experts = 4"),
        ("glm4_moe", {"n_group": 3}, "n_group = 3; a divisor of n_routed_experts = 8"),
        ("glm4_moe", {"topk_group": 3}, "topk_group = 3; at most n_group = 2"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts = 0"),
    ],
)
def test_a_fault_names_field_and_value(family: str, changes: dict[str, Any], message: str) -> None:
    """Each refusal can be understood without a look into the file."""
    with pytest.raises((ModelFilesError, UnsupportedArchitecture), match=message):
        validation.check(config_of(family) | changes, 1)
    validation.check(config_of(family), 1)


@pytest.mark.parametrize("value", ["x", [1, "x"], -1, True, {}])
def test_ends_of_a_sequence_are_token_ids(value: object) -> None:
    """An id that is none is refused before the API would compare it with tokens."""
    with pytest.raises(ModelFilesError, match="eos_token_id = "):
        validation.eos_ids({}, {"eos_token_id": value})
