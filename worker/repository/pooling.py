"""Models that give vectors or scores, from metadata alone: how they pool, by the files of sentence-transformers, and
whether they can be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from control.errors import ModelFilesAway, ModelFilesError, UnsupportedArchitecture
from control.messages import ModelKind
from worker.families.encoders import ENCODERS, check_encoder, positions, unified
from worker.families.fields import LARGEST, is_whole
from worker.families.registry import FAMILIES
from worker.repository.config_fields import TIED, read_json, read_object, set_field

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
    pooled = {**config, FIELD: msgspec.to_builtins(pooling)}
    set_field(pooled, TIED, True)
    return pooled


def without_places(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the paths of projections, which differ by host."""
    pooling = pooling_of(config)
    if pooling is None:
        return config
    dense = [msgspec.structs.replace(dense_layer, weights="") for dense_layer in pooling.dense]
    return with_pooling(config, msgspec.structs.replace(pooling, dense=dense))


MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"

_POOLS: dict[str, Pool] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Tanh": "tanh", "Sigmoid": "sigmoid"}


def read_embedding(folder: Path, config: dict[str, Any]) -> Pooling:
    """The pooling that modules.json and the files it names describe. Raises ModelFilesError naming the file at fault,
    UnsupportedArchitecture for a module or a mode that is not served."""
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise UnsupportedArchitecture(
            f"{folder / MODULES} has the modules {', '.join(kinds)}; served are models of Transformer, then Pooling, "
            "Dense and Normalize."
        )
    width = config.get("hidden_size")
    dimensions = width if is_whole(width, 0) else 0
    dense = list[Dense]()
    normalize = False
    for kind, path in modules[2:]:
        if kind == "Normalize":
            normalize = True
        elif kind == "Dense" and not normalize:
            dense.append(_dense(folder / path, dimensions))
            dimensions = dense[-1].outputs
        else:
            after = " after Normalize" if normalize else ""
            raise UnsupportedArchitecture(
                f"{folder / MODULES} has the module {kind}{after}, which is not served. Served are Transformer, "
                "Pooling, Dense and Normalize, in this order."
            )
    prompts = read_object(folder / PROMPTS)
    lengths = read_object(folder / modules[0][1] / LENGTHS)
    longest = lengths.get("max_seq_length")
    return Pooling(
        kind="embed",
        dimensions=dimensions,
        pool=_pool(folder / modules[1][1] / "config.json"),
        dense=dense,
        normalize=normalize,
        max_length=longest if isinstance(longest, int) and longest > 0 else None,
        lower=lengths.get("do_lower_case") is True,
        prompts=_texts(folder / PROMPTS, prompts),
        default_prompt=prompts.get("default_prompt_name") or "",
    )


def read_label_tokens(folder: Path) -> tuple[int, int] | None:
    """The tokens for "yes" and "no" of a causal model that scores pairs by their logits, where modules.json says so.
    Raises ModelFilesError and UnsupportedArchitecture."""
    modules = _modules(folder)
    if [kind for kind, _ in modules] != ["Transformer", "LogitScore"]:
        return None
    path = folder / modules[1][1] / "config.json"
    config = read_object(path)
    ids = config.get("true_token_id"), config.get("false_token_id")
    vocabulary = read_object(folder / "tokenizer.json").get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict) or ids != (vocabulary.get("yes"), vocabulary.get("no")) or None in ids:
        raise UnsupportedArchitecture(
            f"{path} scores by the tokens {ids[0]!r} and {ids[1]!r}; served are models in the form of Qwen3-Reranker, "
            "whose tokens are 'yes' and 'no'."
        )
    return cast(tuple[int, int], ids)


def activation_of(name: object, where: Path) -> Activation:
    """torch's name of an activation, as `torch.nn.modules.linear.Identity`. Raises UnsupportedArchitecture."""
    activation = _ACTIVATIONS.get(str(name).rpartition(".")[2])
    if activation is None:
        raise UnsupportedArchitecture(
            f"{where} has the activation {name!r}; served are {', '.join(sorted(_ACTIVATIONS))}."
        )
    return activation


