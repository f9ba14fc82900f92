"""POST /v1/embeddings: a clear refusal, since the models that are served here generate text."""

from __future__ import annotations

from typing import Any, NoReturn

from litestar import Request, post

from api.openapi.openapi import EmbeddingOperation
from api.routes.generation import authenticate, process_of, text_of
from api.schemas.decoding import decode_body
from api.schemas.embeddings import EmbeddingRequest
from control.errors import RequestError


@post("/v1/embeddings", status_code=200, operation_class=EmbeddingOperation)
async def create_embedding(request: Request[Any, Any, Any]) -> NoReturn:
    """Always 400 for a model that is served: it generates text and has no embeddings to give."""
    authenticate(request)
    process = process_of(request)
    async with text_of(request) as body:
        asked = decode_body(body, EmbeddingRequest)
    served = await process.models.resolve(asked.model)
    raise RequestError(
        f"The model '{served.name}' generates text and gives no embeddings. Use a server for embedding models.",
        param="model",
        code="embeddings_not_supported",
    )
