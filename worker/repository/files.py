"""A model folder read without torch: its configuration, weight files and tokenizer, each fault with its own message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import msgspec

from control.errors import ModelFilesAway, ModelFilesError
from worker.repository.config_fields import TIED, is_tied, read_object, set_field
from worker.repository.gguf.configuration import configuration
from worker.repository.multimodal import FIELD, image_part, text_config
from worker.repository.pooling import described, pooling_of
from worker.weights.formats import StoredTensor
from worker.weights.gguf import GgufModel, read_model
from worker.weights.safetensors_header import read_headers, text_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model: those that a rank loads, and those that describe the model to the farm. `config` is that of
    the text part, with the image part under `image_part`. `tokenizer` is None in a rank that got only the weights, by
    its load command, and for a GGUF model, whose header is `gguf`."""

    config: dict[str, Any]
    weights: list[Path]
    folder: Path | None = None
    tokenizer: Path | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    gguf: GgufModel | None = None

    @classmethod
    def of_command(cls, config_json: str, safetensors_paths: list[str]) -> ModelFiles:
        """Raises ModelFilesError."""
        weights = [Path(path) for path in safetensors_paths]
        gguf = read_model(weights[0]) if weights and is_gguf(weights[0]) else None
        return cls(config=json.loads(config_json), weights=weights, gguf=gguf)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of the files by their stored names, from headers that are read once. Raises ModelFilesError."""
        return read_headers(self.weights) if self.gguf is None else self.gguf.tensors

    @property
    def weight_bytes(self) -> int:
        """Bytes of the files with weights. Raises OSError."""
        return sum(path.stat().st_size for path in self.weights)

    @property
    def where(self) -> str:
        return str(self.folder or (self.weights[0].parent if self.weights else "?"))


def inspect(folder: Path, images: bool = True) -> ModelFiles:
    """Read `folder`, or a GGUF file; no weight is read, only file headers, but for a head beside an embedding that is
    to be tied. Without `images` the image part is left out. Raises ModelFilesError that names the file at fault,
    ModelFilesAway where it is missing, or can't be read now."""
    try:
        return _inspect_gguf(Path(folder)) if is_gguf(folder) else _inspect(Path(folder), images)
    except OSError as error:
        raise ModelFilesAway(f"Model folder {folder} can't be read: {error}. Repair the file system.") from error


def is_gguf(path: Path) -> bool:
    """True for the name of a GGUF file."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def _inspect_gguf(path: Path) -> ModelFiles:
    model = read_model(path)
    return ModelFiles(config=configuration(model), weights=model.files, folder=path.parent, gguf=model)


def _inspect(folder: Path, images: bool) -> ModelFiles:
    if not folder.is_dir():
        raise ModelFilesAway(f"Model folder {folder} does not exist. Give a folder with config.json and safetensors.")
    config = read_object(folder / "config.json", required=True)
    if not isinstance(config.get("model_type"), str):
        raise ModelFilesError(f"{folder / 'config.json'} has no model_type, so its architecture is unknown.")
    files = files_of(folder, described(folder, _with_image_part(config, folder) if images else text_config(config)))
    _ = files.tensors  # a file that a broken download cut short, or a Git LFS pointer, is refused here
    _untie(files)
    return files


def files_of(folder: Path, config: dict[str, Any]) -> ModelFiles:
    """The files beside config.json. Raises ModelFilesAway where there are no weights or no tokenizer."""
    weights = weight_files(folder)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelFilesAway(
            f"{folder} has no tokenizer.json. Save a fast tokenizer there (`tokenizer.save_pretrained(folder)`)."
        )
    return ModelFiles(
        config=config,
        weights=weights,
        folder=folder,
        tokenizer=tokenizer,
        tokenizer_config=read_object(folder / "tokenizer_config.json"),
        generation_config=read_object(folder / "generation_config.json"),
    )


def _untie(files: ModelFiles) -> None:
    """Let a model keep the head that its files have beside the embedding, whatever config.json says, as transformers
    does where the two differ. A head that is the embedding once more would only take its memory twice."""
    if pooling_of(files.config) is not None or not is_tied(files.config):
        return
    tensors = text_tensors(files.tensors)
    if (head := tensors.get(HEAD)) is None:
        return
    if (embedding := tensors.get(EMBEDDING)) is not None:
        changed = [tensor.path.stat().st_mtime_ns for tensor in (head, embedding)]
        if _are_equal(head, embedding, *changed):
            return
    set_field(files.config, TIED, False)


@lru_cache(64)
def _are_equal(one: StoredTensor, other: StoredTensor, *_changed: int) -> bool:
    """True for the same bytes. Two that differ do so within the first ones; others are read once by a process,
    while their files stay as they are. Raises OSError."""
    if (one.type, one.shape) != (other.type, other.shape):
        return False
    with one.path.open("rb") as ours, other.path.open("rb") as theirs:
        ours.seek(one.start)
        theirs.seek(other.start)
        for start in range(0, one.bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, one.bytes - start)
            if ours.read(size) != theirs.read(size):
                return False
    return True


def _with_image_part(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration of the text part, and with it what the image part needs."""
    # transformers 5 writes both into the second file.
    processor = read_object(folder / "preprocessor_config.json")
    processor = processor or read_object(folder / "processor_config.json").get("image_processor")
    part = image_part(config, processor if isinstance(processor, dict) else {})
    return text_config(config) | ({} if part is None else {FIELD: msgspec.to_builtins(part)})