def module_files(modules_json: Path) -> list[str]:
    """The files that a modules.json names beside the checkpoint's own, some of which may be missing."""
    names = [PROMPTS, LENGTHS]
    for kind, path in _modules(modules_json.parent):
        if path:
            names.append(f"{path}/config.json")
        if kind == "Dense":  # its weights; another module's are among the checkpoint's
            names.append(f"{path}/model.safetensors")
    return names


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Class and folder of each module, in order."""
    content = read_json(folder / MODULES)
    modules = list[tuple[str, str]]()
    for entry in cast(list[Any], content) if isinstance(content, list) else [None]:
        kind = cast(dict[str, Any], entry).get("type") if isinstance(entry, dict) else None
        path = cast(dict[str, Any], entry).get("path", "") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or not isinstance(path, str) or path.startswith("/") or ".." in Path(path).parts:
            raise ModelFilesError(
                f"{folder / MODULES} must hold a list of modules with 'type' and 'path', not {entry!r}."
            )
        modules.append((kind.rpartition(".")[2], path))
    return modules


def _pool(path: Path) -> Pool:
    config = read_object(path)
    if not config:
        raise ModelFilesAway(f"{path} is missing, so how vectors are pooled is not known. Download it again.")
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [name for flag, name in _FLAGS.items() if config.get(flag) is True]
    if len(modes) != 1 or modes[0] not in _POOLS:
        raise UnsupportedArchitecture(
            f"{path} pools by {' and '.join(modes) or 'nothing'}; served is one of {', '.join(_POOLS)}."
        )
    if config.get("include_prompt") is False:
        raise UnsupportedArchitecture(f"{path} has include_prompt = false: pooling without the prompt is not served.")
    return _POOLS[modes[0]]


def _dense(folder: Path, inputs: int) -> Dense:
    config = read_object(folder / "config.json")
    path = folder / "config.json"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ModelFilesAway(f"{weights} is missing. Download it again; other forms of it are not read.")
    stored_inputs = config.get("in_features")
    outputs = config.get("out_features")
    if stored_inputs != inputs or not isinstance(outputs, int) or outputs < 1:
        raise ModelFilesError(
            f"{path} has in_features = {stored_inputs!r}, out_features = {outputs!r}; it gets {inputs} values."
        )
    name = config.get("module_input_name", "sentence_embedding")
    if name != "sentence_embedding":
        raise UnsupportedArchitecture(f"{path} projects {name!r}; served are projections of the pooled vector.")
    return Dense(
        weights=str(weights),
        inputs=inputs,
        outputs=outputs,
        bias=config.get("bias", True) is not False,
        activation=activation_of(config.get("activation_function", "torch.nn.modules.activation.Tanh"), path),
    )


def _texts(path: Path, config: dict[str, Any]) -> dict[str, str]:
    texts = config.get("prompts") or {}
    pairs = cast(dict[Any, Any], texts).items() if isinstance(texts, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in pairs):
        raise ModelFilesError(f"{path} has prompts = {texts!r}; an object of texts is needed.")
    prompts = cast(dict[str, str], texts)
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelFilesError(f"{path} has default_prompt_name = {default!r}, which is not among its prompts.")
    return prompts


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


def described(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the model in `folder`, with its pooling where it gives vectors or scores. Raises
    ModelFilesError and UnsupportedArchitecture."""
    config = unified({name: value for name, value in config.items() if name != FIELD})
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


def is_in_one_row(config: dict[str, Any], pooling: Pooling) -> bool:
    """True if a sequence is computed in one row, because a position may see later ones or all are pooled."""
    return is_encoder(config) or pooling.pool != "last" or bool(config.get("use_bidirectional_attention"))


def check_pooling(config: dict[str, Any], pooling: Pooling, tp: int, quant: str | None) -> None:
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
        check_encoder(config)
    elif is_in_one_row(config, pooling) and tp != 1:
        raise UnsupportedArchitecture(f"{kind} that pools all positions runs on one rank, not on {tp}. Leave --tp out.")


def longest_input(config: dict[str, Any]) -> int | None:
    """Tokens of the longest input of a model that gives vectors or scores, None for another one."""
    pooling = pooling_of(config)
    if pooling is None:
        return None
    return min(positions(config), pooling.max_length or LARGEST)


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
    own_fields = config.get("sentence_transformers")
    names = [
        cast(dict[str, Any], own_fields).get("activation_fn") if isinstance(own_fields, dict) else None,
        config.get("sbert_ce_default_activation_function"),
        read_object(folder / PROMPTS).get("activation_fn"),
    ]
    name = next((name for name in names if name), None)
    return "sigmoid" if name is None else activation_of(name, folder / "config.json")
