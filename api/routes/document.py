"""The OpenAPI document as it is served: the framework's, completed.

The framework knows paths, parameters and annotated answers. Bodies that are written as bytes, the events of streams,
the headers of generating requests and the shape of all errors are added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Any, get_args

import msgspec
from litestar import Litestar, get
from litestar.enums import MediaType
from litestar.openapi import OpenAPIConfig
from litestar.types import ControllerRouterHandler

from api.schemas.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Error,
    MessageError,
    OllamaError,
)
from api.schemas.bodies import add_bodies, bound_number
from api.schemas.embeddings import EmbeddedByType, Embeddings, NativeVector, Reranked, Scores, TextScore
from api.schemas.llama_cpp import NativePart, NativeResult
from api.schemas.messages import CountedTokens, MessageEvent, MessageObject
from api.schemas.ollama import (
    ChatAnswer,
    EmbedAnswer,
    EmbeddingsAnswer,
    GenerateAnswer,
    OllamaModels,
    OllamaVersion,
    PullStatus,
    RunningModels,
    ShownModel,
)
from api.schemas.response_answers import RESPONSE_EVENTS, CompactedResponse, ResponseObject
from api.schemas.state import Readiness
from control.bounds import RANGES

JsonObject = dict[str, Any]


class OpenApiDocument:
    """The document of these routes, made when it is first read: that takes as long as the rest of the API's start."""

    def __init__(self, routes: Sequence[ControllerRouterHandler]) -> None:
        self._routes = routes
        self._making = Lock()

    @property
    def whole(self) -> JsonObject:
        with self._making:
            return self._whole

    @cached_property
    def _whole(self) -> JsonObject:
        config = OpenAPIConfig(title="Furrow", version="1", use_handler_docstrings=True)
        described = Litestar(route_handlers=self._routes, openapi_config=config).openapi_schema
        add_bodies(described)
        return complete(described.to_schema())

    @cached_property
    def json(self) -> bytes:
        return msgspec.json.encode(self.whole)

    @cached_property
    def page(self) -> bytes:
        """For people; it loads nothing from any host."""
        from api.routes.reference import page

        return page(self.whole)


def document_routes(document: OpenApiDocument) -> list[ControllerRouterHandler]:
    """`/schema/openapi.json`, and `/schema` for people; threads make them, so that streams go on meanwhile."""

    @get("/schema/openapi.json", include_in_schema=False, media_type=MediaType.JSON, sync_to_thread=True)
    def as_json() -> bytes:
        return document.json

    @get("/schema", include_in_schema=False, media_type=MediaType.HTML, sync_to_thread=True)
    def as_page() -> bytes:
        return document.page

    return [as_json, as_page]


class OperationAnswer(msgspec.Struct, frozen=True):
    """The answer of an operation with status 200: a body, events with data of these types, lines, or several of them;
    nothing: none."""

    whole: Any = None
    events: tuple[Any, ...] = ()
    lines: tuple[Any, ...] = ()
    """Types of the lines of a stream of JSON."""
    unready: Any = None
    """The body with status 503, where that is not an error."""
    refusal: Any = Error


_MESSAGE_EVENTS = get_args(MessageEvent)
_RESPONSE = OperationAnswer(ResponseObject, (*RESPONSE_EVENTS, Error))
_EVENTS = (ChatCompletionChunk, CompletionChunk, NativePart, NativeResult, *RESPONSE_EVENTS, *_MESSAGE_EVENTS, Error)

