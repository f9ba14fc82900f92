"""The routes of Ollama's clients: /api/chat, /api/generate, /api/embed and /api/embeddings for texts and vectors, and
/api/tags, /api/show, /api/ps, /api/version, /api/pull and /api/delete for the models themselves.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Response, delete, get, post
from litestar.response import Stream

from api.generation.client_request import Caller
from api.generation.ollama_rendering import OllamaRenderer
from api.generation.session import STREAM_HEADERS
from api.http.connection import client_of
from api.http.errors import ClientDisconnected, Unauthorized, in_ollama_shape, ollama_error, problem
from api.http.gate import is_still_operator, operators_only
from api.http.turns import off_loop
from api.models.models import ServedModel
from api.process import Process
from api.routes.farm.threaded import body_of, on_farm
from api.routes.generation import Http, ParsedBody, identity_of, model_for, process_of, serve, text_of
from api.schemas.answers import Shape
from api.schemas.bodies import taking
from api.schemas.decoding import decode_body
from api.schemas.ollama import (
    LATEST,
    ChatAnswer,
    EmbedAnswer,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateAnswer,
    GenerateRequest,
    ListedModel,
    ModelDetails,
    ModelFields,
    ModelToDelete,
    ModelToPull,
    ModelToShow,
    OllamaChatRequest,
    OllamaInputs,
    OllamaMessage,
    OllamaModels,
    OllamaVersion,
    PullStatus,
    RunningModel,
    RunningModels,
    ShownModel,
    chat_of,
    decode_text_request,
    embed_of,
    embeddings_of,
    generation_of,
)
from control.errors import ModelUnavailable, SettingsError
from control.operations import desired
from control.operations.spec import build_spec
from control.placement import farm
from control.records import catalog
from control.records.backend import Backend
from control.redis.clients import SyncRedis
from control.replicas.model_overviews import Overview
from control.settings import demo_model
from control.version import VERSION


@post(
    "/api/chat",
    status_code=200,
    operation_class=taking(OllamaChatRequest, open_ended=True),
    after_request=in_ollama_shape,
)
async def chat(request: Http) -> Response[Any]:
    """Answer a conversation, as lines of JSON or as one body."""

    async def read(body: bytes, caller: Caller) -> ParsedBody | Response[Any]:
        parsed = await off_loop(len(body), decode_text_request, body, OllamaChatRequest, caller.warnings)
        if not parsed.messages:
            model = await _loaded(request, parsed)
            answer = ChatAnswer(model=model, created_at=_now(), message=OllamaMessage(), done=True, done_reason="load")
            return _response(answer, caller)
        return ParsedBody(body=await off_loop(len(body), chat_of, parsed, caller.warnings))

    return await serve(request, read)


@post(
    "/api/generate",
    status_code=200,
    operation_class=taking(GenerateRequest, open_ended=True),
    after_request=in_ollama_shape,
)
async def generate_text(request: Http) -> Response[Any]:
    """Answer a prompt, continue it as it is (`raw`), or fill the gap before a `suffix`; lines of JSON or one body."""

    async def read(body: bytes, caller: Caller) -> ParsedBody | Response[Any]:
        parsed = await off_loop(len(body), decode_text_request, body, GenerateRequest, caller.warnings)
        if not parsed.has_prompt:
            model = await _loaded(request, parsed)
            answer = GenerateAnswer(model=model, created_at=_now(), done=True, done_reason="load")
            return _response(answer, caller)
        served = await model_for(request, parsed.model)
        has_template = served.template is not None
        completion = await off_loop(
            len(body), generation_of, parsed, has_template=has_template, warnings=caller.warnings
        )
        return ParsedBody(body=completion)

    return await serve(request, read)


@post(
    "/api/embed",
    status_code=200,
    operation_class=taking(EmbedRequest, open_ended=True),
    after_request=in_ollama_shape,
)
async def embed_texts(request: Http) -> Response[Any]:
    """A vector of each text, from an embedding model."""

    async def read(body: bytes, caller: Caller) -> ParsedBody | Response[Any]:
        parsed = await off_loop(len(body), embed_of, body, caller.warnings)
        if isinstance(parsed, OllamaInputs):
            return ParsedBody(body=parsed)
        return _response(EmbedAnswer(model=await _loaded(request, parsed), embeddings=[]), caller)

    return await serve(request, read)


@post(
    "/api/embeddings",
    status_code=200,
    operation_class=taking(EmbeddingsRequest, open_ended=True),
    after_request=in_ollama_shape,
)
async def embed_text(request: Http) -> Response[Any]:
    """A vector of one text, in Ollama's earlier form."""

    async def read(body: bytes, caller: Caller) -> ParsedBody | Response[Any]:
        parsed = await off_loop(len(body), embeddings_of, body, caller.warnings)
        if isinstance(parsed, OllamaInputs):
            return ParsedBody(body=parsed)
        await _loaded(request, parsed)
        return _response(EmbeddingsAnswer(embedding=[]), caller)

    return await serve(request, read)


