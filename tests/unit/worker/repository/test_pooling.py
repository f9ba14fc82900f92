"""Models of vectors or scores are checked: what their files say, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.repository import validation
from worker.repository.pooling import FIELD, described, module_files, pooling_of

BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 131,
    "max_position_embeddings": 512,
}
MEAN = {"pooling_mode_mean_tokens": True}
RANKER = {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def write(folder: Path, **files: Any) -> Path:
    """JSON files by name, in which __ stands for a slash."""
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, str]]:
    return [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{index}_{kind}" if index else ""}
        for index, kind in enumerate(kinds)
    ]


def checked(folder: Path, config: dict[str, Any], tp: int = 1, quant: str | None = None) -> dict[str, Any]:
    with_pooling = described(folder, config)
    validation.check(with_pooling, tp, quant=quant)
    return with_pooling


def test_the_files_say_how_vectors_are_made(tmp_path: Path) -> None:
    """Pooling, length, prompts and normalisation; a field of config.json can't say it instead."""
    write(
        tmp_path,
        modules=modules("Transformer", "Pooling", "Normalize"),
        **{"1_Pooling__config": MEAN},
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "q: "}, "default_prompt_name": "query"},
    )
    config = checked(tmp_path, {**BERT, FIELD: {"kind": "score"}})
    pooling = pooling_of(config)
    assert pooling is not None
    assert (pooling.kind, pooling.pool, pooling.normalize, pooling.dimensions) == ("embed", "mean", True, 32)
    assert (pooling.prompts, pooling.default_prompt, pooling.lower) == ({"query": "q: "}, "query", True)
    assert validation.context_length(config) == 256
    assert pooling_of(described(tmp_path / "elsewhere", {"model_type": "qwen3", FIELD: {}})) is None


def test_positions_of_roberta_begin_behind_its_padding(tmp_path: Path) -> None:
    write(tmp_path, modules=modules("Transformer", "Pooling"), **{"1_Pooling__config": {"pooling_mode": "cls"}})
    config = checked(tmp_path, {**BERT, "model_type": "xlm-roberta", "max_position_embeddings": 514})
    assert validation.context_length(config) == 512


def test_all_files_of_the_modules_are_fetched(tmp_path: Path) -> None:
    write(tmp_path, modules=modules("Transformer", "Pooling", "Dense", "Normalize"))
    names = module_files(tmp_path / "modules.json")
    assert {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= set(names)


@pytest.mark.parametrize(
    ("kinds", "pooling", "changes", "message"),
    [
        (("Transformer",), MEAN, {}, "has the modules Transformer"),
        (("Transformer", "Pooling", "LayerNorm"), MEAN, {}, "has the module LayerNorm, which is not served"),
        (("Transformer", "Pooling", "Normalize", "Dense"), MEAN, {}, "module Dense after Normalize"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, {}, "pools by max; served is one of"),
        (("Transformer", "Pooling"), {**MEAN, "pooling_mode_cls_token": True}, {}, "pools by cls and mean"),
        (("Transformer", "Pooling"), {}, {}, "is missing, so how vectors are pooled is not known"),
        (("Transformer", "Pooling"), {**MEAN, "include_prompt": False}, {}, "include_prompt"),
        (("Transformer", "Pooling", "Dense"), MEAN, {}, "2_Dense/model.safetensors is missing"),
        (("Transformer", "Pooling"), MEAN, {"model_type": "nomic_bert"}, "'nomic_bert' is not served for vectors"),
        (("Transformer", "Pooling"), MEAN, {"model_type": "distilbert", "dim": True}, "config.json has dim = True"),
        (("Transformer", "Pooling"), MEAN, {"model_type": "mpnet", "relative_attention_num_buckets": 8}, "buckets = 8"),
        (("Transformer", "Pooling"), MEAN, {"model_type": "modernbert", "layer_types": ["full"]}, "layer_types for 2"),
        (("Transformer", "Pooling"), MEAN, {"model_type": "modernbert", "local_rope_theta": -1}, "theta -1"),
        (("Transformer", "Pooling"), MEAN, {"model_type": "modernbert", "rope_scaling": {"a": 1}}, "rotary positions"),
        (
            ("Transformer", "Pooling"),
            MEAN,
            {"model_type": "modernbert", "local_attention": "8"},
            "local_attention = '8'",
        ),
        (("Transformer", "Pooling"), MEAN, {"model_type": "qwen3"}, "qwen3 that pools by 'mean'"),
        (("Transformer", "Pooling"), MEAN, {"hidden_size": 30}, "hidden_size = 30"),
        (("Transformer", "Pooling"), MEAN, {"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        (("Transformer", "Pooling"), MEAN, {"hidden_act": "mish"}, "'mish'"),
        (("Transformer", "Pooling"), MEAN, {"position_embedding_type": "relative_key"}, "relative_key"),
        (("Transformer", "Pooling"), MEAN, {"is_decoder": True}, "only encoders"),
        (("Transformer", "LogitScore"), {}, {"model_type": "qwen3"}, "in the form of Qwen3-Reranker"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, kinds: tuple[str, ...], pooling: Any, changes: Any, message: str
) -> None:
    write(tmp_path, modules=modules(*kinds), tokenizer={"model": {"vocab": {}}})
    if pooling:
        write(tmp_path, **{"1_Pooling__config": pooling})
    if "LogitScore" in kinds:
        write(tmp_path, **{"1_LogitScore__config": {"true_token_id": 5, "false_token_id": None}})
    with pytest.raises((ModelFilesError, UnsupportedArchitecture)) as refused:
        checked(tmp_path, {**BERT, **changes})
    assert message in str(refused.value), refused.value


def test_an_encoder_needs_its_modules_and_one_rank(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"without modules\.json"):
        described(tmp_path, BERT)
    write(tmp_path, modules=modules("Transformer", "Pooling"), **{"1_Pooling__config": MEAN})
    with pytest.raises(UnsupportedArchitecture, match="runs on one rank, not on 2"):
        checked(tmp_path, BERT, tp=2)
    with pytest.raises(UnsupportedArchitecture, match="--quant int8 can't pack an encoder"):
        checked(tmp_path, BERT, quant="int8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "2 labels"),
        ({"model_type": "qwen3"}, "is a classifier"),
        ({"model_type": "modernbert"}, "served are those of bert, camembert, mpnet, roberta, xlm-roberta"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.GELU"}}, "GELU"),
    ],
)
def test_a_cross_encoder_has_one_label(tmp_path: Path, changes: Any, message: str) -> None:
    """Its score passes through a sigmoid, where the files name no other activation."""
    pooling = pooling_of(checked(tmp_path, RANKER))
    assert pooling is not None and (pooling.kind, pooling.activation) == ("score", "sigmoid")
    with pytest.raises(UnsupportedArchitecture, match=message):
        checked(tmp_path, {**RANKER, **changes})
