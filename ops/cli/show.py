"""`furrow show MODEL`: its architecture, files and settings, without loading it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from api.chat.forms import forms_of
from api.chat.tokens import NoEncoder, Vocabulary
from control.errors import FurrowError, ModelFilesError, ModelNotFound
from control.messages import ModelKind, ModelSpec
from control.operations.options import connect_to_farm, farm_named, redis_option
from control.records import catalog
from control.records.backend import backends
from control.redis.connection import run
from control.sizes import in_words
from ops.cli.tables import echo_json, echo_line, fit, json_option
from ops.demo import MODEL_DIR
from worker.repository.assets import chat_template
from worker.repository.files import ModelFiles, inspect
from worker.repository.pooling import pooling_of
from worker.repository.source import on_this_host
from worker.repository.validation import context_length
from worker.weights.gguf import GgufModel
from worker.weights.safetensors_header import read_headers
from worker.weights.schemes import scheme_of


class FarmModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model as the farm serves it: settings, and what it has loaded. `kernels` and `kv_tokens` are None before."""

    spec: ModelSpec
    context_length: int | None
    kv_tokens: int | None
    tool_format: str | None
    thinking: bool | None
    template: str | None
    kernels: dict[str, list[str]]


class ModelShown(msgspec.Struct, frozen=True, kw_only=True):
    """`files` are those on this host, None with the reason in `files_missing`; `served` is None for no farm's model."""

    name: str
    source: str
    files: ModelSummary | None
    files_missing: str | None
    served: FarmModel | None


@click.command()
@click.argument("model")
@click.option("--gguf", metavar="Q4_K_M|FILE", help="The GGUF file of several.")
@click.option("--template", is_flag=True, help="Print the chat template alone.")
@json_option
@redis_option
def show(model: str, gguf: str | None, template: bool, as_json: bool, redis_url: str | None) -> None:
    """Show MODEL: a model of the farm, `demo`, a folder, a GGUF file, or a repository in this host's cache.

    It shows architecture, parameters, quantization, context, template, tool format, files, types of tensors, licence,
    and the settings with which it is loaded. The files are read where this host has them; no weight is.
    """
    shown = _shown(model, gguf, redis_url)
    if template:
        text = shown.served.template if shown.served is not None else None
        text = text or (shown.files.template if shown.files is not None else None)
        click.echo(fit(text or ""), nl=False)
    elif as_json:
        echo_json(shown)
    else:
        for name, value in _lines(shown):
            echo_line(f"{name:<16} {value}".rstrip())


def _shown(model: str, gguf: str | None, redis_url: str | None) -> ModelShown:
    """Raises ModelNotFound, ModelFilesError."""
    served = _served(model, redis_url)
    source = served.spec.source if served is not None else str(MODEL_DIR) if model == "demo" else model
    gguf = gguf or (served.spec.gguf if served is not None else None)
    try:
        place = on_this_host(source, gguf)
        if place is None:
            prefix = "" if served is not None else "no model of a farm that --redis or REDIS_URL names, and "
            raise ModelFilesError(f"'{source}' is {prefix}no repository that is whole in this host's cache.")
        images = served.spec.images if served is not None else True
        files = summarize(inspect(place, images), images)
        missing = None
    except (FurrowError, OSError) as error:
        if served is None:
            raise
        files = None
        missing = str(error)
    return ModelShown(name=model, source=source, files=files, files_missing=missing, served=served)


def _served(model: str, redis_url: str | None) -> FarmModel | None:
    """The farm's model of this name. Without a farm, or for a path, None."""
    if Path(model).expanduser().exists() or farm_named(redis_url) is None:
        return None
    client = connect_to_farm(redis_url)
    spec = catalog.get_spec(client, model)
    if spec is None:
        if model == "demo" or "/" in model or model.lower().endswith(".gguf"):
            return None
        raise ModelNotFound(model, [other.name for other in catalog.list_specs(client)])
    assets = catalog.get_assets(client, model)
    forms = None if assets is None else forms_of(assets.chat_template, Vocabulary(assets, NoEncoder()))
    return FarmModel(
        spec=spec,
        context_length=None if assets is None else assets.context_length,
        kv_tokens=None if assets is None else assets.kv_tokens,
        tool_format=None if forms is None else forms.calls,
        thinking=None if forms is None else forms.thinking is not None,
        template=None if assets is None else assets.chat_template,
        kernels={name: backend.kernels for name, backend in run(client, backends(model)).items()},
    )