async def _loaded(request: Http, parsed: ModelFields) -> str:
    """The name of a model that a client wants to be ready, as it wrote it; one that sleeps is woken. Raises as
    `model_for`."""
    served = await model_for(request, parsed.model)
    await process_of(request).batches.run(served.name, farm.call_model(served.name))
    return parsed.model or served.name


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _response(answer: Any, caller: Caller) -> Response[Any]:
    headers = {"x-request-id": caller.rid}
    return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)


API_VERSION = "0.12.11"
"""The version of Ollama whose HTTP API is served: clients ask for it to know what they may send."""
_NEVER = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""The time of unloading of a model that stays until an operator unloads it."""
_HUBS = ("hf.co/", "huggingface.co/")
ARCHITECTURE = "furrow"
"""API processes do not know the type of a model; clients look for its context under this name."""
LINES_HEADERS = STREAM_HEADERS | {"content-type": OllamaRenderer.media_type}
_DONE = "success"
_LOOK_EVERY_S = 0.5
_REPEAT_EVERY_S = 10.0
"""A line of progress comes at least so often, also where nothing has changed."""


@get("/", include_in_schema=False)
async def root(request: Http) -> Response[str]:
    """The path that Ollama's clients ask to find its server. A browser is led to the console."""
    headers = {"vary": "accept"}
    if "text/html" in request.headers.get("accept", ""):
        return Response("", status_code=307, headers=headers | {"location": "console/"}, media_type="text/plain")
    return Response("Furrow is running", headers=headers, media_type="text/plain")


@get("/api/version")
async def ollama_version() -> Response[Any]:
    """The version of Ollama whose API this is, and that of this server."""
    return _answer(OllamaVersion(version=API_VERSION, furrow=VERSION))


@get("/api/tags")
async def list_tags(request: Http) -> Response[Any]:
    """Every model name that the caller may use."""
    process = process_of(request)
    return _answer(OllamaModels(models=[_listed(process, name) for name in await _names(request)]))


@get("/api/ps")
async def list_running(request: Http) -> Response[Any]:
    """The models that the caller may use and that are loaded now."""
    process = process_of(request)
    running = list[RunningModel]()
    for name in await _names(request):
        overview = process.models.overview(name)
        assets = process.models.assets(name)
        if overview is not None and overview.state == "loaded" and assets is not None:
            running.append(
                RunningModel(
                    name=name,
                    model=name,
                    size=_memory_bytes(overview),
                    digest=_digest(process, name),
                    details=_details(overview),
                    expires_at=_NEVER,
                    size_vram=_memory_bytes(overview, "cuda"),
                    context_length=assets.context_length,
                )
            )
    return _answer(RunningModels(models=running))


