"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from typing import Any

from litestar import Response, post
from msgspec import UNSET

from api.generation.client_request import Caller, count_tokens
from api.generation.context import edited
from api.http.errors import in_anthropic_shape
from api.http.turns import off_loop
from api.routes.generation import (
    Http,
    ParsedBody,
    authenticate,
    caller_of,
    finish_headers,
    model_for,
    refused,
    serve,
    text_of,
)
from api.schemas.answers import encode
from api.schemas.bodies import taking
from api.schemas.messages import (
    CountedTokens,
    CountTokensRequest,
    MessageRequest,
    OriginalTokens,
    parse_count,
    parse_message,
)


@post(
    "/v1/messages",
    status_code=200,
    operation_class=taking(MessageRequest, open_ended=True),
    after_request=in_anthropic_shape,
)
async def create_message(request: Http) -> Response[Any]:
    """Answer a conversation of content blocks, as one body or as server-sent events."""

    async def read(body: bytes, caller: Caller) -> ParsedBody:
        parsed = await off_loop(len(body), parse_message, body, caller.warnings)
        size = len(body)
        if parsed.edits is not None:
            parsed, _ = await edited(parsed, await model_for(request, parsed.model), size, caller.images)
        return ParsedBody(body=parsed)

    return await serve(request, read)


@post(
    "/v1/messages/count_tokens",
    status_code=200,
    operation_class=taking(CountTokensRequest, open_ended=True),
    after_request=in_anthropic_shape,
)
async def count_message_tokens(request: Http) -> Response[Any]:
    """Count the tokens of the prompt that the same message has."""
    caller = caller_of(request)
    try:
        authenticate(request)
        async with text_of(request) as body:
            parsed = await off_loop(len(body), parse_count, body, caller.warnings)
            size = len(body)
            served = await model_for(request, parsed.model)
            edits = parsed.edits is not None
            parsed, original = await edited(parsed, served, size, caller.images)
            tokens = await count_tokens(parsed, served, size, caller.images)
        counted = CountedTokens(tokens, OriginalTokens(original or tokens) if edits else UNSET)
        response = Response(
            encode(counted),
            media_type="application/json",
            headers={"x-request-id": caller.rid},
        )
        finish_headers(response, caller)
        return response
    except Exception as error:
        return refused(error, caller, None)
