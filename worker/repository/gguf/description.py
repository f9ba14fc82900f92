"""Tokenizer, chat template and end ids of a GGUF model: the file's own, else those of a folder that has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.errors import ModelFilesError
from worker.repository.config_fields import read_object, token_ids
from worker.repository.files import chat_template, joined_templates, text_of
from worker.repository.gguf.tokenizer import cached_tokenizer, refusal
from worker.weights.gguf import GgufModel

SUFFIX = "-gguf"


@dataclass(frozen=True)
class Description:
    """The texts of tokenizer.json and of the chat template, tokenizer_config.json, and every id that ends an answer."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    eos_ids: list[int]


def describe(model: GgufModel) -> Description:
    """Raises ModelFilesError that names every place that was tried."""
    reason = refusal(model)
    if reason is None:
        try:
            converted = cached_tokenizer(model)
        except ModelFilesError as error:
            reason = str(error)
        else:
            config = dict(converted.tokenizer_config)
            template = _with_tools(model, config.pop("chat_template", None))
            return Description(converted.tokenizer_json, config, template, converted.ends)
    for folder in _folders(model):
        if (folder / "tokenizer.json").is_file():
            return _beside(model, folder)
    raise ModelFilesError(_tried(model, reason))


def check_described(model: GgufModel) -> None:
    """Raise ModelFilesError where `describe` would find no tokenizer; quick, because it makes none."""
    reason = refusal(model)
    if reason is not None and not any((folder / "tokenizer.json").is_file() for folder in _folders(model)):
        raise ModelFilesError(_tried(model, reason))


def base_repository(repository: str) -> str | None:
    """The repository without `-GGUF`, whose tokenizer is the same."""
    return repository[: -len(SUFFIX)] if repository.lower().endswith(SUFFIX) else None


def _folders(model: GgufModel) -> list[Path]:
    """The file's own folder, and the snapshots of the repository without `-GGUF` where both are in one cache."""
    path = model.files[0]
    folders = [path.parent]
    for parent in path.parents:
        if parent.name.startswith("models--") and (base := base_repository(parent.name)) is not None:
            folders += [parent] if parent not in folders else []
            folders += sorted((parent.parent / base / "snapshots").glob("*"))
    return folders


def _tried(model: GgufModel, reason: str) -> str:
    places = ", ".join(str(folder / "tokenizer.json") for folder in _folders(model))
    return f"{reason} Tried instead: {places}. Put the model's tokenizer.json beside the file."


def _beside(model: GgufModel, folder: Path) -> Description:
    config, generation = (read_object(folder / f"{name}_config.json") for name in ("tokenizer", "generation"))
    template = model.text("tokenizer.chat_template", None) or chat_template(folder, config)
    own_end = {"eos_token_id": model.whole("tokenizer.ggml.eos_token_id", None, least=0)}
    return Description(
        tokenizer_json=text_of(folder / "tokenizer.json"),
        tokenizer_config=config,
        chat_template=_with_tools(model, template),
        eos_ids=token_ids(own_end | generation, "eos_token_id") or [],
    )


def _with_tools(model: GgufModel, template: str | None) -> str | None:
    """A file may have one template more, for requests with tools."""
    tool_use = model.text("tokenizer.chat_template.tool_use", None)
    return template if tool_use is None else joined_templates(template, tool_use)
