"""POST /v1/embeddings, /v2/embed, /embedding, /embed, /v1/rerank and /score."""

from __future__ import annotations

from typing import Any

from litestar import Response, post

from api.routes.generation import Http, generate
from api.schemas.bodies import taking
from api.schemas.embeddings import (
    CohereEmbedRequest,
    EmbeddingRequest,
    NativeEmbedRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
    parse_cohere,
    parse_embedding,
    parse_native_embedding,
    parse_rerank,
    parse_score,
    parse_tei_embedding,
)


@post("/v1/embeddings", status_code=200, operation_class=taking(EmbeddingRequest, open_ended=True))
async def create_embedding(request: Http) -> Response[Any]:
    """A vector of each text or list of token ids, from an embedding model."""
    return await generate(request, parse_embedding)


@post("/v2/embed", status_code=200, operation_class=taking(CohereEmbedRequest, open_ended=True))
async def embed(request: Http) -> Response[Any]:
    """A vector of each text from an embedding model, in Cohere's form."""
    return await generate(request, parse_cohere)


@post("/embedding", status_code=200, operation_class=taking(NativeEmbedRequest, open_ended=True))
async def embed_in_llama_cpp_form(request: Http) -> Response[Any]:
    """A vector of each text or list of token ids from an embedding model, in llama.cpp's form."""
    return await generate(request, parse_native_embedding)


@post("/embed", status_code=200, operation_class=taking(TeiEmbedRequest, open_ended=True))
async def embed_in_tei_form(request: Http) -> Response[Any]:
    """A vector of each text from an embedding model, in the form of text-embeddings-inference."""
    return await generate(request, parse_tei_embedding)


@post("/v1/rerank", status_code=200, operation_class=taking(RerankRequest, open_ended=True))
async def rerank(request: Http) -> Response[Any]:
    """Documents in the order of their relevance to a query, in Cohere's and Jina's form; with `texts` in that of
    text-embeddings-inference."""
    return await generate(request, parse_rerank)


@post("/score", status_code=200, operation_class=taking(ScoreRequest, open_ended=True))
async def score(request: Http) -> Response[Any]:
    """A score of each pair of texts, in vLLM's form."""
    return await generate(request, parse_score)
