"""Types of the answers of handlers that write bytes; the others have annotations."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from api.errors.errors import Error, MessageError, OllamaError
from api.schemas.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    NativePart,
    NativeResult,
    Readiness,
)
from api.schemas.message_answers import CountedTokens, MessageEvent, MessageObject
from api.schemas.ollama_answers import (
    ChatAnswer,
    EmbedAnswer,
    EmbeddingsAnswer,
    GenerateAnswer,
    OllamaModels,
    OllamaVersion,
    PullStatus,
    RunningModels,
    ShownModel,
)
from api.schemas.response_answers import RESPONSE_EVENTS, CompactedResponse, ResponseObject
from api.schemas.vector_answers import EmbeddedByType, Embeddings, NativeVector, Reranked, Scores, TextScore


class Answered(msgspec.Struct, frozen=True):
    """The answer of an operation with status 200: a body, events with data of these types, lines, or several of them;
    nothing: none."""

    whole: Any = None
    events: tuple[Any, ...] = ()
    lines: tuple[Any, ...] = ()
    """Types of the lines of a stream of JSON."""
    unready: Any = None
    """The body with status 503, where that is not an error."""
    refusal: Any = Error


_MESSAGE_EVENTS = get_args(MessageEvent)
_RESPONSE = Answered(ResponseObject, (*RESPONSE_EVENTS, Error))
_EVENTS = (ChatCompletionChunk, CompletionChunk, NativePart, NativeResult, *RESPONSE_EVENTS, *_MESSAGE_EVENTS, Error)

ANSWERED: dict[str, Answered] = {
    "/v1/chat/completions": Answered(ChatCompletion, (ChatCompletionChunk, Error)),
    "/v1/completions": Answered(Completion, (CompletionChunk, Error)),
    "/infill": Answered(NativeResult, (NativePart, NativeResult, Error)),
    "/completion": Answered(NativeResult | list[NativeResult], (NativePart, NativeResult, Error)),
    "post /v1/responses": _RESPONSE,
    "get /v1/responses/{response_id}": _RESPONSE,
    "/v1/responses/{response_id}/cancel": Answered(ResponseObject),
    "/v1/messages": Answered(MessageObject, _MESSAGE_EVENTS, refusal=MessageError),
    "/v1/messages/count_tokens": Answered(CountedTokens, refusal=MessageError),
    "/v1/responses/compact": Answered(CompactedResponse),
    "/v1/requests/{rid}/events": Answered(None, _EVENTS),
    "/v1/embeddings": Answered(Embeddings),
    "/v2/embed": Answered(EmbeddedByType),
    "/embedding": Answered(list[NativeVector]),
    "/embed": Answered(list[list[float]]),
    "/v1/rerank": Answered(Reranked | list[TextScore]),
    "/score": Answered(Scores),
    "/api/chat": Answered(ChatAnswer, lines=(ChatAnswer, OllamaError), refusal=OllamaError),
    "/api/generate": Answered(GenerateAnswer, lines=(GenerateAnswer, OllamaError), refusal=OllamaError),
    "/api/embed": Answered(EmbedAnswer, refusal=OllamaError),
    "/api/embeddings": Answered(EmbeddingsAnswer, refusal=OllamaError),
    "/api/tags": Answered(OllamaModels, refusal=OllamaError),
    "/api/ps": Answered(RunningModels, refusal=OllamaError),
    "/api/version": Answered(OllamaVersion, refusal=OllamaError),
    "/api/show": Answered(ShownModel, refusal=OllamaError),
    "/api/pull": Answered(PullStatus, lines=(PullStatus, OllamaError), refusal=OllamaError),
    "/api/delete": Answered(PullStatus, refusal=OllamaError),
    "/ready": Answered(Readiness, unready=Readiness),
}
"""By path, or by method and path."""


def answered(method: str, path: str) -> Answered | None:
    return ANSWERED.get(path) or ANSWERED.get(f"{method} {path}")
