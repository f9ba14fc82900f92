"""POST /v1/chat/completions, /v1/completions and /infill."""

from __future__ import annotations

from typing import Any

from litestar import Response, post

from api.openapi.openapi import taking
from api.routes.generation import Http, generate
from api.schemas.chat import ChatRequest, parse_chat
from api.schemas.completions import CompletionRequest, parse_completion
from api.schemas.infill import InfillRequest, parse_infill


@post("/v1/chat/completions", status_code=200, operation_class=taking(ChatRequest, open_ended=True))
async def create_chat_completion(request: Http) -> Response[Any]:
    """Answer a conversation, as one body or as server-sent events."""
    return await generate(request, parse_chat)


@post("/v1/completions", status_code=200, operation_class=taking(CompletionRequest, open_ended=True))
async def create_completion(request: Http) -> Response[Any]:
    """Continue one or several prompts, as one body or as server-sent events."""
    return await generate(request, parse_completion)


@post("/infill", status_code=200, operation_class=taking(InfillRequest, open_ended=True))
async def fill_gap(request: Http) -> Response[Any]:
    """Fill the gap between two texts, in llama.cpp's form, as one body or as server-sent events."""
    return await generate(request, parse_infill)
