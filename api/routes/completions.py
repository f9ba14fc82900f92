"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, post

from api.openapi.openapi import CompletionOperation
from api.routes.generation import generate
from api.schemas.completions import parse_completion


@post("/v1/completions", status_code=200, operation_class=CompletionOperation)
async def create_completion(request: Request[Any, Any, Any]) -> Response[Any]:
    """Continue one or several prompts, as one body or as server-sent events."""
    return await generate(request, parse_completion)
