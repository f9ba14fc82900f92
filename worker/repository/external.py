"""The files of a model that an external engine serves: what an API process needs of them, whatever the type of the
model is. Only the engine reads the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from control.engines import ENGINES
from control.errors import ModelFilesAway, ModelFilesError, UnsupportedArchitecture
from control.messages import ModelAssets, ModelSpec
from worker.repository.assets import assets_of, check_tokenizer
from worker.repository.config_fields import read_object
from worker.repository.files import ModelFiles, files_of, is_gguf
from worker.repository.fingerprint import fingerprints
from worker.repository.gguf.configuration import configuration
from worker.repository.pooling import MODULES, described
from worker.weights.gguf import GgufModel, read_model

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class ExternalModel:
    """The facts about a model of an external engine that a leader and an API process need."""

    files: ModelFiles
    assets: ModelAssets
    fingerprint: str
    """Of the files."""


def external_model(place: Path, spec: ModelSpec) -> ExternalModel:
    """The model in a folder, or a GGUF file. Raises ModelFilesError for one that the engine can't take, or that has no
    tokenizer."""
    engine = ENGINES[spec.engine]
    if is_gguf(place) != engine.gguf:
        needed = "a GGUF file" if engine.gguf else "a folder with safetensors"
        raise ModelFilesError(f"{engine.title} needs {needed}, and {place} is none. Name another source or engine.")
    check_adapter_files(spec)
    try:
        files = _gguf_files(place) if engine.gguf else _folder_files(place)
        check_tokenizer(files)
        read = assets_of(files, spec)
        if read.kind != "generate" and not engine.embeds:
            raise ModelFilesError(f"{place} gives vectors, which Furrow does not read from {engine.title}.")
        if read.kind == "score":
            raise ModelFilesError(f"{place} gives scores, which Furrow reads from its own engine alone.")
        assets = msgspec.structs.replace(
            read, kv_tokens=read.context_length, images=None, engine=spec.engine, adapters=list(spec.adapters)
        )
        return ExternalModel(files, assets, fingerprints(files, spec.engine).stored)
    except OSError as error:
        raise ModelFilesAway(f"The files of {place} can't be read: {error}. Repair the file system.") from error


def check_adapter_files(spec: ModelSpec) -> None:
    """Raise ModelFilesError for an adapter whose files are not on this host, or have a form that is not served."""
    gguf = ENGINES[spec.engine].gguf
    for name, text in spec.adapters.items():
        place = Path(text)
        if gguf:
            if not is_gguf(place) or not place.is_file():
                raise ModelFilesError(f"The adapter {name} needs a GGUF file, and {place} is none on this host.")
            continue
        missing_files = [file for file in ADAPTER_FILES if not (place / file).is_file()]
        if missing_files:
            raise ModelFilesError(
                f"The adapter {name} needs {' and '.join(missing_files)} in {place} on this host. Save it with "
                "`save_pretrained(folder, safe_serialization=True)`."
            )


def _folder_files(folder: Path) -> ModelFiles:
    config = read_object(folder / "config.json", required=True)
    text = config.get("text_config")
    config = config | text if isinstance(text, dict) else config
    return files_of(folder, described(folder, config) if (folder / MODULES).is_file() else config)


def _gguf_files(path: Path) -> ModelFiles:
    model = read_model(path)
    try:
        config = configuration(model)
    except UnsupportedArchitecture:  # of Furrow's own engine
        config = _least_configuration(model)
    return ModelFiles(config=config, weights=model.files, folder=path.parent, gguf=model)


def _least_configuration(model: GgufModel) -> dict[str, Any]:
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise model.wrong("token_embd.weight", None, "a matrix is needed")
    return {
        "model_type": model.architecture,
        "max_position_embeddings": model.whole(f"{model.architecture}.context_length"),
        "vocab_size": embedding.shape[0],
        "eos_token_id": model.whole("tokenizer.ggml.eos_token_id", None, least=0),
    }
