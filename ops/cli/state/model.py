"""`furrow show MODEL`: a model of the farm, or of this host's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from api.chat.forms import forms_of
from api.chat.tokens import NoEncoder, Vocabulary
from control.errors import FurrowError, ModelFilesError, ModelNotFound
from control.messages import ModelSpec
from control.operations.options import connect_to_farm, farm_named, redis_option
from control.records import catalog
from control.records.backend import backends
from control.redis.connection import run
from control.sizes import in_words
from ops.cli.state.model_summary import ModelSummary, summarize
from ops.cli.tables import echo_json, echo_line, fit, json_option
from ops.demo import MODEL_DIR
from worker.repository.files import inspect
from worker.repository.source import on_this_host


class Served(msgspec.Struct, frozen=True, kw_only=True):
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
    served: Served | None


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
            what = "" if served is not None else "no model of a farm that --redis or REDIS_URL names, and "
            raise ModelFilesError(f"'{source}' is {what}no repository that is whole in this host's cache.")
        images = served.spec.images if served is not None else True
        files, missing = summarize(inspect(place, images), images), None
    except (FurrowError, OSError) as error:
        if served is None:
            raise
        files, missing = None, str(error)
    return ModelShown(name=model, source=source, files=files, files_missing=missing, served=served)


def _served(model: str, redis_url: str | None) -> Served | None:
    """The farm's model of this name. Without a farm, or for a path, None."""
    if Path(model).expanduser().exists() or farm_named(redis_url) is None:
        return None
    client = connect_to_farm(redis_url)
    spec = catalog.get_spec(client, model)
    if spec is None:
        if model == "demo" or "/" in model or model.lower().endswith(".gguf"):
            return None
        raise ModelNotFound(model, [one.name for one in catalog.list_specs(client)])
    assets = catalog.get_assets(client, model)
    forms = None if assets is None else forms_of(assets.chat_template, Vocabulary(assets, NoEncoder()))
    return Served(
        spec=spec,
        context_length=None if assets is None else assets.context_length,
        kv_tokens=None if assets is None else assets.kv_tokens,
        tool_format=None if forms is None else forms.calls,
        thinking=None if forms is None else forms.thinking is not None,
        template=None if assets is None else assets.chat_template,
        kernels={name: one.kernels for name, one in run(client, backends(model)).items()},
    )


def _lines(shown: ModelShown) -> list[tuple[str, Any]]:
    files, served = shown.files, shown.served
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
    size = sum(one.bytes for one in files.files)
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
        ("tensors", ", ".join(f"{one.tensors} {name} ({in_words(one.bytes)})" for name, one in files.types.items())),
    ]
    return [*lines, ("files", f"{len(files.files)} with {in_words(size)}: {_first(files)}")]


def _first(files: ModelSummary) -> str:
    first = files.files[0].path
    return first if len(files.files) == 1 else f"{first} …"


def _served_lines(served: Served) -> list[tuple[str, Any]]:
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
    return [*lines, *(("kernels", f"{name}: {', '.join(one)}") for name, one in sorted(served.kernels.items()))]


def in_numbers(count: int) -> str:
    """A number of parameters as people write it.

    >>> in_numbers(596_049_920)
    '596 M'
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