@post(
    "/api/show",
    status_code=200,
    operation_class=taking(ModelToShow, open_ended=True),
    after_request=in_ollama_shape,
)
async def show_model(request: Http) -> Response[Any]:
    """A model's capabilities, its context, its chat template and its defaults."""
    async with text_of(request) as body:
        name = decode_body(body, ModelToShow).name_of_model
        served = await model_for(request, name)
    overview = process_of(request).models.overview(name)
    assets = served.assets
    parameters = _parameters(assets.generation_config)
    info: dict[str, Any] = {
        "general.architecture": ARCHITECTURE,
        f"{ARCHITECTURE}.context_length": assets.context_length,
    }
    if assets.pooling is not None:
        info[f"{ARCHITECTURE}.embedding_length"] = assets.pooling.dimensions
    shown = ShownModel(
        modelfile="\n".join([f"FROM {served.name}", *(f"PARAMETER {line}" for line in parameters)]),
        parameters="\n".join(parameters),
        template=assets.chat_template or "",
        details=_details(overview),
        model_info=info,
        capabilities=capabilities_of(served),
        modified_at=_modified(assets.created),
    )
    return _answer(shown)


@post("/api/pull", status_code=200, guards=[operators_only], operation_class=taking(ModelToPull, open_ended=True))
async def pull_model(request: Http) -> Response[Any]:
    """Load a model, for operators: the demonstration model, or a repository of Hugging Face. Progress comes as lines of
    JSON; without `stream` the answer comes once it is loaded."""
    body = await body_of(request, ModelToPull)
    name, is_new = await on_farm(request, _desire, body.name_of_model)
    progress = _progress(request, name, is_new=is_new)
    if body.stream is not False:
        return Stream(_lines(progress), headers=LINES_HEADERS)
    async for _ in progress:
        pass
    return _answer(PullStatus(status=_DONE))


@delete("/api/delete", status_code=200, guards=[operators_only], operation_class=taking(ModelToDelete, open_ended=True))
async def delete_model(request: Http) -> Response[Any]:
    """Unload a model, for operators, once its running requests have finished. Its files stay on the hosts."""
    await on_farm(request, _unload, (await body_of(request, ModelToDelete)).name_of_model)
    return _answer(PullStatus(status=_DONE))


def _answer(answer: Shape) -> Response[Any]:
    return Response(msgspec.json.encode(answer), status_code=200, media_type="application/json")


async def _names(request: Http) -> list[str]:
    """Every model name that the caller may use. Raises as `identity_of`."""
    identity = identity_of(request)
    models = process_of(request).models
    if not models.reachable:
        await models.look()
    return [name for name in models.names if identity.may_use(name, models.real_name(name))]


def _listed(process: Process, name: str) -> ListedModel:
    overview = process.models.overview(name)
    return ListedModel(
        name=name,
        model=name,
        modified_at=_modified(overview.created if overview is not None else 0),
        size=_memory_bytes(overview),
        digest=_digest(process, name),
        details=_details(overview),
    )


def _modified(unix_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC)


def _memory_bytes(overview: Overview | None, devices: str = "") -> int:
    """Bytes that the ranks of a model hold, on devices whose names begin so."""
    replicas = overview.replicas if overview is not None else []
    beats = [beat for replica in replicas for beat in replica.beats if beat is not None]
    return sum(beat.memory_bytes for beat in beats if beat.device.startswith(devices))


def _backend(overview: Overview | None) -> Backend | None:
    """That of one replica; None before one has loaded."""
    replicas = overview.replicas if overview is not None else []
    return next((replica.backend for replica in replicas if replica.backend is not None), None)


