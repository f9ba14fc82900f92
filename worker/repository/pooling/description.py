"""How a model makes a vector or a score of an input, as it travels in the configuration of the model."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from control.messages import ModelKind

FIELD = "furrow_pooling"
"""The field of a model's configuration that holds a `Pooling`; no config.json has it."""

Pool = Literal["mean", "cls", "last"]
Activation = Literal["identity", "tanh", "sigmoid"]


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A projection of the pooled vector; `weights` is its safetensors file."""

    weights: str
    inputs: int
    outputs: int
    bias: bool
    activation: Activation


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From hidden states to a vector, or to a score. `dimensions` is the vector's width, 1 for a score."""

    kind: ModelKind
    dimensions: int
    pool: Pool = "cls"
    dense: list[Dense] = []
    normalize: bool = False
    activation: Activation = "identity"
    """Of a score."""
    labels: tuple[int, int] | None = None
    """Of a causal model that scores: the tokens for "yes" and "no"."""
    max_length: int | None = None
    """Tokens of an input that the model was made for, below its positions."""
    lower: bool = False
    """True if texts are put into lower case before they are tokenised."""
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    pair: str = ""
    instruction: str = ""


def pooling_of(config: dict[str, Any]) -> Pooling | None:
    """The pooling of a configuration that `with_pooling` made; None for a model that generates text."""
    pooling = config.get(FIELD)
    return None if pooling is None else msgspec.convert(pooling, Pooling)


def with_pooling(config: dict[str, Any], pooling: Pooling) -> dict[str, Any]:
    """The configuration with its pooling, as JSON can carry it. A decoder then needs no head."""
    return {**config, FIELD: msgspec.to_builtins(pooling), "tie_word_embeddings": True}


def without_places(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the paths of projections, which differ by host."""
    pooling = pooling_of(config)
    if pooling is None:
        return config
    dense = [msgspec.structs.replace(one, weights="") for one in pooling.dense]
    return with_pooling(config, msgspec.structs.replace(pooling, dense=dense))
