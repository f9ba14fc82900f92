"""Error bodies, for the clients of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from api.schemas.answers import Shape

UNTHREADED = "thread_unsupported_request"
"""Anthropic's code for a request that can't be part of a conversation that the server keeps."""


class ErrorObject(Shape):
    message: str
    type: str
    param: str | None
    """The parameter at fault, if any."""
    code: str | None


class Error(Shape):
    """OpenAI's error body; after a stream's first byte it is the data of an event."""

    error: ErrorObject


class ErrorDetails(Shape):
    """Facts for programs."""

    error_code: str
    unsupported: list[str]


class MessageErrorObject(Shape):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET
    code: str | UnsetType | None = UNSET


class MessageError(Shape, tag_field="type", tag="error"):
    """Anthropic's error body, and the data of an error event."""

    error: MessageErrorObject
    request_id: str | None


class OllamaError(Shape):
    """Ollama's error body, and the last line of a stream that fails."""

    error: str
