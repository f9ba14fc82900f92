"""What /v1/messages answers, as types: they are the OpenAPI document's, and tests hold what is served against them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from api.schemas.answers import Shape

# --- blocks ---


class TextBlock(Shape, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Shape, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Shape, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock

# --- the message ---


class ThinkingTokens(Shape):
    thinking_tokens: int


class MessageUsage(Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    service_tier: Literal["standard"] | UnsetType = UNSET


class MessageAnswer(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int


# --- events ---


class MessageStart(Shape, tag_field="type", tag="message_start"):
    message: MessageAnswer


class Ping(Shape, tag_field="type", tag="ping"):
    pass


class BlockStart(Shape, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(Shape, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Shape, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Shape, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Shape, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Shape, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Shape, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Shape):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Shape, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Shape, tag_field="type", tag="message_stop"):
    pass


class AnthropicErrorObject(Shape):
    type: str
    message: str
    code: str | UnsetType = UNSET


class AnthropicError(Shape, tag_field="type", tag="error"):
    """Of these routes; after a stream's first byte it comes as an event."""

    error: AnthropicErrorObject
    request_id: str | None


MESSAGE_EVENTS = (
    *(MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop),
    AnthropicError,
)
