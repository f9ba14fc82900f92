"""The files of sentence-transformers beside a checkpoint: modules.json, and the configuration of each module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from control.errors import ModelFilesAway, ModelFilesError, UnsupportedArchitecture
from worker.repository.pooling.description import Activation, Dense, Pool, Pooling

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
    dimensions = width if isinstance(width, int) and not isinstance(width, bool) else 0
    dense, normalize = list[Dense](), False
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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file, {} where there is no file. Raises ModelFilesError."""
    if not path.is_file():
        return {}
    content = _read(path)
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return cast(dict[str, Any], content)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from error


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Class and folder of each module, in order."""
    content, modules = _read(folder / MODULES), list[tuple[str, str]]()
    for one in cast(list[Any], content) if isinstance(content, list) else [None]:
        kind = cast(dict[str, Any], one).get("type") if isinstance(one, dict) else None
        path = cast(dict[str, Any], one).get("path", "") if isinstance(one, dict) else None
        if not isinstance(kind, str) or not isinstance(path, str) or path.startswith("/") or ".." in Path(path).parts:
            raise ModelFilesError(
                f"{folder / MODULES} must hold a list of modules with 'type' and 'path', not {one!r}."
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
    config, path = read_object(folder / "config.json"), folder / "config.json"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ModelFilesAway(f"{weights} is missing. Download it again; other forms of it are not read.")
    stored_inputs, outputs = config.get("in_features"), config.get("out_features")
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
