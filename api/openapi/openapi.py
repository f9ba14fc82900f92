"""The request bodies in the OpenAPI document; handlers read them raw, to decode them strictly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import msgspec
from litestar.openapi.spec import OpenAPI, OpenAPIMediaType, Operation, RequestBody

from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.embeddings import EmbeddingRequest
from api.schemas.message_request import CountTokensRequest, MessageRequest
from api.schemas.responses import ResponseRequest
from api.schemas.tokens import DetokenizeRequest, TokenizeRequest

_BODIES = (
    *(ChatRequest, CompletionRequest, ResponseRequest, MessageRequest, CountTokensRequest),
    *(EmbeddingRequest, TokenizeRequest, DetokenizeRequest),
)
_references, _schemas = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")


def add_bodies(document: OpenAPI) -> None:
    """Put the schemas that the operations below refer to beside those that the framework found by itself."""
    # Plain mappings are written as they are, though the types name the framework's own classes.
    cast(dict[str, Any], document.components.schemas).update(_schemas)


def _body(kind: type[msgspec.Struct]) -> RequestBody:
    schema = cast(Any, _references[_BODIES.index(cast(Any, kind))])
    return RequestBody(required=True, content={"application/json": OpenAPIMediaType(schema=schema)})


@dataclass
class ChatOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(ChatRequest)


@dataclass
class CompletionOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(CompletionRequest)


@dataclass
class EmbeddingOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(EmbeddingRequest)


@dataclass
class ResponseOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(ResponseRequest)


@dataclass
class MessageOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(MessageRequest)


@dataclass
class CountTokensOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(CountTokensRequest)


@dataclass
class TokenizeOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(TokenizeRequest)


@dataclass
class DetokenizeOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(DetokenizeRequest)
