"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, post

from api.openapi.openapi import ChatOperation
from api.routes.generation import generate
from api.schemas.chat import parse_chat


@post("/v1/chat/completions", status_code=200, operation_class=ChatOperation)
async def create_chat_completion(request: Request[Any, Any, Any]) -> Response[Any]:
    """Answer a conversation, as one body or as server-sent events."""
    return await generate(request, parse_chat)