def _lines(shown: ModelShown) -> list[tuple[str, Any]]:
    files = shown.files
    served = shown.served
    lines: list[tuple[str, Any]] = [("model", shown.name), ("source", shown.source)]
    if files is not None:
        lines += _file_lines(files)
    else:
        lines.append(("files", f"not read: {shown.files_missing}"))
    if served is not None:
        lines += _served_lines(served)
    return lines


def _file_lines(files: ModelSummary) -> list[tuple[str, Any]]:
    shape = {"layers": files.layers, "width": files.hidden_size, "heads": files.heads}
    shape |= {"key-value heads": files.kv_heads, "experts": files.experts or None}
    size = sum(file.bytes for file in files.files)
    lines: list[tuple[str, Any]] = [
        ("kind", files.kind + (", takes images" if files.images else "")),
        ("architecture", files.architecture),
        ("parameters", in_numbers(files.parameters)),
        ("quantization", files.quantization or "none"),
        ("context", f"{files.context_length} tokens"),
        ("vocabulary", f"{files.vocab_size} tokens"),
        ("shape", ", ".join(f"{value} {name}" for name, value in shape.items() if value is not None)),
        ("template", "none" if files.template is None else f"{len(files.template)} characters (--template prints it)"),
        ("licence", files.licence or "not named"),
        ("tensors", ", ".join(f"{kind.tensors} {name} ({in_words(kind.bytes)})" for name, kind in files.types.items())),
    ]
    return [*lines, ("files", f"{len(files.files)} with {in_words(size)}: {_first(files)}")]


def _first(files: ModelSummary) -> str:
    first = files.files[0].path
    return first if len(files.files) == 1 else f"{first} …"


def _served_lines(served: FarmModel) -> list[tuple[str, Any]]:
    defaults = ModelSpec(name="", source="")
    changed = {
        field: value
        for field, value in msgspec.structs.asdict(served.spec).items()
        if field not in ("name", "source", "revision") and value != getattr(defaults, field)
    }
    settings = ", ".join(f"{name} {value}" for name, value in changed.items()) or "defaults"
    lines: list[tuple[str, Any]] = [("settings", settings), ("revision", served.spec.revision)]
    if served.kv_tokens is None:
        return [*lines, ("loaded", "not yet")]
    lines += [
        ("served context", f"{served.context_length} tokens, KV memory of {served.kv_tokens}"),
        ("tool format", served.tool_format or "none that is known: calls of this model are not understood"),
        ("reasoning", "yes" if served.thinking else "no"),
    ]
    return [*lines, *(("kernels", f"{name}: {', '.join(names)}") for name, names in sorted(served.kernels.items()))]


def in_numbers(count: int) -> str:
    """A number of parameters as people write it.

    >>> in_numbers(596_049_920)
    '596 M'
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


# --- the summary of a model's files -----------------------------------------------------------------------------------


_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of plain weights in safetensors files."""
_PACKED = {"I32": 8, "U8": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1}
"""Weights in one number of a quantized checkpoint's type: four bits each, but for bytes."""
_BESIDE = ("scale", "scales", "zero", "zeros", "g_idx", "weight_shape", "zero_point")
"""Last parts of the names of tensors that are no weights."""
_FILE_TYPES: dict[int, str] = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L"), 7)),
    **dict(enumerate(("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"), 14)),
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    30: "IQ4_XS",
    32: "BF16",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}
"""`general.file_type` of GGUF files, by llama.cpp's numbers (llama.h, llama_ftype)."""
_LICENCE = re.compile(r"^license:\s*(\S+)", re.MULTILINE)