ANSWERS: dict[str, OperationAnswer] = {
    "/v1/chat/completions": OperationAnswer(ChatCompletion, (ChatCompletionChunk, Error)),
    "/v1/completions": OperationAnswer(Completion, (CompletionChunk, Error)),
    "/infill": OperationAnswer(NativeResult, (NativePart, NativeResult, Error)),
    "/completion": OperationAnswer(NativeResult | list[NativeResult], (NativePart, NativeResult, Error)),
    "post /v1/responses": _RESPONSE,
    "get /v1/responses/{response_id}": _RESPONSE,
    "/v1/responses/{response_id}/cancel": OperationAnswer(ResponseObject),
    "/v1/messages": OperationAnswer(MessageObject, _MESSAGE_EVENTS, refusal=MessageError),
    "/v1/messages/count_tokens": OperationAnswer(CountedTokens, refusal=MessageError),
    "/v1/responses/compact": OperationAnswer(CompactedResponse),
    "/v1/requests/{rid}/events": OperationAnswer(None, _EVENTS),
    "/v1/embeddings": OperationAnswer(Embeddings),
    "/v2/embed": OperationAnswer(EmbeddedByType),
    "/embedding": OperationAnswer(list[NativeVector]),
    "/embed": OperationAnswer(list[list[float]]),
    "/v1/rerank": OperationAnswer(Reranked | list[TextScore]),
    "/score": OperationAnswer(Scores),
    "/api/chat": OperationAnswer(ChatAnswer, lines=(ChatAnswer, OllamaError), refusal=OllamaError),
    "/api/generate": OperationAnswer(GenerateAnswer, lines=(GenerateAnswer, OllamaError), refusal=OllamaError),
    "/api/embed": OperationAnswer(EmbedAnswer, refusal=OllamaError),
    "/api/embeddings": OperationAnswer(EmbeddingsAnswer, refusal=OllamaError),
    "/api/tags": OperationAnswer(OllamaModels, refusal=OllamaError),
    "/api/ps": OperationAnswer(RunningModels, refusal=OllamaError),
    "/api/version": OperationAnswer(OllamaVersion, refusal=OllamaError),
    "/api/show": OperationAnswer(ShownModel, refusal=OllamaError),
    "/api/pull": OperationAnswer(PullStatus, lines=(PullStatus, OllamaError), refusal=OllamaError),
    "/api/delete": OperationAnswer(PullStatus, refusal=OllamaError),
    "/ready": OperationAnswer(Readiness, unready=Readiness),
}
"""By path, or by method and path."""


def answer_of(method: str, path: str) -> OperationAnswer | None:
    return ANSWERS.get(path) or ANSWERS.get(f"{method} {path}")


METHODS = ("get", "post", "put", "patch", "delete")
_ERROR = {"$ref": "#/components/responses/Error"}
_HEADERS: list[JsonObject] = [
    {
        "name": "Last-Event-ID",
        "description": "The id of the last event received: the stream continues after it, on any API process.",
        "schema": {"type": "string", "pattern": r"^[0-9a-f]{32}:[0-9]{1,9}\.[0-9]{1,9}(,[0-9]{1,9}\.[0-9]{1,9})*$"},
        "example": "1f0c8a52e9d24c0f9e6a7b3d5c418f20:17.1",
    },
    {
        "name": "Idempotency-Key",
        "description": "The same key with the same body joins the existing request; with another body it is a 409.",
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    },
    {
        "name": "X-On-Disconnect",
        "description": "Action when the last client leaves: cancel, continue, or cancel after a number of seconds.",
        "schema": {"anyOf": [{"enum": ["cancel", "continue"]}, {"type": "string", "pattern": "^[0-9]{1,8}$"}]},
    },
]


def complete(document: JsonObject) -> JsonObject:
    """A copy of the framework's document with these additions."""
    completed: JsonObject = msgspec.json.decode(msgspec.json.encode(document))
    components = completed.setdefault("components", {})
    references, schemas = _schemas()
    others: JsonObject = components.get("schemas", {})
    if twice := [name for name in schemas if name in others and schemas[name] != others[name]]:
        raise ValueError(f"two types are named alike, and one would be shown for the other: {', '.join(twice)}")
    components["schemas"] = dict(sorted((others | schemas).items()))
    content = {"application/json": {"schema": references[Error]}}
    components["responses"] = {"Error": {"description": "The error, in OpenAI's shape.", "content": content}}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}}
    completed["security"] = [{"key": []}, {}]
    for path, methods in completed["paths"].items():
        for method in METHODS:
            if method in methods:
                _complete_operation(methods[method], answer_of(method, path), references)
                for parameter in methods[method].get("parameters", []):
                    if parameter["name"] in RANGES:
                        bound_number(parameter["schema"], RANGES[parameter["name"]])
    return completed