def shard_names(index: Path) -> list[str]:
    """The files that an index names, each once. Raises ModelFilesError."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFilesError(f"{index} has no weight_map.")
    for tensor, name in cast(dict[str, Any], weight_map).items():
        if not isinstance(name, str):
            raise ModelFilesError(
                f"{index} has {str(name)[:60]} for tensor {tensor[:60]}; the name of a file is needed."
            )
    return sorted(set(cast(dict[str, str], weight_map).values()))


def weight_files(folder: Path) -> list[Path]:
    """The unique shard files of the index, else the single file."""
    if (folder / INDEX).is_file():
        files = [folder / name for name in shard_names(folder / INDEX)]
        missing_names = [path.name for path in files if not path.is_file()]
        if missing_names:
            names = ", ".join(missing_names)
            raise ModelFilesAway(
                f"{folder / INDEX} names files that are missing in {folder}: {names}. Copy them there."
            )
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    other_files = sorted(
        path.name for path in folder.iterdir() if path.suffix in {".safetensors", ".bin", ".gguf", ".pt"}
    )
    hint = f" There is {', '.join(other_files)}, which is not read." if other_files else ""
    raise ModelFilesAway(f"{folder} has no weights: neither {SINGLE} nor {INDEX}.{hint}")


# The chat template of a model's files: one text, of several templates too.


WITH_TOOLS = "additional_chat_templates/tool_use.jinja"
"""A folder's template for requests with tools."""


def chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """chat_template.jinja first, then the template inside tokenizer_config.json. Of several the one named `tool_use` is
    for requests with tools, and `default` for others. Raises ModelFilesError for a template that is no text."""
    template = tokenizer_config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(template, list):
        templates = dict(_named(entry) for entry in cast(list[Any], template))
        template = templates.get("default")
    elif template is not None and not isinstance(template, str):
        raise _no_template(template)
    template_file = folder / "chat_template.jinja"
    if template_file.exists():
        template = text_of(template_file)
    with_tools = folder / WITH_TOOLS
    tool_use = text_of(with_tools) if with_tools.exists() else templates.get("tool_use")
    return template if tool_use is None else joined_templates(template, tool_use)


def text_of(path: Path) -> str:
    """Raises ModelFilesError for a file in other bytes than UTF-8's."""
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ModelFilesError(f"{path} is no text in UTF-8: {error}. Save it as UTF-8.") from error


def _named(entry: Any) -> tuple[str, str]:
    fields = cast(dict[str, Any], entry) if isinstance(entry, dict) else {}
    name = fields.get("name")
    template = fields.get("template")
    if not isinstance(name, str) or not isinstance(template, str):
        raise _no_template(entry)
    return name, template


def _no_template(value: object) -> ModelFilesError:
    return ModelFilesError(
        f"tokenizer_config.json has chat_template = {str(value)[:60]}; a text is needed, or a list of objects with "
        "name and template."
    )


def joined_templates(default: str | None, tool_use: str) -> str:
    """One template that is `tool_use` where there are tools, and `default` elsewhere, as transformers chooses."""
    if default is None:
        return tool_use
    # A line break at a template's end is not rendered, and one after a block's mark is, with +.
    shorter = default.removesuffix("\n")
    with_tools = tool_use.removesuffix("\n")
    return f"{{%+ if tools +%}}{with_tools}{{%+ else +%}}{shorter}{{%+ endif %}}"
