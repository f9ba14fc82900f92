"""Decides whether a checkpoint gives vectors or scores, and whether it can be served; from metadata alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from control.errors import UnsupportedArchitecture
from worker.families.registry import FAMILIES
from worker.repository.pooling import encoders
from worker.repository.pooling.description import FIELD, Activation, Pooling, pooling_of, with_pooling
from worker.repository.pooling.encoders import ENCODERS
from worker.repository.pooling.sentence_transformers import (
    MODULES,
    PROMPTS,
    activation_of,
    read_embedding,
    read_label_tokens,
    read_object,
)

CAUSAL = {kind for kind, family in FAMILIES.items() if family.pooling == "causal"}
"""Types with keys and values in a cache whose last token makes a vector or a score."""
BIDIRECTIONAL = {kind for kind, family in FAMILIES.items() if family.pooling == "bidirectional"}
"""Types of decoders that attend in both directions where config.json says so."""

QWEN3_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The form of a pair that Qwen3-Reranker was trained on, from its model card."""

_LARGEST = 2**31 - 1


def described(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the model in `folder`, with its pooling where it gives vectors or scores. Raises
    ModelFilesError and UnsupportedArchitecture."""
    config = encoders.unified({name: value for name, value in config.items() if name != FIELD})
    if _architecture(config).endswith("ForSequenceClassification"):
        return with_pooling(config, _cross_encoder(folder, config))
    if (folder / MODULES).is_file():
        labels = read_label_tokens(folder)
        if labels is None:
            return with_pooling(config, read_embedding(folder, config))
        return with_pooling(config, _causal_reranker(folder, config, labels))
    if config["model_type"] in ENCODERS:
        raise UnsupportedArchitecture(
            f"{folder} is an encoder without {MODULES}, so how its vectors are pooled is not known. Save it with "
            "sentence-transformers (`SentenceTransformer(...).save(folder)`), or use a checkpoint that has the file."
        )
    return config


def is_encoder(config: dict[str, Any]) -> bool:
    """True for a model whose forward is an encoder's of its own."""
    return FIELD in config and config["model_type"] in ENCODERS


def is_whole(config: dict[str, Any], pooling: Pooling) -> bool:
    """True if a sequence is computed in one row, because a position may see later ones or all are pooled."""
    return is_encoder(config) or pooling.pool != "last" or bool(config.get("use_bidirectional_attention"))


def check(config: dict[str, Any], pooling: Pooling, tp: int, quant: str | None) -> None:
    """Raise UnsupportedArchitecture or ModelFilesError naming what can't be served; decoders have further checks."""
    kind = config["model_type"]
    if kind not in ENCODERS.keys() | CAUSAL | BIDIRECTIONAL:
        served = ", ".join(sorted(ENCODERS.keys() | CAUSAL | BIDIRECTIONAL))
        raise UnsupportedArchitecture(
            f"Model type {kind!r} is not served for {'vectors' if pooling.kind == 'embed' else 'scores'}. Served are "
            f"{served}."
        )
    if kind in CAUSAL and (pooling.pool != "last" or config.get("use_bidirectional_attention")):
        raise UnsupportedArchitecture(f"{kind} that pools by {pooling.pool!r} is not served; by the last token it is.")
    if is_encoder(config):
        if tp != 1:
            raise UnsupportedArchitecture(f"An encoder ({kind}) runs on one rank, not on {tp}. Leave --tp out.")
        if quant is not None:
            raise UnsupportedArchitecture(f"--quant {quant} can't pack an encoder ({kind}). Leave --quant out.")
        encoders.check(config)
    elif is_whole(config, pooling) and tp != 1:
        raise UnsupportedArchitecture(f"{kind} that pools all positions runs on one rank, not on {tp}. Leave --tp out.")


def longest_input(config: dict[str, Any]) -> int | None:
    """Tokens of the longest input of a model that gives vectors or scores, None for another one."""
    pooling = pooling_of(config)
    if pooling is None:
        return None
    return min(encoders.positions(config), pooling.max_length or _LARGEST)


def _architecture(config: dict[str, Any]) -> str:
    architectures = config.get("architectures")
    return str(cast(list[Any], architectures)[0]) if isinstance(architectures, list) and architectures else ""


def _cross_encoder(folder: Path, config: dict[str, Any]) -> Pooling:
    served = [kind for kind, family in sorted(ENCODERS.items()) if family.scores]
    if config["model_type"] not in served:
        raise UnsupportedArchitecture(
            f"{folder} is a classifier ({_architecture(config)}); served are those of {', '.join(served)}, "
            "and Qwen3-Reranker with modules.json and 1_LogitScore."
        )
    labels = config.get("id2label")
    count = len(cast(dict[Any, Any], labels)) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise UnsupportedArchitecture(
            f"{folder} classifies into {count} labels; served are models with one, which is the score of a pair."
        )
    return Pooling(kind="score", dimensions=1, activation=_activation(folder, config))


def _causal_reranker(folder: Path, config: dict[str, Any], labels: tuple[int, int]) -> Pooling:
    return Pooling(
        kind="score",
        dimensions=1,
        pool="last",
        labels=labels,
        activation=_activation(folder, config),
        pair=QWEN3_PAIR,
        instruction=QWEN3_INSTRUCTION,
    )


def _activation(folder: Path, config: dict[str, Any]) -> Activation:
    """sentence-transformers' rule: the activation that the files name, else a sigmoid for one label."""
    own = config.get("sentence_transformers")
    named = [
        cast(dict[str, Any], own).get("activation_fn") if isinstance(own, dict) else None,
        config.get("sbert_ce_default_activation_function"),
        read_object(folder / PROMPTS).get("activation_fn"),
    ]
    name = next((one for one in named if one), None)
    return "sigmoid" if name is None else activation_of(name, folder / "config.json")