class TensorKind(msgspec.Struct, frozen=True, kw_only=True):
    tensors: int
    bytes: int


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    bytes: int


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`parameters` counts weights, those of packed tensors too; `quantization` is the stored one, None for plain
    weights. `types` has the tensors of each stored type. `template` is the text of the chat template."""

    kind: ModelKind
    architecture: str
    parameters: int
    quantization: str | None
    context_length: int
    vocab_size: int
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    experts: int | None
    images: bool
    template: str | None
    licence: str | None
    files: list[ModelFile]
    types: dict[str, TensorKind]


class _Tensor(NamedTuple):
    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    weights: int


def summarize(files: ModelFiles, images: bool = True) -> ModelSummary:
    """Raises ModelFilesError, OSError where a file went away."""
    config = files.config
    pooling = pooling_of(files.config)
    tensors = list(_gguf_tensors(files.gguf) if files.gguf is not None else _tensors(files.weights))
    return ModelSummary(
        kind="generate" if pooling is None else pooling.kind,
        architecture=str(config["model_type"]),
        parameters=sum(tensor.weights for tensor in tensors),
        quantization=_quantization(files, tensors),
        context_length=context_length(config),
        vocab_size=int(config["vocab_size"]),
        layers=_number(config, "num_hidden_layers"),
        hidden_size=_number(config, "hidden_size"),
        heads=_number(config, "num_attention_heads"),
        kv_heads=_number(config, "num_key_value_heads") or _number(config, "num_attention_heads"),
        experts=_number(config, "num_experts") or _number(config, "num_local_experts"),
        images=images and "image_part" in config,
        template=_template(files),
        licence=_licence(files),
        files=[ModelFile(path=str(path), bytes=path.stat().st_size) for path in files.weights],
        types=_types(tensors),
    )


def _types(tensors: list[_Tensor]) -> dict[str, TensorKind]:
    """The most bytes first."""
    counts: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        count, size = counts.get(tensor.type, (0, 0))
        counts[tensor.type] = count + 1, size + tensor.bytes
    order = sorted(counts.items(), key=lambda item: -item[1][1])
    return {name: TensorKind(tensors=count, bytes=size) for name, (count, size) in order}


def _tensors(paths: list[Path]) -> Iterator[_Tensor]:
    for name, tensor in read_headers(paths).items():
        kind = tensor.type.name
        yield _Tensor(name, kind.lower(), tensor.shape, tensor.bytes, _weights(name, kind, tensor.shape))


def _weights(name: str, kind: str, shape: tuple[int, ...]) -> int:
    """Weights of a tensor, 0 for scales and the like."""
    last = name.rpartition(".")[2]
    if last in _BESIDE or last.endswith(("_scale", "_scales", "_scale_inv", "_zero_point", "qzeros")):
        return 0
    return prod(shape) * (1 if kind in _SIZES else _PACKED.get(kind, 1))


def _gguf_tensors(model: GgufModel) -> Iterator[_Tensor]:
    for name, tensor in model.tensors.items():
        yield _Tensor(name, tensor.type.name, tensor.shape, tensor.bytes, prod(tensor.shape))


def _quantization(files: ModelFiles, tensors: list[_Tensor]) -> str | None:
    if files.gguf is not None:
        blocks = [name for name in _types(tensors) if name not in ("f32", "f16", "bf16")]
        return _FILE_TYPES.get(files.gguf.whole("general.file_type", -1, least=0), blocks[0]) if blocks else None
    scheme = scheme_of(files.config)
    return None if scheme is None else f"{scheme.method} ({', '.join(sorted(scheme.kinds))})"


def _template(files: ModelFiles) -> str | None:
    if files.gguf is not None:
        return files.gguf.text("tokenizer.chat_template", None)
    return None if files.folder is None else chat_template(files.folder, files.tokenizer_config)


def _licence(files: ModelFiles) -> str | None:
    """As the files name it: a GGUF file's field, else the head of README.md, else the name of a licence's file."""
    if files.gguf is not None and (licence := files.gguf.text("general.license", None)):
        return str(licence)
    if files.folder is None:
        return None
    try:
        if line := _LICENCE.search((files.folder / "README.md").read_text(encoding="utf-8", errors="replace")[:4096]):
            return line[1].strip("\"'")
    except OSError:
        pass
    return next((path.name for path in sorted(files.folder.glob("LICENSE*"))), None)


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
