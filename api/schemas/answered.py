"""Which operation answers with which types, where the handler writes its own bytes; the others have annotations."""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Error,
    Health,
    Readiness,
)
from api.schemas.message_answers import MESSAGE_EVENTS, AnthropicError, MessageAnswer, TokenCount
from api.schemas.response_answers import RESPONSE_EVENTS, ResponseObject


class Answered(msgspec.Struct, frozen=True):
    """What an operation answers with status 200: a body, or events with data of these types, or as was asked.

    Neither: it always refuses.
    """

    whole: Any = None
    events: tuple[Any, ...] = ()
    unready: Any = None
    """The body with status 503, where that is no error but an answer, too."""
    error: Any = Error


_CHUNKS = (ChatCompletionChunk, CompletionChunk)
_BY_PATH: dict[str, Answered] = {
    "/v1/chat/completions": Answered(ChatCompletion, (ChatCompletionChunk, Error)),
    "/v1/completions": Answered(Completion, (CompletionChunk, Error)),
    "/v1/responses": Answered(ResponseObject, RESPONSE_EVENTS),
    "get /v1/responses/{response_id}": Answered(ResponseObject, RESPONSE_EVENTS),
    "/v1/responses/{response_id}/cancel": Answered(ResponseObject),
    "/v1/messages": Answered(MessageAnswer, MESSAGE_EVENTS, error=AnthropicError),
    "/v1/messages/count_tokens": Answered(TokenCount, error=AnthropicError),
    "/v1/requests/{rid}/events": Answered(None, (*_CHUNKS, Error, *RESPONSE_EVENTS, *MESSAGE_EVENTS)),
    "/v1/embeddings": Answered(),
    "/health": Answered(Health),
    "/ready": Answered(Readiness, unready=Readiness),
}


def answered(method: str, path: str) -> Answered | None:
    """None for an operation whose annotation says it."""
    return _BY_PATH.get(f"{method} {path}", _BY_PATH.get(path))


def answer_types() -> set[Any]:
    """All types that are answered."""
    kinds = {kind for each in _BY_PATH.values() for kind in (each.whole, *each.events, each.unready, each.error)}
    return kinds - {None}
