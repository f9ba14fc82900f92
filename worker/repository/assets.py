"""The assets of a model, read from its folder for the catalog and the API processes."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from control.errors import ModelFilesError
from control.messages import ModelAssets, ModelSpec, PoolingAssets
from control.text.tokenizer_check import judge
from worker.repository.files import chat_template, text_of
from worker.repository.gguf.description import describe
from worker.repository.multimodal import part_of
from worker.repository.pooling import pooling_of
from worker.repository.validation import ModelFiles, context_length, eos_ids
from worker.weights.gguf import GgufModel

MOST_TOKENIZER_BYTES = 256 << 20
"""Published ones have some 35 MB at most."""


def assets_of(files: ModelFiles, spec: ModelSpec) -> ModelAssets:
    """Those of a model with this specification."""
    assets = read_assets(files, spec.max_context)
    return msgspec.structs.replace(assets, generation_config={**assets.generation_config, **spec.sampling})


def read_assets(files: ModelFiles, max_context: int | None) -> ModelAssets:
    """Tokenizer, chat template and generation defaults; `max_context` lowers the context length."""
    if files.gguf is not None:
        return _assets_of_gguf(files, files.gguf, max_context)
    if files.folder is None or files.tokenizer is None:
        raise ModelFilesError(f"{files.where} has no tokenizer: an API could not serve the model")
    return ModelAssets(
        tokenizer_json=text_of(files.tokenizer),
        tokenizer_config=files.tokenizer_config,
        chat_template=chat_template(files.folder, files.tokenizer_config),
        generation_config=files.generation_config,
        context_length=max_context or context_length(files.config),
        vocab_size=int(files.config["vocab_size"]),
        eos_ids=eos_ids(files.config, files.generation_config),
        kv_tokens=0,
        created=int(time.time()),
        images=part.input if (part := part_of(files.config)) is not None else None,
        pooling=_pooling(files.config),
    )


def check_tokenizer(files: ModelFiles) -> None:
    """Raise ModelFilesError for a tokenizer.json that no API process would use. The tokenizer of a GGUF file is made of
    known parts."""
    if files.tokenizer is None:
        return
    size = files.tokenizer.stat().st_size
    if size > MOST_TOKENIZER_BYTES:
        reason = f"it has {size} bytes; at most {MOST_TOKENIZER_BYTES} are read"
    else:
        try:
            reason = judge(text_of(files.tokenizer)).decoding
        except ModelFilesError as error:
            reason = f"it can't be read: {error}"
    if reason:
        raise ModelFilesError(
            f"{files.tokenizer} can't be used to decode answers: {reason}. Put the published tokenizer there "
            "(`tokenizer.save_pretrained(folder)`), or load another model."
        )


def _pooling(config: dict[str, Any]) -> PoolingAssets | None:
    """The preparation of inputs of a model that gives vectors or scores."""
    pooling = pooling_of(config)
    if pooling is None:
        return None
    return PoolingAssets(
        kind=pooling.kind,
        dimensions=pooling.dimensions,
        lower=pooling.lower,
        types=int(config.get("type_vocab_size", 0)) > 1,
        prompts=pooling.prompts,
        default_prompt=pooling.default_prompt,
        pair=pooling.pair,
        instruction=pooling.instruction,
    )


def _assets_of_gguf(files: ModelFiles, model: GgufModel, max_context: int | None) -> ModelAssets:
    described = describe(model)
    return ModelAssets(
        tokenizer_json=described.tokenizer_json,
        tokenizer_config=described.tokenizer_config,
        chat_template=described.chat_template,
        generation_config=files.generation_config,
        context_length=max_context or context_length(files.config),
        vocab_size=int(files.config["vocab_size"]),
        eos_ids=described.eos_ids,
        kv_tokens=0,
        created=int(time.time()),
    )
