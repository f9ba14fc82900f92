"""Which type each operation answers with, where its handler writes bytes; the others' types are their annotations."""

from __future__ import annotations

from typing import Any

import msgspec

from api.openapi.answer_items import (
    MESSAGE_EVENTS,
    CountedTokens,
    MessageAnswer,
    MessageError,
    ResponseAnswer,
    ResponseEvent,
)
from api.openapi.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Error,
    Health,
    Readiness,
)


class Answered(msgspec.Struct, frozen=True):
    """What an operation answers with status 200: a body, or events with data of these types, or as was asked.

    Neither: it always refuses.
    """

    whole: Any = None
    events: tuple[Any, ...] = ()
    unready: Any = None
    """The body with status 503, where that is no error but an answer, too."""
    refusal: Any = Error


_RESPONSE = Answered(ResponseAnswer, (ResponseEvent, Error))
_EVENTS = (ChatCompletionChunk, CompletionChunk, ResponseEvent, *MESSAGE_EVENTS, Error)

ANSWERED: dict[str, Answered] = {
    "/v1/chat/completions": Answered(ChatCompletion, (ChatCompletionChunk, Error)),
    "/v1/completions": Answered(Completion, (CompletionChunk, Error)),
    "post /v1/responses": _RESPONSE,
    "get /v1/responses/{response_id}": _RESPONSE,
    "/v1/responses/{response_id}/cancel": Answered(ResponseAnswer),
    "/v1/messages": Answered(MessageAnswer, MESSAGE_EVENTS, refusal=MessageError),
    "/v1/messages/count_tokens": Answered(CountedTokens, refusal=MessageError),
    "/v1/responses/compact": Answered(),
    "/v1/requests/{rid}/events": Answered(None, _EVENTS),
    "/v1/embeddings": Answered(),
    "/health": Answered(Health),
    "/ready": Answered(Readiness, unready=Readiness),
}
"""By path, or by method and path where another method of it is described by its annotation."""


def answered(method: str, path: str) -> Answered | None:
    return ANSWERED.get(path) or ANSWERED.get(f"{method} {path}")
