"""/api/chat, /api/generate, /api/embed and /api/embeddings: what Ollama's clients ask models for."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
from litestar import Response, post

from api.generation.client_request import Caller
from api.http.errors import in_ollama_shape
from api.http.turns import off_loop
from api.routes.generation import Http, ParsedBody, model_for, process_of, serve
from api.schemas.bodies import taking
from api.schemas.ollama_answers import (
    ChatAnswer,
    EmbedAnswer,
    EmbeddingsAnswer,
    GenerateAnswer,
    OllamaMessage,
)
from api.schemas.ollama_request import (
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    ModelFields,
    OllamaChatRequest,
    OllamaInputs,
    chat_of,
    decode_text_request,
    embed_of,
    embeddings_of,
    generation_of,
)
from control.placement import farm


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
        made = await off_loop(len(body), generation_of, parsed, has_template=has_template, warnings=caller.warnings)
        return ParsedBody(body=made)

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
