"""POST /v1/embeddings: a refusal, since the served models generate text."""

from __future__ import annotations

from typing import NoReturn

from litestar import post

from api.openapi.openapi import taking
from api.routes.generation import Http, authenticate, process_of, text_of
from api.schemas.client_warnings import Warnings
from api.schemas.decoding import decode_request
from api.schemas.embeddings import EmbeddingRequest
from control.errors import RequestError


@post("/v1/embeddings", status_code=200, operation_class=taking(EmbeddingRequest, open_ended=True))
async def create_embedding(request: Http) -> NoReturn:
    """Always 400: the served models generate text and have no embeddings."""
    authenticate(request)
    process = process_of(request)
    async with text_of(request) as body:
        asked = decode_request(body, EmbeddingRequest, Warnings())
    served = await process.models.resolve(asked.model)
    raise RequestError(
        f"The model '{served.name}' generates text and gives no embeddings. Use a server for embedding models.",
        param="model",
        code="embeddings_not_supported",
    )