def _digest(process: Process, name: str) -> str:
    """SHA-256 of the model's own name, the fingerprint of its files and its chat template. Clients take models with one
    digest for the same, and remember by it what a model can do."""
    models = process.models
    backend = _backend(models.overview(name))
    assets = models.assets(name)
    parts = [
        models.real_name(name),
        backend.weights if backend is not None else "",
        (assets.chat_template if assets is not None else None) or "",
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _details(overview: Overview | None) -> ModelDetails:
    backend = _backend(overview)
    return ModelDetails() if backend is None else ModelDetails(quantization_level=backend.quant or backend.dtype)


def _parameters(generation_config: dict[str, Any]) -> list[str]:
    """The model's defaults, a line each, in the names of Ollama's options."""
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    names |= {"repetition_penalty": "repeat_penalty", "max_new_tokens": "num_predict"}
    values = {option: generation_config.get(name) for name, option in names.items()}
    return [f"{option} {value}" for option, value in values.items() if isinstance(value, int | float)]


def capabilities_of(served: ServedModel) -> list[str]:
    """A model's capabilities, in Ollama's words."""
    kind = served.assets.kind
    if kind != "generate":
        return ["embedding"] if kind == "embed" else []
    abilities = {
        "tools": served.template is not None,  # the prompt describes them where the template takes none
        "insert": served.gaps is not None,
        "vision": served.images is not None,
        "thinking": served.forms.thinking is not None or bool(served.forms.text),
    }
    return ["completion", *(name for name, has in abilities.items() if has)]


def _desire(client: SyncRedis, name: str) -> tuple[str, bool]:
    """Have the model loaded that a client names; the farm's name for it, and True for one that it did not know."""
    own_name = _own_name(client, name)
    if own_name is not None:
        desired.load(client, desired.find_spec(client, own_name), None)
        return own_name, False
    name = name.removesuffix(LATEST)
    repository = name
    for hub in _HUBS:
        repository = repository.removeprefix(hub)
    source, _, file = repository.partition(":")
    is_path = source.startswith((".", "/", "~"))
    # A repository is served under the name by which the client asks for it.
    spec = build_spec(source, name=None if is_path else name, gguf=file or None, demo=demo_model())
    return spec.name, desired.load(client, spec, None).before == 0


def _unload(client: SyncRedis, name: str) -> None:
    desired.unload(client, _own_name(client, name) or name)


def _own_name(client: SyncRedis, name: str) -> str | None:
    """The farm's name for a model that it knows; no alias."""
    names = dict.fromkeys((name, name.removesuffix(LATEST)))
    return next((own for own in names if catalog.get_spec(client, own) is not None), None)


async def _progress(request: Http, name: str, *, is_new: bool) -> AsyncGenerator[PullStatus]:
    """The stages of a model until it is loaded; one that is new and fails is unloaded again.

    Raises SettingsError or ModelUnavailable for one that fails, ShuttingDown, ClientDisconnected, RedisUnavailable, and
    Unauthorized once the key has ended.
    """
    process = process_of(request)
    client = client_of(request.scope)
    clock = asyncio.get_running_loop().time
    last_status = PullStatus(status="pulling manifest")
    yielded_at = clock()
    yield last_status
    while True:
        await process.models.look()
        overview = process.models.overview(name)
        if overview is not None and overview.state == "loaded":
            yield PullStatus(status=_DONE)
            return
        cause = _failure(overview)
        if cause is not None and is_new:
            await on_farm(request, _unload, name)
            raise SettingsError(f"'{name}' can't be loaded, and is not desired any more: {cause}")
        if cause is not None:
            raise ModelUnavailable(name, "failed", cause)
        status = _status(overview)
        if status != last_status or clock() - yielded_at > _REPEAT_EVERY_S:
            yield status
            last_status = status
            yielded_at = clock()
        process.shutdown.refuse_when_draining()
        if client.has_left():
            raise ClientDisconnected
        if not await is_still_operator(request):
            raise Unauthorized("The API key of this request has ended. Use another one.")
        await asyncio.sleep(_LOOK_EVERY_S)


def _failure(overview: Overview | None) -> str | None:
    """The cause for which a replica of the newest revision failed to load; None where none did."""
    if overview is None:
        return None
    failed = (
        replica for replica in overview.replicas if replica.state == "failed" and replica.revision == overview.revision
    )
    return next((replica.detail for replica in failed), None)


def _status(overview: Overview | None) -> PullStatus:
    if overview is None:
        return PullStatus(status="waiting")
    status = PullStatus(status=overview.detail or overview.state)
    sizes = [(replica.done_bytes, replica.total_bytes) for replica in overview.replicas if replica.total_bytes]
    if sizes:
        status.completed, status.total = max(sizes, key=lambda size: size[0] / size[1])
    return status


async def _lines(progress: AsyncGenerator[PullStatus]) -> AsyncGenerator[bytes]:
    """Each as a line; an error is the last one."""
    try:
        async for status in progress:
            yield msgspec.json.encode(status) + b"\n"
    except ClientDisconnected:
        return
    except Exception as error:
        yield msgspec.json.encode(ollama_error(problem(error))) + b"\n"