def _schemas() -> tuple[dict[Any, JsonObject], JsonObject]:
    """References to the answers' types, and their schemas by name."""
    kinds = {
        kind
        for each in ANSWERS.values()
        for kind in (each.whole, each.unready, each.refusal, *each.events, *each.lines)
    }
    ordered = sorted(kinds - {None}, key=str)
    references, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        _require_defaults(schema)
    return dict(zip(ordered, references, strict=True)), schemas


def _require_defaults(schema: JsonObject) -> None:
    """In an answer a field with a default is always there."""
    for name, property_ in schema.get("properties", {}).items():
        if "default" in property_:
            del property_["default"]
            schema.setdefault("required", []).append(name)


def _complete_operation(
    operation: JsonObject, answer: OperationAnswer | None, references: dict[Any, JsonObject]
) -> None:
    text = operation.get("description") or ""
    operation["summary"] = text.partition("\n")[0].partition(". ")[0].rstrip(".") or operation.get("summary", "")
    responses: JsonObject = operation["responses"]
    # The framework's own shape of a refusal is never sent.
    operation["responses"] = {status: each for status, each in responses.items() if status < "4"}
    operation["responses"] |= {"4XX": _ERROR, "5XX": _ERROR}
    for response in operation["responses"].values():
        if not response.get("headers", True):
            del response["headers"]
    if answer is None:
        return
    if answer.refusal is not Error:
        content = {"application/json": {"schema": references[answer.refusal]}}
        refusal: JsonObject = {"description": "The error.", "content": content}
        operation["responses"] |= {"4XX": refusal, "5XX": refusal}
    content = {}
    if answer.whole is not None:
        content["application/json"] = {"schema": references[answer.whole]}
    if answer.events:
        content["text/event-stream"] = _stream([references[kind] for kind in answer.events])
    if answer.lines:
        content["application/x-ndjson"] = _lines([references[kind] for kind in answer.lines])
    if answer.events or answer.lines:
        parameters = {parameter["name"].lower() for parameter in operation.get("parameters", [])}
        headers = _HEADERS if operation.get("requestBody") else _HEADERS[:1]
        headers = headers if answer.events else _HEADERS[1:]  # lines have no ids
        operation.setdefault("parameters", []).extend(
            {"in": "header", "required": False, **header}
            for header in headers
            if header["name"].lower() not in parameters
        )
    if content:
        operation["responses"]["200"] = {"description": "The answer.", "content": content}
    else:
        del operation["responses"]["200"]
    if answer.unready is not None:
        content = {"application/json": {"schema": references[answer.unready]}}
        operation["responses"]["503"] = {"description": "Not ready.", "content": content}


def _stream(kinds: list[JsonObject]) -> JsonObject:
    """Server-sent events; OpenAPI 3.1 has no field for the types of their data."""
    text = "Events with `id: <request>:<seq>.<part>`, comments between them, `data: [DONE]` at the end."
    return {"schema": {"type": "string", "description": text}, "x-event-data": {"anyOf": kinds}}


def _lines(kinds: list[JsonObject]) -> JsonObject:
    """Lines of JSON; OpenAPI 3.1 has no field for the types of lines either."""
    text = "Lines of JSON, with no empty ones; the last one has `done: true`, or an error."
    return {"schema": {"type": "string", "description": text}, "x-line-data": {"anyOf": kinds}}
