"""Types of the answers of /v1/messages for the OpenAPI document; see answers.py."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from api.openapi.answers import Shape

Unset = UnsetType


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
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"]


class ThinkingTokens(Shape):
    thinking_tokens: int


class MessageUsage(Shape):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | Unset = UNSET
    cache_read_input_tokens: int | Unset = UNSET
    output_tokens_details: ThinkingTokens | Unset = UNSET
    service_tier: str | Unset = UNSET


class AppliedEdit(Shape):
    type: Literal["clear_tool_uses_20250919", "clear_thinking_20251015"]
    cleared_input_tokens: int
    cleared_tool_uses: int | Unset = UNSET
    cleared_thinking_turns: int | Unset = UNSET


class AppliedEdits(Shape):
    applied_edits: list[AppliedEdit]


class MessageAnswer(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | Unset = UNSET


class BlockDelta(Shape):
    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: str | Unset = UNSET
    thinking: str | Unset = UNSET
    signature: str | Unset = UNSET
    partial_json: str | Unset = UNSET


class StopDelta(Shape):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageErrorObject(Shape):
    type: str
    message: str
    code: str | Unset | None = UNSET
    details: dict[str, Any] | Unset = UNSET
    """Machine-readable facts, under an `error_code`."""


class MessageError(Shape):
    """Anthropic's error body, and the data of an error event."""

    type: Literal["error"]
    error: MessageErrorObject
    request_id: str | None


class MessageStart(Shape, tag_field="type", tag="message_start"):
    message: MessageAnswer


class Ping(Shape, tag_field="type", tag="ping"):
    pass


class BlockStart(Shape, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockGrows(Shape, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(Shape, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnds(Shape, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    context_management: AppliedEdits | Unset = UNSET


class MessageStop(Shape, tag_field="type", tag="message_stop"):
    pass


MESSAGE_EVENTS = (MessageStart, Ping, BlockStart, BlockGrows, BlockStop, MessageEnds, MessageStop, MessageError)


class OriginalTokens(Shape):
    original_input_tokens: int


class CountedTokens(Shape):
    input_tokens: int
    context_management: OriginalTokens | Unset = UNSET
